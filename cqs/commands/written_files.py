"""What a command may write to."""

import os
from collections.abc import Iterable


def check_written(name: str, path: str, read: Iterable[str | None] = ()) -> None:
    """Raise ValueError unless a command may replace or extend a file, before there is work to lose.

    Args:
        name: What the error calls the file, such as ``--picture``.
        path: The file. It may be new, or a regular file that the command does not read.
        read: Files that the command reads, under any of their names; ``None`` is no file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{name} must be a new or a regular file, got {path!r}")
    for other in read:
        if other is not None and _is_same(path, other):
            raise ValueError(f"{name} must be another file than {other!r}, got {path!r}")


def _is_same(path: str, other: str) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)
