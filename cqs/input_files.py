"""Checks of files before they are opened: regular ones, of bounded size."""

import os
import stat
import sys
from pathlib import Path

_MAX_ROWS_BYTES = 2**26
"""64 MiB: a row takes less than a KiB."""


def check_input_file(path: str | Path, max_bytes: int = sys.maxsize) -> None:
    """Raise ValueError unless a path names a regular file of at most so many bytes.

    To open a pipe may wait forever, and a device such as /dev/zero never ends.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"'{path}' must be a regular file")
    if found.st_size > max_bytes:
        raise ValueError(f"'{path}' must have at most {max_bytes} bytes, got {found.st_size}")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file of at most 64 MiB.

    Raises:
        ValueError: if it is no regular file, is too large, or is no UTF-8 text.
        OSError: if it cannot be read.
    """
    check_input_file(path, _MAX_ROWS_BYTES)
    with open(path, encoding="utf-8") as file:
        return list(file)
