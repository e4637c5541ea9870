"""Tensors in .npy and .safetensors files, mapped into memory rather than read or written whole."""

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_NUMPY_DTYPES = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
}
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def load_tensor(source: str, name: str) -> Tensor:
    """Map a tensor of a file into memory.

    Args:
        source: ``FILE.npy``, ``FILE.safetensors`` or ``FILE.safetensors:NAME``.
        name: Name of the tensor in a safetensors file, where ``source`` gives none.

    Raises:
        ValueError: if the file cannot be read, is of neither kind or holds no such tensor.
    """
    path, _, given = source.partition(".safetensors:")
    try:
        if given or source.endswith(".safetensors"):
            path = f"{path}.safetensors" if given else source
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(given or name)
                return found
        if source.endswith(".npy"):
            return torch.from_numpy(np.lib.format.open_memmap(source, mode="c"))
    except (
        OSError,
        ValueError,
        TypeError,
        OverflowError,
        EOFError,
        SafetensorError,
    ) as error:
        raise ValueError(f"cannot read {name} from {source!r}: {error}") from error
    raise ValueError(f"{name} must be a .npy or .safetensors file, got {source!r}")


@contextmanager
def create_tensor(
    target: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Give a tensor to fill that is mapped to a new file; see :func:`create_file`."""
    mapped: np.ndarray
    with create_file(target, name, shape, dtype) as path:
        if target.endswith(".npy"):
            mapped = np.lib.format.open_memmap(path, "r+")
            tensor = torch.from_numpy(mapped)
        else:
            num_bytes = math.prod(shape) * dtype.itemsize
            offset = os.path.getsize(path) - num_bytes
            mapped = np.empty(0, np.uint8)
            if num_bytes:
                mapped = np.memmap(path, np.uint8, "r+", offset=offset, shape=(num_bytes,))
            tensor = torch.from_numpy(mapped).view(dtype).reshape(shape)
        yield tensor
        if isinstance(mapped, np.memmap):
            mapped.flush()


@contextmanager
def create_file(
    target: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, keeps: bool = False
) -> Iterator[Path]:
    """Give the path of a file that holds a tensor; it becomes ``target`` once it is filled.

    Args:
        target: ``FILE.npy`` or ``FILE.safetensors``; replaced if it exists.
        name: Name of the tensor in a safetensors file.
        shape: Shape of the tensor.
        dtype: Its dtype; .npy files hold no bfloat16.
        keeps: Whether the file stays after a failure, to be filled further the next time.

    Raises:
        ValueError: if the file cannot be written or is of a kind that cannot hold the tensor.
    """
    suffix = Path(target).suffix
    partial = Path(f"{target}.{'partial' if keeps else secrets.token_hex(8)}{suffix}")
    try:
        if suffix not in (".npy", ".safetensors"):
            raise ValueError("not a .npy or .safetensors file")
        if suffix == ".npy" and dtype not in _NUMPY_DTYPES:
            raise ValueError(f"numpy has no {dtype}: write a .safetensors file")
        if not (keeps and partial.exists()):
            if suffix == ".npy":
                np.lib.format.open_memmap(partial, "w+", _NUMPY_DTYPES[dtype], shape)
            else:
                _write_safetensors(partial, name, shape, dtype)
            _reserve_space(partial)
    except (OSError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"cannot write {name} to {target!r}: {error}") from error
    try:
        yield partial
    except BaseException:
        if not keeps:
            partial.unlink(missing_ok=True)
        raise
    os.replace(partial, target)


def _reserve_space(path: Path) -> None:
    """Take all blocks of a file at once: later, a full disk would end the process by a signal."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))


def _write_safetensors(path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Create a safetensors file of one tensor of zeros.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with blanks to
    a multiple of 8), data.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    entry = {
        "dtype": _SAFETENSORS_DTYPES[dtype],
        "shape": list(shape),
        "data_offsets": [0, num_bytes],
    }
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
