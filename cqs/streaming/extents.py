"""Which bytes of memory and of files hold a tensor, and whether two tensors share some of them."""

import mmap
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

_MEMORY = "memory"
_ORIGIN = 2**62
"""The address that stands for position 0, because NumPy accepts no array at address 0 or below."""
_MOST_WORK = 10**6
"""Steps of NumPy's search for a shared byte; strides that take more count as sharing one."""
_MAPS = Path("/proc/self/maps")


class Extent(NamedTuple):
    """The elements of a tensor in one space of bytes."""

    space: Hashable
    """The memory of the process, or a file."""
    elements: np.ndarray
    """An array whose addresses are positions in that space. Its elements must not be read."""

    @property
    def repeats(self) -> bool:
        """Whether two of the elements share bytes."""
        rows = self.elements
        while rows.ndim:
            # Positions are linear in the indices. So if two elements share bytes, then so do one
            # with index 0 and one with a larger index in the first dimension where they differ.
            if _share(rows[:1], rows[1:]):
                return True
            rows = rows[0, ...] if len(rows) else rows[..., 0]
        return False


class _Mapping(NamedTuple):
    """A part of this process's memory, as the operating system lists it."""

    addresses: range
    is_writable: bool
    is_shared: bool
    """Whether writes reach the file."""
    file: tuple[str, int] | None
    """Device and inode; ``None`` for memory without a file."""
    offset: int
    """Position in the file of the first address."""


def share_bytes(some: Sequence[Extent], others: Sequence[Extent]) -> bool:
    """Return whether two tensors share a byte, given all extents of each."""
    return any(
        one.space == other.space and _share(one.elements, other.elements)
        for one in some
        for other in others
    )


def extents_in_memory(tensor: Tensor, *, is_written: bool) -> list[Extent]:
    """Return where the elements of a tensor are: in memory, and in files mapped there.

    Only Linux lists what is mapped. Elsewhere memory is compared with memory, files with files.

    Args:
        tensor: On the CPU, of any shape and strides.
        is_written: Whether the tensor is written to. A write reaches a file through a shared
            mapping alone; a read depends on the file through a private (copy-on-write) one too.
    """
    files = {
        (mapping.file, mapping.offset - mapping.addresses.start)
        for mapping in _mappings_of(tensor)
        if mapping.file is not None and (mapping.is_shared or not is_written)
    }
    size, start = tensor.element_size(), tensor.data_ptr()
    strides = [stride * size for stride in tensor.stride()]
    return [
        Extent(space, _elements(start + shift, tensor.shape, strides, size))
        for space, shift in [(_MEMORY, 0), *files]
    ]


def extents_in_file(
    descriptor: int, offset: int, shape: Sequence[int], strides: Sequence[int], size: int
) -> list[Extent]:
    """Return where the elements of a tensor are in an open file.

    Args:
        descriptor: An open file descriptor.
        offset: Bytes before the first element.
        shape: Shape of the tensor.
        strides: Bytes between neighbours in each dimension.
        size: Bytes of an element.
    """
    elements = _elements(offset, shape, strides, size)
    return [Extent(name, elements) for name in _names_of(descriptor)]


def is_mapped_from(array: np.ndarray, descriptor: int, offset: int) -> bool:
    """Return whether the first byte of an array is that byte of an open file.

    It is not if the file was replaced after it had been mapped. True where the system does not list
    what is mapped.
    """
    mapping = _mapping_at(array.ctypes.data)
    if mapping is None:
        return True
    position = mapping.offset + array.ctypes.data - mapping.addresses.start
    return mapping.file in _names_of(descriptor) and position == offset


def is_read_only(tensor: Tensor) -> bool:
    """Return whether a write to a CPU tensor would end the process, as far as is listed."""
    return not all(mapping.is_writable for mapping in _mappings_of(tensor))


class _Place:
    """What NumPy makes an array of at a position, without looking there."""

    def __init__(self, position: int, shape: Sequence[int], strides: Sequence[int], size: int):
        self.__array_interface__ = {
            "version": 3,
            "data": (_ORIGIN + position, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{size}",
        }


def _elements(position: int, shape: Sequence[int], strides: Sequence[int], size: int) -> np.ndarray:
    return np.asarray(_Place(position, shape, strides, size))


def _share(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _mappings() -> list[_Mapping]:
    """Return what is mapped into this process's memory; nothing where the system does not say."""
    if not _MAPS.exists():
        return []
    found = []
    for line in _MAPS.read_bytes().splitlines():
        addresses, permissions, offset, device, inode, *_ = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in addresses.split(b"-"))
        found.append(
            _Mapping(
                range(start, stop),
                b"w" in permissions,
                b"s" in permissions,
                # A System V segment may have inode 0: the device tells files from other memory.
                None if device == b"00:00" else (device.decode(), int(inode)),
                int(offset, 16),
            )
        )
    return found


def _mappings_of(tensor: Tensor) -> list[_Mapping]:
    """Return the mappings that hold the elements of a tensor, and those between elements."""
    if not tensor.numel():
        return []
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    stop = start + (last + 1) * tensor.element_size()
    return [
        mapping
        for mapping in _mappings()
        if mapping.addresses.start < stop and start < mapping.addresses.stop
    ]


def _mapping_at(address: int) -> _Mapping | None:
    return next((mapping for mapping in _mappings() if address in mapping.addresses), None)


def _names_of(descriptor: int) -> list[Hashable]:
    """Return what tells an open file from others: as ``stat`` names it, and as mappings do.

    The two differ on file systems with subvolumes or layers.
    """
    stat = os.fstat(descriptor)
    names: list[Hashable] = [(stat.st_dev, stat.st_ino)]
    try:
        page = mmap.mmap(descriptor, 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # an empty file, or one that nobody can have mapped
        return names
    mapping = _mapping_at(np.frombuffer(page, np.uint8).ctypes.data)
    return names if mapping is None else [*names, mapping.file]
