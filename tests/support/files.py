"""What is written to files, and how large they may be."""

import resource
from contextlib import contextmanager
from pathlib import Path


def written_files(folder="."):
    """Return what changes if a file of a folder is written or replaced."""
    found = {path: path.stat() for path in Path(folder).iterdir()}
    return {
        path: (each.st_ino, each.st_mode, each.st_nlink, each.st_size, each.st_mtime_ns)
        for path, each in found.items()
    }


@contextmanager
def files_up_to(size):
    """Let no file become larger than a number of bytes, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
