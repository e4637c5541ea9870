"""The bytes of memory and of files that contain a tensor, and tests for overlap."""

import ctypes
import mmap
import os
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

_MEMORY = "memory"
_ORIGIN = 2**62
"""Address of position 0, because NumPy does not accept arrays at address 0 or below."""
_MOST_WORK = 10**6
"""Limit of NumPy's search for a shared byte; beyond it, tensors count as overlapping."""
_MAPS = Path("/proc/self/maps")
_LINE = re.compile(rb"^(\w+)-(\w+) .(.).(.) (\w+) (\S+) (\d+)", re.MULTILINE)
"""Start and stop, permissions to write and to share, offset, device and inode of a mapping."""


class Extent(NamedTuple):
    """The positions of a tensor's elements in one address space."""

    space: Hashable
    """Identifies the address space: the memory of the process, or a file."""
    elements: np.ndarray
    """An array whose addresses are positions in the space. Its elements must not be read."""

    @property
    def repeats(self) -> bool:
        """Whether two elements share bytes."""
        rows = self.elements
        while rows.size and rows.ndim:
            # Positions are linear in the indices. So if two elements share bytes, two others share
            # bytes as well: their first differing index is 0 in one and positive in the other.
            if _share(rows[:1], rows[1:]):
                return True
            rows = rows[0, ...]
        return False

    def overlaps(self, other: "Extent") -> bool:
        """Return whether two tensors share a byte of this address space."""
        return self.space == other.space and _share(self.elements, other.elements)


class _Mapping(NamedTuple):
    """One line of ``/proc/self/maps``: a mapping of this process's memory."""

    is_writable: bool
    is_shared: bool
    """Whether writes reach the file."""
    file: tuple[str, int] | None
    """Device and inode; ``None`` for anonymous memory."""
    shift: int
    """Position in the file less the address, in bytes."""


def extents_in_memory(tensor: Tensor, *, is_written: bool) -> list[Extent]:
    """Return the extents of a tensor in memory and in the files that are mapped there.

    Mapped files are known on Linux only. Elsewhere the result has the extent in memory alone.

    Args:
        tensor: A CPU tensor of any shape and strides.
        is_written: Whether the tensor is written to. Writes reach a file only through a shared
            mapping; reads depend on the file through a private (copy-on-write) mapping too.
    """
    files = {
        (mapping.file, mapping.shift)
        for mapping in _mappings_of(tensor)
        if mapping.file is not None and (mapping.is_shared or not is_written)
    }
    size, start = tensor.element_size(), tensor.data_ptr()
    strides = [stride * size for stride in tensor.stride()]
    return [
        Extent(space, elements_at(start + shift, tensor.shape, strides, size))
        for space, shift in [(_MEMORY, 0), *files]
    ]


def is_mapped_from(array: np.ndarray, descriptor: int, offset: int) -> bool:
    """Return whether an array is mapped from an open file, with its first byte at ``offset``.

    False if the file was replaced after it had been mapped. True where the system does not list
    mappings.
    """
    address, names = array.ctypes.data, names_of(descriptor)
    return all(
        mapping.file in names and address + mapping.shift == offset
        for mapping in _mappings(address, address + 1)
    )


def is_read_only(tensor: Tensor) -> bool:
    """Return whether a write to a CPU tensor would crash the process, as far as known."""
    return not all(mapping.is_writable for mapping in _mappings_of(tensor))


def elements_at(
    position: int, shape: Sequence[int], strides: Sequence[int], size: int
) -> np.ndarray:
    """Return an array at a position of an address space, whose memory NumPy does not read.

    Args:
        position: Position of the first element, in bytes.
        shape: Shape of the array.
        strides: Stride of each dimension, in bytes.
        size: Bytes of an element.
    """
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    space: Any = (ctypes.c_char * max(last + size, 0)).from_address(_ORIGIN + position)
    return np.ndarray(shape, f"V{size}", space, strides=strides)


def _share(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _mappings(start: int, stop: int) -> list[_Mapping]:
    """Return this process's memory mappings that meet a range of addresses; known on Linux only."""
    found = []
    for line in _LINE.findall(_MAPS.read_bytes()) if _MAPS.exists() else ():
        first, last, offset = (int(number, 16) for number in (*line[:2], line[4]))
        if first < stop and start < last:
            # A System V segment may have inode 0, so the device identifies anonymous memory.
            file = None if line[5] == b"00:00" else (line[5].decode(), int(line[6]))
            found.append(_Mapping(line[2] == b"w", line[3] == b"s", file, offset - first))
    return found


def _mappings_of(tensor: Tensor) -> list[_Mapping]:
    """Return the mappings between the first and the last byte of a tensor."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in strides)
    start = tensor.data_ptr()
    stop = start + (last + 1) * tensor.element_size()
    return _mappings(start, stop) if tensor.numel() else []


def names_of(descriptor: int) -> list[Hashable]:
    """Return the identities of an open file: by ``stat``, and in the list of mappings.

    The two differ on file systems with subvolumes (btrfs) or layers (overlayfs).
    """
    stat = os.fstat(descriptor)
    try:
        page = mmap.mmap(descriptor, 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # an empty file, or one that cannot be mapped
        return [(stat.st_dev, stat.st_ino)]
    address = np.frombuffer(page, np.uint8).ctypes.data
    files = [mapping.file for mapping in _mappings(address, address + 1)]
    return [(stat.st_dev, stat.st_ino), *files]
