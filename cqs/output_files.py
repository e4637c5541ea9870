"""Files that are written whole: what has their name stays as it is until they are complete."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """Give the path of a file to write, which becomes ``path`` if there is no error.

    Until then it is beside ``path``, under a name of its own with the same ending; after an error
    it is removed. A symbolic link stays one, and the file that it names is replaced.

    Raises:
        ValueError: if the path names something else than a regular file, such as a device.
        OSError: if the file cannot take its place.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"path must be a new or a regular file, got '{path}'")
    partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}{target.suffix}")
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
