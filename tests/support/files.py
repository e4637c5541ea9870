"""Files of the current directory."""

import os


def written_files():
    """Return what changes if a file of the current directory is written or replaced."""
    found = {path: os.stat(path) for path in os.listdir()}
    return {
        path: (each.st_ino, each.st_mode, each.st_nlink, each.st_size, each.st_mtime_ns)
        for path, each in found.items()
    }
