"""Tensors in .npy and .safetensors files, mapped into memory rather than read or written whole."""

import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cqs.executors.streaming.checkpoint import WorkingDirectory
from cqs.executors.streaming.sources import SAFETENSORS_DTYPES, InFile

_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def map_tensor(source: InFile, mode: Literal["c", "r+"]) -> Tensor:
    """Map a tensor of a file into memory.

    Args:
        source: The tensor in the file, in C order.
        mode: ``"c"`` copies on write (changes do not reach the file), ``"r+"`` writes to the file.
    """
    if not source.nbytes:  # an empty range cannot be mapped
        return torch.empty(source.shape, dtype=source.dtype)
    mapped = np.memmap(source.path, np.uint8, mode, source.offset, (source.nbytes,))
    return torch.from_numpy(mapped).view(source.dtype).reshape(source.shape)


@contextmanager
def create_tensor(
    target: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Give a tensor to fill that is mapped to a new file; see :func:`create_file`."""
    with create_file(target, name, shape, dtype) as path:
        # Files of both kinds end with the data.
        offset = os.path.getsize(path) - math.prod(shape) * dtype.itemsize
        yield map_tensor(InFile(path, shape, dtype, offset), "r+")
        with open(path) as file:
            os.fsync(file.fileno())


@contextmanager
def create_file(
    target: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    directory: WorkingDirectory | None = None,
) -> Iterator[Path]:
    """Give the path of a file that holds a tensor; it becomes ``target`` once it is filled.

    Until then the file is beside ``target``, under a name of its own. After an error it is removed,
    unless ``directory`` says that the next run goes on with it.

    Args:
        target: ``FILE.npy`` or ``FILE.safetensors``; replaced if it exists.
        name: Name of the tensor in a safetensors file.
        shape: Shape of the tensor.
        dtype: Its dtype; .npy files hold no bfloat16.
        directory: Working files of the computation, which may refer to a file of an earlier run.

    Raises:
        ValueError: if the file cannot be written or is of a kind that cannot hold the tensor, or
            the file of an earlier run is missing or was to become another ``target``.
    """
    suffix = Path(target).suffix
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"cannot write {name} to {target!r}: not a .npy or .safetensors file")
    if suffix == ".npy" and dtype == torch.bfloat16:
        raise ValueError(
            f"cannot write {name} to {target!r}: numpy has no {dtype}: write a .safetensors file"
        )
    begun = None if directory is None else _begun(target, directory)
    partial = begun or Path(f"{target}.{secrets.token_hex(8)}{suffix}")
    try:
        if begun is None:
            try:
                _make_file(partial, name, shape, dtype)
            except OSError as error:
                raise ValueError(f"cannot write {name} to {target!r}: {error}") from error
        yield partial
        os.replace(partial, target)
        partial.unlink(missing_ok=True)  # a rename does nothing where both are one file
    except BaseException:
        if directory is None or directory.output is None:
            with suppress(OSError):  # the first error says more
                partial.unlink()
        raise


def _begun(target: str, directory: WorkingDirectory) -> Path | None:
    """Return the file that an earlier run has begun to fill for ``target``, if there is one.

    Raises:
        ValueError: if it is missing, or was to become another file.
    """
    partial = directory.output
    if partial is None:
        return None
    wanted = Path(os.path.realpath(Path(target).parent)) / Path(target).name
    own_name = rf"{re.escape(wanted.name)}\.[0-9a-f]{{16}}{re.escape(wanted.suffix)}"
    if partial.parent != wanted.parent or not re.fullmatch(own_name, partial.name):
        raise ValueError(
            f"'{directory.path}' is of another computation: its output so far is '{partial}', "
            f"which does not become {target!r}"
        )
    if not partial.exists() and directory.has_made(wanted):
        os.link(wanted, partial)  # the earlier run was killed after it had renamed the file
    if partial.is_symlink() or not partial.is_file():
        raise directory.damaged(partial)
    return partial


def _make_file(path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Create a file of a tensor of zeros, with all of its blocks on the disk.

    Later, a full disk would end a process that has mapped the file by a signal.
    """
    if path.suffix == ".npy":
        np.lib.format.open_memmap(path, "w+", torch.empty(0, dtype=dtype).numpy().dtype, shape)
    else:
        header = _safetensors_header(name, shape, dtype)
        path.write_bytes(header)
        os.truncate(path, len(header) + math.prod(shape) * dtype.itemsize)
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))


def _safetensors_header(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Return what comes before the data of a safetensors file of one tensor.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with blanks to
    a multiple of 8), data.
    """
    entry = {
        "dtype": _SAFETENSORS_NAMES[dtype],
        "shape": list(shape),
        "data_offsets": [0, math.prod(shape) * dtype.itemsize],
    }
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
