"""Files that are written whole: what has their name stays as it is until they are complete."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        with suppress(OSError):  # the first error says more
            partial.unlink()
        raise


@contextmanager
def lock_directory(name: str, path: Path) -> Iterator[None]:
    """Keep other processes that call this from using a directory; no file is made.

    Args:
        name: What the error calls the directory, such as ``--out``.
        path: The directory, which exists.

    Raises:
        BlockingIOError: Another process or thread uses it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{name} must be a directory that nothing else uses: wait for the other process, "
                "or take another directory",
                str(path),
            ) from None
        except OSError:
            pass  # some network file systems lock no directories
        yield
    finally:
        os.close(descriptor)
