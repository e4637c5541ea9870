"""Tensors in .npy and .safetensors files, mapped into memory rather than read or written whole."""

import io
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cqs.executors.streaming.checkpoint import WorkingDirectory
from cqs.executors.streaming.sources import SAFETENSORS_DTYPES, map_array
from cqs.files import check_input_file

_NUMPY_DTYPES = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def load_tensor(source: str, name: str) -> Tensor:
    """Map a tensor of a file into memory.

    Args:
        source: ``FILE.npy``, ``FILE.safetensors`` or ``FILE.safetensors:NAME``.
        name: Name of the tensor in a safetensors file, where ``source`` gives none.

    Raises:
        ValueError: if the file cannot be read, is of neither kind or holds no such tensor.
    """
    path = path_of(source)
    try:
        if path.endswith(".safetensors"):
            check_input_file(path)
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(source[len(path) + 1 :] or name)
                return found
        if path.endswith(".npy"):
            return torch.from_numpy(map_array(path, name, "c"))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"cannot read {name} from {source!r}: {error}") from error
    raise ValueError(f"{name} must be a .npy or .safetensors file, got {source!r}")


def path_of(source: str) -> str:
    """Return the path of a file, without the name of a tensor in it."""
    path, found, _ = source.partition(".safetensors:")
    return f"{path}.safetensors" if found else path


@contextmanager
def create_tensor(
    target: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Give a tensor to fill that is mapped to a new file; see :func:`create_file`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    with create_file(target, name, shape, dtype) as path:
        if not num_bytes:  # an empty range cannot be mapped
            yield torch.empty(shape, dtype=dtype)
            return
        offset = os.path.getsize(path) - num_bytes  # files of both kinds end with the data
        mapped = np.memmap(path, np.uint8, "r+", offset=offset, shape=(num_bytes,))
        yield torch.from_numpy(mapped).view(dtype).reshape(shape)
        mapped.flush()


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
    if suffix == ".npy" and dtype not in _NUMPY_DTYPES:
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
    if not partial.is_file() and directory.has_made(wanted):
        os.link(wanted, partial)  # the earlier run was killed after it had renamed the file
    if not partial.is_file():
        raise directory.damaged(partial)
    return partial


def _make_file(path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Create a file of a tensor of zeros, with all of its blocks on the disk.

    Later, a full disk would end a process that has mapped the file by a signal.
    """
    if path.suffix == ".npy":
        header = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(np.dtype(_NUMPY_DTYPES[dtype]))
        np.lib.format.write_array_header_1_0(
            header, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        content = header.getvalue()
    else:
        content = _safetensors_header(name, shape, dtype)
    size = len(content) + math.prod(shape) * dtype.itemsize
    with open(path, "xb") as file:
        file.write(content)
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


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
