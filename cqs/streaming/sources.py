"""Where sequences are that do not fit: host memory, files, functions that make them."""

import json
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cqs.input_files import check_input_file
from cqs.streaming.extents import (
    Extent,
    extents_in_file,
    extents_in_memory,
    is_mapped_from,
    is_read_only,
    share_bytes,
)

Shape = tuple[int, int, int, int]

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


class Source(Protocol):
    """``[batch, heads, seqlen, dim]``, of which some rows of one head are read at a time."""

    @property
    def shape(self) -> Shape:
        """Batch, heads, tokens and columns."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Fill ``[rows, dim]`` on the CPU, adjacent in memory."""

    def part(self, batches: slice, heads: slice) -> "Source":
        """Return some batch elements and heads, counted from 0 again."""

    def extents(self, *, is_written: bool) -> list[Extent]:
        """Return which bytes of memory and of files hold the elements, as far as is known."""


class Target(Protocol):
    """``[batch, heads, seqlen, dim]``, of which some rows of one head are written at a time."""

    def write(self, batch: int, head: int, rows: range, values: Tensor) -> None:
        """Take ``[rows, dim]`` from the CPU, adjacent in memory."""


@dataclass(frozen=True)
class InMemory:
    """A tensor on the CPU."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        """Batch, heads, tokens and columns."""
        batch, heads, tokens, columns = self.tensor.shape
        return batch, heads, tokens, columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.tensor.dtype

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Copy rows out."""
        into.copy_(self.rows_in_place(batch, head, rows))

    def write(self, batch: int, head: int, rows: range, values: Tensor) -> None:
        """Copy rows in."""
        self.rows_in_place(batch, head, rows).copy_(values)

    def part(self, batches: slice, heads: slice) -> "InMemory":
        """Return some batch elements and heads."""
        return InMemory(self.tensor[batches, heads])

    def extents(self, *, is_written: bool) -> list[Extent]:
        """Return which bytes of memory hold the elements, and of files mapped there."""
        return extents_in_memory(self.tensor, is_written=is_written)

    def rows_in_place(self, batch: int, head: int, rows: range) -> Tensor:
        """Return rows in place."""
        return self.tensor[batch, head, rows.start : rows.stop]


class OpenFile:
    """A file that is open until it is closed, at the latest when nothing refers to the object."""

    def __init__(self, path: Path, flags: int):
        """Open it with flags of ``os.open``."""
        self.descriptor = os.open(path, flags, 0o666)
        self.close = weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class InFile:
    """A tensor in a file, which is read and written without being mapped: it takes no memory.

    Its rows lie in C order; heads and batch elements anywhere.
    """

    path: Path
    shape: Shape
    dtype: torch.dtype
    offset: int
    """Bytes before the first element."""
    strides: tuple[int, int]
    """Bytes between batch elements and between heads."""
    is_writable: bool = False

    opened: OpenFile | None = field(default=None, repr=False, compare=False)
    """What other parts of the tensor have opened; ``None`` opens ``path``."""

    def __post_init__(self) -> None:
        """Raise ValueError unless all elements lie in a regular file."""
        batch, heads, *_ = self.shape
        if min(*self.shape, *self.strides, self.offset) < 0:
            raise ValueError(
                f"shape, strides and offset must not be negative, got {self.shape}, "
                f"{self.strides} and {self.offset}"
            )
        if self.opened is not None:
            return
        check_input_file(self.path)
        needed = self._place(batch - 1, heads - 1, self.shape[2]) if min(self.shape) else 0
        # Opened here, not when it is first read: another file may have its name by then.
        if (size := os.fstat(self._descriptor).st_size) < needed:
            raise ValueError(f"'{self.path}' is cut short: {size} of {needed} bytes")

    @property
    def fingerprint(self) -> tuple[str, int, int, int, int, int]:
        """Path, offset and strides; size and modification time, which change with the content."""
        found = os.fstat(self._descriptor)
        place = str(self.path.resolve()), self.offset, *self.strides
        return *place, found.st_size, found.st_mtime_ns

    @property
    def identity(self) -> tuple[int, int]:
        """What the file keeps when it is renamed: device and inode."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Read rows; raises OSError if the file has become too short."""
        view, place = bytes_of(into), self._place(batch, head, rows.start)
        while view:
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise OSError(f"'{self.path}' was cut short while it was read")
            view, place = view[count:], place + count

    def write(self, batch: int, head: int, rows: range, values: Tensor) -> None:
        """Write rows; raises OSError if the disk is full."""
        view, place = bytes_of(values), self._place(batch, head, rows.start)
        while view:
            count = os.pwrite(self._descriptor, view, place)
            view, place = view[count:], place + count

    def flush(self) -> None:
        """Wait until the disk has what was written to the file; raises OSError if it cannot."""
        os.fsync(self._descriptor)

    def part(self, batches: slice, heads: slice) -> "InFile":
        """Return some batch elements and heads of the same open file."""
        first, shape = _cut(self.shape, batches, heads)
        offset = self._place(*first, 0)
        return replace(self, shape=shape, offset=offset, opened=self._file)

    def extents(self, *, is_written: bool) -> list[Extent]:
        """Return which bytes of the file hold the elements."""
        size = self.dtype.itemsize
        strides = (*self.strides, self.shape[3] * size, size)
        return extents_in_file(self._descriptor, self.offset, self.shape, strides, size)

    def is_mapped_as(self, array: np.ndarray) -> bool:
        """Return whether an array is mapped from this place of the file, as far as is known."""
        return is_mapped_from(array, self._descriptor, self.offset)

    def _place(self, batch: int, head: int, row: int) -> int:
        row_bytes = self.shape[3] * self.dtype.itemsize
        return self.offset + batch * self.strides[0] + head * self.strides[1] + row * row_bytes

    @property
    def _descriptor(self) -> int:
        return self._file.descriptor

    @cached_property
    def _file(self) -> OpenFile:
        return self.opened or OpenFile(self.path, os.O_RDWR if self.is_writable else os.O_RDONLY)


@dataclass(frozen=True)
class OnDemand:
    """A tensor that a function makes, some rows of one head at a time.

    Args:
        function: Called as ``function(batch, head, rows)``, the rows a range; returns
            ``[len(rows), dim]`` on the CPU, the same whenever it is asked for the same rows.
        shape: Of the whole.
        dtype: Of what the function returns.
    """

    function: Callable[[int, int, range], Tensor]
    shape: Shape
    dtype: torch.dtype

    def read(self, batch: int, head: int, rows: range, into: Tensor) -> None:
        """Have rows made."""
        found = self.function(batch, head, rows)
        if not isinstance(found, Tensor):
            raise TypeError(f"the function must return a tensor, got {type(found).__name__}")
        if found.shape != into.shape or found.dtype != into.dtype:
            raise ValueError(
                f"the function must return {tuple(into.shape)} {into.dtype} for {len(rows)} rows, "
                f"got {tuple(found.shape)} {found.dtype}"
            )
        into.copy_(found.detach())

    def part(self, batches: slice, heads: slice) -> "OnDemand":
        """Return some batch elements and heads."""
        (batch, head), shape = _cut(self.shape, batches, heads)

        def function(i: int, j: int, rows: range) -> Tensor:
            return self.function(batch + i, head + j, rows)

        return replace(self, function=function, shape=shape)

    def extents(self, *, is_written: bool) -> list[Extent]:
        """Return nothing, because only the function knows."""
        return []


def as_source(name: str, tensor: Any) -> InMemory | InFile | OnDemand:
    """Return what reads a tensor of the user.

    Args:
        name: What errors call it.
        tensor: A CPU tensor, a NumPy array, memory-mapped or not, :class:`InFile` or
            :class:`OnDemand`.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is on a GPU or has not four dimensions.
    """
    if isinstance(tensor, InMemory | InFile | OnDemand):
        return tensor
    if isinstance(tensor, np.memmap) and (found := _file_of(tensor)):
        return found
    if isinstance(tensor, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is read-only, which out= checks
            tensor = torch.from_numpy(tensor)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor, a NumPy array or of cqs.streaming, "
            f"got {type(tensor).__name__}"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"a memory budget is for tensors on the CPU, {name} is on {tensor.device}")
    if tensor.ndim != 4:
        raise ValueError(
            f"{name} must be [batch, num_heads, seqlen, head_dim], got shape {tuple(tensor.shape)}"
        )
    return InMemory(tensor.detach())


def share_files(target: InMemory | InFile, source: Source) -> bool:
    """Return whether writes to a tensor are in a file of another, in whatever part of it."""
    if not isinstance(source, InFile):
        return False
    files = {extent.space for extent in source.extents(is_written=False)}
    return any(extent.space in files for extent in target.extents(is_written=True))


def as_target(
    out: Any, shape: Shape, dtype: torch.dtype, sources: Sequence[Source] = ()
) -> InMemory | InFile:
    """Return what writes the output to where the user wants it.

    Args:
        out: As for :func:`as_source`, but a function.
        shape: That it must have.
        dtype: Likewise.
        sources: What is read meanwhile.

    Raises:
        TypeError: if it is of another kind.
        ValueError: if it cannot be written to, its shape or dtype is another, some of its elements
            share memory, or it shares memory or a file with a source.
    """
    target = as_source("out", out)
    if isinstance(target, OnDemand):
        raise TypeError("out must be a tensor, a NumPy array or a file")
    if tuple(target.shape) != shape or target.dtype != dtype:
        raise ValueError(
            f"out must be {list(shape)} {dtype}, got {list(target.shape)} {target.dtype}"
        )
    is_writable = (
        target.is_writable if isinstance(target, InFile) else not is_read_only(target.tensor)
    )
    if not is_writable or isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out cannot be written to: it is read-only")
    extents = target.extents(is_written=True)
    if extents[0].repeats:
        raise ValueError("out cannot be written to: its elements share memory")
    if any(share_bytes(extents, source.extents(is_written=False)) for source in sources):
        raise ValueError("out must share neither memory nor a file with query, key and value")
    return target


def open_tensor(source: str | Path, name: str = "tensor") -> InFile:
    """Find a tensor in a file, without reading it.

    Args:
        source: ``FILE.npy``, ``FILE.safetensors`` or ``FILE.safetensors:NAME``.
        name: Of the tensor in a safetensors file, where ``source`` has none.

    Raises:
        ValueError: if the file is of neither kind, is cut short, or has no such tensor of four
            dimensions in C order.
        OSError: if it cannot be read.
    """
    path, _, given = str(source).partition(".safetensors:")
    if given or path.endswith(".safetensors"):
        return _in_safetensors(Path(f"{path}.safetensors" if given else path), given or name)
    mapped = map_array(path, name, "r")
    found = _file_of(mapped) if mapped.ndim == 4 else None
    if found is None:
        raise ValueError(
            f"'{source}' must have four dimensions in C order, got {mapped.shape} {mapped.dtype}"
        )
    return found


def map_array(path: str | Path, name: str, mode: Literal["r", "c"]) -> np.memmap:
    """Map the array of a .npy file into memory.

    Args:
        path: The file.
        name: What errors call the array.
        mode: ``"r"`` for an array that cannot be written to, ``"c"`` for one whose changes do not
            reach the file.

    Raises:
        ValueError: if the file is not a regular one, or holds no array.
        OSError: if it cannot be read.
    """
    check_input_file(path)
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except OSError:
        raise
    except Exception as error:  # NumPy's reader fails in many ways on headers of other programs
        raise ValueError(f"cannot read {name} from '{path}': {error}") from error


def _in_safetensors(path: Path, name: str) -> InFile:
    check_input_file(path)
    try:
        with safe_open(path, framework="numpy") as file:  # which checks all that the header says
            if name not in file.keys():
                raise KeyError(name)
        with open(path, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            entry = json.loads(content.read(length))[name]
        shape, dtype = tuple(entry["shape"]), _SAFETENSORS_DTYPES[entry["dtype"]]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"'{path}' has no tensor {name!r} to read: {error!r}") from error
    if len(shape) != 4:
        raise ValueError(f"{name} of '{path}' must have four dimensions, got {list(shape)}")
    head_bytes = shape[2] * shape[3] * dtype.itemsize
    offset = 8 + length + entry["data_offsets"][0]
    return InFile(path, shape, dtype, offset, (shape[1] * head_bytes, head_bytes))


def _file_of(mapped: np.memmap) -> InFile | None:
    """Return where the elements of a memory map are in its file, unless that cannot be told.

    What is mapped copy-on-write may differ from the file, and another file may have its name now.
    """
    whole = mapped
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    size = mapped.itemsize
    if (
        mapped.filename is None
        or mapped.mode == "c"
        or mapped.ndim != 4
        or not mapped.dtype.isnative
        or mapped.strides[2:] != (size * mapped.shape[3], size)
        or min(mapped.strides[:2]) < 0
    ):
        return None
    try:
        dtype = torch.from_numpy(np.empty(0, mapped.dtype)).dtype
    except TypeError:
        return None
    path = Path(mapped.filename)
    if not path.is_file():
        return None
    found = InFile(
        path,
        mapped.shape,
        dtype,
        whole.offset + mapped.ctypes.data - whole.ctypes.data,
        (mapped.strides[0], mapped.strides[1]),
        is_writable=bool(mapped.flags.writeable),
    )
    return found if not mapped.size or found.is_mapped_as(mapped) else None


def _cut(shape: Shape, batches: slice, heads: slice) -> tuple[tuple[int, int], Shape]:
    """Return the first batch element and head of a part, and its shape."""
    rows, columns = range(shape[0])[batches], range(shape[1])[heads]
    return (rows.start, columns.start), (len(rows), len(columns), shape[2], shape[3])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU whose elements are adjacent."""
    return tensor.view(torch.uint8).numpy().data.cast("B")
