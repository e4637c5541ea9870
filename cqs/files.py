"""Checks of input files, and atomic replacement of files."""

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_ROWS_BYTES = 2**26
"""Largest text file in bytes, 64 MiB; a row has less than 1 KiB."""


def check_input_file(path: str | Path, max_bytes: int = sys.maxsize) -> None:
    """Raise ValueError unless a path is a regular file of at most ``max_bytes`` bytes.

    Opening a pipe may block forever, and a device such as /dev/zero has no end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"'{path}' must be a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"'{path}' must have at most {max_bytes} bytes, got {status.st_size}")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file of at most 64 MiB.

    Raises:
        ValueError: The file is not a regular file, or is larger than 64 MiB.
        OSError: The file cannot be read.
    """
    check_input_file(path, _MAX_ROWS_BYTES)
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return list(file)


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` if the block succeeds.

    The temporary file is in the directory of ``path``, under a random name with the same suffix.
    After an error it is removed. If ``path`` is a symbolic link, its target is replaced.

    Args:
        path: The file to write, which may exist.

    Raises:
        ValueError: The path exists and is not a regular file, such as a device.
        OSError: The file cannot be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"path must be a new or a regular file, got '{path}'")
    partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}{target.suffix}")
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):  # the first error says more
            partial.unlink()
        raise
