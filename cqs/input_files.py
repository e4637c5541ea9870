"""Checks of input files before they are opened."""

import os
import stat
import sys
from pathlib import Path

_MAX_ROWS_BYTES = 2**26
"""Largest text file in bytes, 64 MiB; a row has less than 1 KiB."""


def check_input_file(path: str | Path, max_bytes: int = sys.maxsize) -> None:
    """Raise ValueError unless a path is a regular file of at most ``max_bytes`` bytes.

    Opening a pipe may block forever, and a device such as /dev/zero has no end.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"'{path}' must be a regular file")
    if found.st_size > max_bytes:
        raise ValueError(f"'{path}' must have at most {max_bytes} bytes, got {found.st_size}")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file of at most 64 MiB.

    Raises:
        ValueError: The file is not a regular file, is larger than 64 MiB, or is not UTF-8 text.
        OSError: The file cannot be read.
    """
    check_input_file(path, _MAX_ROWS_BYTES)
    with open(path, encoding="utf-8") as file:
        return list(file)
