"""The ranges of memory and of files that contain a tensor."""

import mmap
import os
import re
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

_MEMORY = "memory"
_MAPS = Path("/proc/self/maps")
_LINE = re.compile(rb"^(\w+)-(\w+) .(.).(.) (\w+) (\S+) (\d+)", re.MULTILINE)
"""Start and stop, permissions to write and to share, offset, device and inode of a mapping."""


Extent = tuple[Hashable, int, int]
"""The memory of the process or a file, and start and stop of the bytes that contain a tensor."""


class Mapping(NamedTuple):
    """One line of ``/proc/self/maps``: a mapping of this process's memory."""

    is_writable: bool
    """Whether a write does not crash the process."""
    is_shared: bool
    """Whether writes reach the file."""
    file: tuple[str, int] | None
    """Device and inode; ``None`` for anonymous memory."""
    shift: int
    """Position in the file less the address, in bytes."""


def extents_in_memory(tensor: Tensor, *, is_written: bool) -> list[Extent]:
    """Return the extents of a tensor in memory and in the files that are mapped there.

    Args:
        tensor: A CPU tensor of any shape and strides.
        is_written: Whether the tensor is written to. Writes reach a file only through a shared
            mapping; reads depend on the file through a private (copy-on-write) mapping too.
    """
    start, stop = span_of(tensor)
    return [(_MEMORY, start, stop)] + [
        (mapping.file, start + mapping.shift, stop + mapping.shift)
        for mapping in mappings(start, stop)
        if mapping.file is not None and (mapping.is_shared or not is_written)
    ]


def extents_of_file(descriptor: int) -> list[Extent]:
    """Return the whole of an open file, for each of its identities: ``stat`` and the mappings.

    The two differ on file systems with subvolumes (btrfs) or layers (overlayfs).
    """
    stat = os.fstat(descriptor)
    names: list[Hashable] = [(stat.st_dev, stat.st_ino)]
    try:
        page = mmap.mmap(descriptor, 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # an empty file, or one that cannot be mapped
        pass
    else:
        address = np.frombuffer(page, np.uint8).ctypes.data
        names += [mapping.file for mapping in mappings(address, address + 1)]
    return [(name, 0, sys.maxsize) for name in names]


def repeats(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory.

    False if every stride is at least the span of all dimensions with smaller strides.
    """
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride < span and length > 1 and tensor.numel():
            return True
        span += stride * (length - 1)
    return False


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a CPU tensor, and that after its last byte."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in strides)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def mappings(start: int, stop: int) -> list[Mapping]:
    """Return this process's memory mappings that meet a range of addresses."""
    selected = []
    for line in _LINE.findall(_MAPS.read_bytes()) if start < stop else ():
        first, last, offset = (int(number, 16) for number in (*line[:2], line[4]))
        if first < stop and start < last:
            # A System V segment may have inode 0, so the device identifies anonymous memory.
            file = None if line[5] == b"00:00" else (line[5].decode(), int(line[6]))
            selected.append(Mapping(line[2] == b"w", line[3] == b"s", file, offset - first))
    return selected
