"""GPU memory that other processes of the host read and write in place, by CUDA IPC."""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqs.executors.distributed.transport import cuda_driver
from cqs.executors.distributed.transport.ipc_memory import as_bytes
from cqs.executors.ray.pool import MemoryNotSharedError

_ALIGNMENT = 256
"""Bytes at whose multiples tensors start."""
_LEAST_BYTES = 2**25
"""Smallest allocation in bytes."""
_PROCESS = uuid.uuid4().hex
"""Identifies this process: processes in two containers may have the same number."""


class SharedTensor(NamedTuple):
    """Location of a contiguous tensor in exported memory; pickles in a few hundred bytes."""

    process: str
    """The process that has exported the memory."""
    gpu: str
    """Its GPU."""
    handle: bytes
    """IPC handle of the allocation that includes the tensor."""
    base: int
    """Address of the allocation in that process."""
    offset: int
    """Bytes of the allocation before the tensor."""
    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""

    def is_on(self, device: torch.device) -> bool:
        """Return whether the tensor is on this GPU."""
        return self.gpu == _name_of(device)


class _Allocation:
    """Memory that this process has exported."""

    def __init__(self, num_bytes: int, device: torch.device):
        with torch.inference_mode(False):  # later runs may write outside of this mode
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.used = 0
        """Bytes in use, from the beginning."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context current in this thread
            self.base = cuda_driver.find_base(self.memory.data_ptr())
            self.handle = cuda_driver.export_memory(self.base)

    def has_room(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= self.memory.nbytes


class ExportedMemory:
    """GPU memory for tensors of one run after another, which other processes open once.

    To open an allocation takes about 10 ms, whatever its size: allocations are kept from run to
    run. Memory that another process has open exists until that process closes it, even if this
    process ends.
    """

    def __init__(self, device: torch.device):
        """Start without memory.

        Args:
            device: A GPU of this process.
        """
        self.device, self._gpu = device, _name_of(device)
        self._allocations: list[_Allocation] = []

    def clear(self) -> None:
        """Let new tensors overwrite all earlier ones."""
        for allocation in self._allocations:
            allocation.used = 0

    def clear_for(self, like: Sequence[Tensor]) -> bool:
        """Let new tensors overwrite all earlier ones; return whether these fit into the memory."""
        self.clear()
        size = sum(map(_size_of, like))
        return any(allocation.has_room(size) for allocation in self._allocations)

    @property
    def is_used(self) -> bool:
        """Whether the memory holds any tensor."""
        return any(allocation.used for allocation in self._allocations)

    def allocate(self, like: Sequence[Tensor]) -> list[tuple[Tensor, SharedTensor]]:
        """Return contiguous tensors of the same shapes and dtypes, and their locations.

        Raises:
            torch.OutOfMemoryError: The GPU has too little memory.
            RuntimeError: The memory has no IPC handle, as with PyTorch's expandable segments.
        """
        sizes = list(map(_size_of, like))
        allocation = self._find_room(sum(sizes))
        before, places = allocation.memory.data_ptr() - allocation.base, []
        for tensor, size in zip(like, sizes, strict=True):
            first, shape = allocation.used, tuple(tensor.shape)
            allocation.used += size
            place = allocation.memory[first : first + tensor.nbytes].view(tensor.dtype)
            shared = SharedTensor(
                process=_PROCESS,
                gpu=self._gpu,
                handle=allocation.handle,
                base=allocation.base,
                offset=before + first,
                dtype=tensor.dtype,
                shape=shape,
            )
            places.append((place.view(shape), shared))
        return places

    def _find_room(self, num_bytes: int) -> _Allocation:
        """Return an allocation with room; a new one at least doubles the memory."""
        for allocation in self._allocations:
            if allocation.has_room(num_bytes):
                return allocation
        present = sum(allocation.memory.nbytes for allocation in self._allocations)
        new = _Allocation(max(num_bytes, present, _LEAST_BYTES), self.device)
        self._allocations.append(new)
        return new


class OpenedMemory:
    """Access of a process to the exported memory of others."""

    def __init__(self, device: torch.device):
        """Start without open memory.

        Args:
            device: The GPU of this process.
        """
        self._device = torch.device("cuda", device.index or 0)
        self._addresses: dict[bytes, int] = {}
        """Address of each open allocation, by its handle."""

    def tensor(self, shared: SharedTensor) -> Tensor:
        """Return a tensor over the memory of another process, valid until :meth:`close`.

        Raises:
            MemoryNotSharedError: The memory cannot be accessed, or its process has ended.
        """
        size = torch.Size(shared.shape).numel() * shared.dtype.itemsize
        with torch.cuda.device(self._device):
            address = self._address_of(shared) + shared.offset
            buffer = as_bytes(address, size, self._device)
        return buffer.view(shared.dtype).view(shared.shape)

    def _address_of(self, shared: SharedTensor) -> int:
        if shared.process == _PROCESS:  # which cannot open its own memory
            return shared.base
        if shared.handle not in self._addresses:
            torch.cuda.synchronize()  # makes the context current in this thread
            address = cuda_driver.open_memory(shared.handle)
            if not address:
                raise MemoryNotSharedError("GPU memory of another process cannot be opened")
            self._addresses[shared.handle] = address
        return self._addresses[shared.handle]

    def close(self) -> None:
        """Wait for the GPU and close all memory."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for address in self._addresses.values():
                cuda_driver.close_memory(address)
        self._addresses.clear()


def _size_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
