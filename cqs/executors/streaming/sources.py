"""Tensors that are read and written in parts: in host memory, in files, or made on demand."""

import json
import math
import os
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cqs.files import check_input_file

Shape = tuple[int, ...]
"""Batch elements, heads, tokens and columns."""

_MAPPING = re.compile(rb"^(\w+)-(\w+) \S+ (\w+) (\S+ \d+)", re.MULTILINE)
"""Start, stop, offset, and device and inode in a line of ``/proc/self/maps``."""
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


class Source:
    """A tensor ``[batch, heads, seqlen, ...]`` that is read in parts, not held in memory.

    Reads of :class:`cqs.problem.Problem` treat it as a tensor: indices of a batch element and a
    head read all rows of that head, and two slices select a part, of which nothing is read.
    """

    shape: Shape
    dtype: torch.dtype
    device = torch.device("cpu")

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Read rows of one head into ``into``, a contiguous CPU tensor ``[rows, ...]``."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, place: tuple[Any, Any]) -> Any:
        """Return all rows of a batch element and head, or the part of two slices."""
        if isinstance(place[0], slice):
            batches, heads = range(self.shape[0])[place[0]], range(self.shape[1])[place[1]]
            shape = (len(batches), len(heads), *self.shape[2:])
            return Part(shape, self.dtype, self, batches, heads)
        rows = torch.empty(self.shape[2:], dtype=self.dtype, device="cpu")
        self.read(*place, range(self.shape[2]), rows)
        return rows


@dataclass(frozen=True)
class Part(Source):
    """Some batch elements and heads of a source."""

    shape: Shape
    dtype: torch.dtype
    whole: Any
    """The source, an :class:`InFile` if the part is written to."""
    batches: range
    heads: range

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Read rows of one head of the part."""
        self.whole.read(self.batches[batch], self.heads[head], rows, into)

    def write(self, batch: int, head: int, rows: range, values: Tensor) -> None:
        """Write rows of one head of the part."""
        self.whole.write(self.batches[batch], self.heads[head], rows, values)


@dataclass(frozen=True)
class InFile(Source):
    """A tensor in a file, accessed by ``pread`` and ``pwrite`` without a memory map.

    Its elements are contiguous, in C order. The constructor opens the file and raises:

    - ValueError: A number is negative, or ``path`` is not a regular file with all elements.
    - OSError: The file cannot be opened.
    """

    path: Path
    shape: Shape
    """Batch elements, heads and tokens, and columns except for LSEs."""
    dtype: torch.dtype
    offset: int
    """Position of the first element in the file, in bytes."""
    is_writable: bool = False
    """Whether the file is opened for writing too."""
    _descriptor: int = field(init=False, repr=False, compare=False)
    """The open file: at a later time another file may have the path."""

    def __post_init__(self) -> None:
        """Open the file; raise ValueError unless it is regular and contains all elements."""
        if min(*self.shape, self.offset) < 0:
            raise ValueError(
                f"shape and offset must not be negative, got {self.shape} and {self.offset}"
            )
        check_input_file(self.path)
        descriptor = os.open(self.path, os.O_RDWR if self.is_writable else os.O_RDONLY)
        object.__setattr__(self, "_descriptor", descriptor)
        weakref.finalize(self, os.close, descriptor)
        needed = self.offset + self.nbytes if self.nbytes else 0
        if (size := os.fstat(self._descriptor).st_size) < needed:
            raise ValueError(f"'{self.path}' is cut short: {size} of {needed} bytes")

    @property
    def fingerprint(self) -> tuple[str, int, int, int]:
        """Path, offset, file size in bytes and modification time in nanoseconds."""
        inode = os.fstat(self._descriptor)
        return str(self.path.resolve()), self.offset, inode.st_size, inode.st_mtime_ns

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file, which do not change when it is renamed."""
        inode = os.fstat(self._descriptor)
        return inode.st_dev, inode.st_ino

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Read rows of one head into ``into``, a contiguous CPU tensor ``[rows, ...]``.

        Raises:
            OSError: The file cannot be read, or was truncated.
        """
        view, place = bytes_of(into), self._place(batch, head, rows.start)
        while view:
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise OSError(f"'{self.path}' was cut short while it was read")
            view, place = view[count:], place + count

    def write(self, batch: int, head: int, rows: range, values: Tensor) -> None:
        """Write ``values``, a contiguous CPU tensor ``[rows, ...]``, to rows of one head.

        Raises:
            OSError: The file is not writable, or the disk is full.
        """
        view, place = bytes_of(values), self._place(batch, head, rows.start)
        while view:
            count = os.pwrite(self._descriptor, view, place)
            view, place = view[count:], place + count

    def flush(self) -> None:
        """Call ``fsync``; raises OSError if written data could not reach the disk."""
        os.fsync(self._descriptor)

    def _place(self, batch: int, head: int, row: int) -> int:
        rows = (batch * self.shape[1] + head) * self.shape[2] + row
        return self.offset + rows * math.prod(self.shape[3:]) * self.dtype.itemsize


@dataclass(frozen=True)
class OnDemand(Source):
    """A tensor with rows that a function computes when they are read.

    Args:
        function: Called as ``function(batch, head, rows)`` with ``rows`` a range. It returns a CPU
            tensor ``[len(rows), dim]``, and equal rows at every call.
        shape: Batch elements, heads, tokens and columns of the whole tensor.
        dtype: The dtype of the rows that ``function`` returns.
    """

    function: Callable[[int, int, range], Tensor]
    shape: Shape
    dtype: torch.dtype

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Compute rows of one head into ``into``, a CPU tensor ``[rows, dim]``.

        Raises:
            TypeError: The function did not return a tensor.
            ValueError: The function returned another shape or dtype.
        """
        values = self.function(batch, head, rows)
        if not isinstance(values, Tensor):
            raise TypeError(f"the function must return a tensor, got {type(values).__name__}")
        if values.shape != into.shape or values.dtype != into.dtype:
            raise ValueError(
                f"the function must return {tuple(into.shape)} {into.dtype} for {len(rows)} rows, "
                f"got {tuple(values.shape)} {values.dtype}"
            )
        into.copy_(values.detach())


Target = Tensor | InFile | Part
"""A tensor that is written by rows of one head."""


def read_rows(source: Tensor | Source, batch: int, heads: range, rows: range, into: Tensor) -> None:
    """Read rows of adjacent heads into ``into``, ``[heads, rows, ...]`` on the CPU."""
    if isinstance(source, Tensor):
        into.copy_(source[batch, heads.start : heads.stop, rows.start : rows.stop])
    else:
        for head, head_rows in zip(heads, into, strict=True):
            source.read(batch, head, rows, head_rows)


def write_rows(target: Target, batch: int, heads: range, rows: range, values: Tensor) -> None:
    """Write ``values``, ``[heads, rows, ...]`` on the CPU, to rows of adjacent heads."""
    if isinstance(target, Tensor):
        target[batch, heads.start : heads.stop, rows.start : rows.stop] = values
    else:
        for head, head_rows in zip(heads, values, strict=True):
            target.write(batch, head, rows, head_rows.contiguous())


def as_source(name: str, tensor: Any) -> Tensor | Source:
    """Return a user's tensor as a CPU tensor or a source; a memory map becomes its file.

    Args:
        name: Name of the argument in error messages.
        tensor: A CPU tensor, a NumPy array (memory-mapped or not), :class:`InFile` or
            :class:`OnDemand`.

    Raises:
        TypeError: ``tensor`` has another type.
        ValueError: ``tensor`` is on a GPU, or an array of negative strides or another byte order.
    """
    if isinstance(tensor, Source):
        return tensor
    if isinstance(array := tensor, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only arrays, which as_target rejects
            try:
                tensor = torch.from_numpy(array)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{name} must be an array that PyTorch can share, got {array.dtype} with "
                    f"strides {array.strides}: {error}"
                ) from None
    if isinstance(array, np.memmap) and (file := _file_of(array, tensor.dtype)):
        return file
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor, a NumPy array or a source of cqs.streaming, "
            f"got {type(tensor).__name__}"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be on the CPU, got {tensor.device}: move it there, or call cqs.attention"
        )
    return tensor


def as_target(
    out: Any, shape: Shape, dtype: torch.dtype, sources: Sequence[Tensor | Source]
) -> Tensor | InFile:
    """Return a user's ``out`` argument as a CPU tensor or a file.

    Args:
        out: A CPU tensor, a NumPy array (memory-mapped or not) or :class:`InFile`.
        shape: The shape that ``out`` must have.
        dtype: The dtype that ``out`` must have.
        sources: The tensors that are read while ``out`` is written.

    Raises:
        TypeError: ``out`` has another type.
        ValueError: ``out`` is read-only, has another shape or dtype, overlaps itself, has memory
            between the first and the last byte of a source, or is in the file of a source.
    """
    target = as_source("out", out)
    if not isinstance(target, Tensor | InFile):
        raise TypeError("out must be a tensor, a NumPy array or a file")
    if target.shape != shape or target.dtype != dtype:
        raise ValueError(
            f"out must be {list(shape)} {dtype}, got {list(target.shape)} {target.dtype}"
        )
    is_read_only = isinstance(target, InFile) and not target.is_writable
    if is_read_only or isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only tensor")
    if isinstance(target, Tensor) and _repeats(target):
        raise ValueError(
            "out must have one memory location per element, got a tensor that overlaps itself"
        )
    if any(_overlap(target, source) for source in sources):
        raise ValueError(
            "out must share neither memory nor a file with query, key and value, or scores"
        )
    return target


def _overlap(target: Tensor | InFile, source: Tensor | Source) -> bool:
    """Return whether two tensors in files are in the same, or the spans of two in memory meet."""
    if isinstance(target, InFile):
        return isinstance(source, InFile) and source.identity == target.identity
    return isinstance(source, Tensor) and np.may_share_memory(_array(target), _array(source))


def _array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a CPU tensor as an array, of float16 for bfloat16."""
    tensor = tensor.detach()
    return (tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory.

    False if every stride is at least the span of all dimensions with smaller strides.
    """
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride < span and length > 1 and tensor.numel():
            return True
        span += stride * (length - 1)
    return False


def open_tensor(source: str | Path, name: str = "tensor") -> InFile:
    """Open a tensor in a file; only the header is read.

    Args:
        source: ``FILE.npy``, ``FILE.safetensors`` or ``FILE.safetensors:NAME``.
        name: Name of the tensor in a safetensors file if ``source`` does not contain one.

    Raises:
        ValueError: The file is neither a .npy nor a safetensors file, is too short, or does not
            contain such a tensor of four dimensions in C order.
        OSError: The file cannot be read.
    """
    path, _, given = str(source).partition(".safetensors:")
    if given or path.endswith(".safetensors"):
        return _in_safetensors(Path(f"{path}.safetensors" if given else path), given or name)
    check_input_file(path)
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
        tensor = as_source(name, mapped)
    except OSError:
        raise
    except Exception as error:  # NumPy raises errors of many types for malformed headers
        raise ValueError(f"cannot read {name} from '{path}': {error}") from error
    if not isinstance(tensor, InFile):
        order = " in Fortran order" * (not mapped.flags.c_contiguous)
        raise ValueError(
            f"'{source}' must have four dimensions in C order to be streamed, got {mapped.shape} "
            f"{mapped.dtype}{order}: save a contiguous array"
        )
    return tensor


def _in_safetensors(path: Path, name: str) -> InFile:
    """Return a tensor of a safetensors file, of which only the header is read."""
    check_input_file(path)
    try:
        # safe_open validates the header, but does not tell where the data are.
        with safe_open(path, framework="numpy"), open(path, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            entry = json.loads(content.read(length))[name]
        shape, dtype = tuple(entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"'{path}' has no tensor {name!r} to read: {error!r}") from error
    if len(shape) != 4:
        raise ValueError(f"{name} of '{path}' must have four dimensions, got {list(shape)}")
    return InFile(path, shape, dtype, 8 + length + entry["data_offsets"][0])


def _file_of(mapped: np.memmap, dtype: torch.dtype) -> InFile | None:
    """Return the tensor in the file of a contiguous memory map, or None if the two may differ.

    A copy-on-write map may have been changed, and the path may now name another file.
    """
    if (
        mapped.filename is None
        or mapped.mode == "c"
        or mapped.ndim != 4
        or not mapped.flags.c_contiguous
        or not Path(mapped.filename).is_file()
    ):
        return None
    path, (file, offset) = Path(mapped.filename), _mapping_of(mapped)
    if file != _mapping_of(np.memmap(path, np.uint8, "r"))[0]:
        return None
    return InFile(path, mapped.shape, dtype, offset, bool(mapped.flags.writeable))


def _mapping_of(mapped: np.memmap) -> tuple[bytes, int]:
    """Return device and inode of a mapped file, and the position of a map's first byte in it."""
    address = mapped.ctypes.data
    for first, last, offset, name in _MAPPING.findall(Path("/proc/self/maps").read_bytes()):
        if (start := int(first, 16)) <= address < int(last, 16):
            return name, int(offset, 16) + address - start
    return b"", 0


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data.cast("B")
