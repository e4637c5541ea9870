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
    """Give a tensor to fill that is mapped to a new file; the file appears once it is filled.

    Args:
        target: ``FILE.npy`` or ``FILE.safetensors``; replaced if it exists.
        name: Name of the tensor in a safetensors file.
        shape: Shape of the tensor.
        dtype: Its dtype; .npy files hold no bfloat16.

    Raises:
        ValueError: if the file cannot be written or is of a kind that cannot hold the tensor.
    """
    partial = f"{target}.{secrets.token_hex(8)}.partial"
    mapped: np.ndarray
    try:
        if target.endswith(".npy"):
            if dtype not in _NUMPY_DTYPES:
                raise ValueError(f"numpy has no {dtype}: write a .safetensors file")
            mapped = np.lib.format.open_memmap(partial, "w+", _NUMPY_DTYPES[dtype], shape)
            tensor = torch.from_numpy(mapped)
        elif target.endswith(".safetensors"):
            mapped = _map_safetensors(partial, name, shape, dtype)
            tensor = torch.from_numpy(mapped).view(dtype) if mapped.size else torch.empty(0)
            tensor = tensor.to(dtype).reshape(shape)
        else:
            raise ValueError("not a .npy or .safetensors file")
        _reserve_space(partial)
    except (OSError, ValueError) as error:
        Path(partial).unlink(missing_ok=True)
        raise ValueError(f"cannot write {name} to {target!r}: {error}") from error
    try:
        yield tensor
        if isinstance(mapped, np.memmap):
            mapped.flush()
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _reserve_space(path: str) -> None:
    """Take all blocks of a file at once: later, a full disk would end the process by a signal."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))


def _map_safetensors(
    path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> np.ndarray:
    """Create a safetensors file of one tensor and map the tensor's bytes.

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
    if not num_bytes:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r+", offset=8 + len(header), shape=(num_bytes,))
