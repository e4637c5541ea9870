"""Memory of a host or GPU that several processes of the host read and write in place.

Memory of the host is an anonymous file (memfd): it has no name in a file system, other users cannot
open it, and it is freed when the last process that has it open ends, however it ends. Memory of a
GPU is shared by CUDA IPC.
"""

import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cqs.executors.distributed.transport import cuda_driver
from cqs.executors.distributed.transport.ipc_memory import as_bytes
from cqs.executors.ray.blob import DenseLayout
from cqs.executors.ray.pool import MemoryNotSharedError

_ALIGNMENT = 256
"""Bytes at whose multiples tensors start."""
_LEAST_BYTES = 2**25
"""Smallest allocation in bytes."""
_PROCESS = uuid.uuid4().hex
"""Identifies this process: processes in two containers may have the same number."""
_HOST = "host"
"""Name of the device of host memory."""


class SharedTensor(NamedTuple):
    """Location of a tensor in shared memory; pickles in a few hundred bytes."""

    process: str
    """The process that has made the memory."""
    device: str
    """Its GPU, or ``"host"``."""
    handle: bytes
    """IPC handle of the allocation that includes the tensor, or path and name of its file."""
    base: int
    """Address of the allocation in that process."""
    num_bytes: int
    """Size of the allocation."""
    offset: int
    """Bytes of the allocation before the tensor."""
    layout: DenseLayout
    """The tensor."""

    def is_on(self, device: torch.device) -> bool:
        """Return whether the tensor is on this device."""
        return self.device == _name_of(device)


class _Allocation:
    """Memory that this process shares with others."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.used = 0
        """Bytes in use, from the beginning."""
        if device.type == "cpu":
            self.memory, self.handle = self._make_file(num_bytes)
            self.base = self.memory.data_ptr()
            return
        with torch.inference_mode(False):  # later runs may write outside of this mode
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context current in this thread
            self.base = cuda_driver.find_base(self.memory.data_ptr())
            self.handle = cuda_driver.export_memory(self.base)

    def _make_file(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return memory of the host, and the path and name of its file."""
        import psutil  # comes with Ray

        if num_bytes > (most := psutil.virtual_memory().available // 4):
            raise RuntimeError(f"{num_bytes} bytes exceed {most}, a quarter of the free memory")
        name = f"cqs-{uuid.uuid4().hex}"
        file = os.memfd_create(name)
        weakref.finalize(self, os.close, file)
        os.posix_fallocate(file, 0, num_bytes)  # a write to memory that is short is SIGBUS
        return _map_file(file, num_bytes), f"/proc/{os.getpid()}/fd/{file} {name}".encode()


class SharedMemory:
    """Memory for tensors of one run after another, which other processes open once.

    To open an allocation takes 10 ms on a GPU, and on the host 0.2 ms for each MiB: allocations are
    kept from run to run. Memory that another process has open exists until that process closes it,
    even if this process ends.
    """

    def __init__(self, device: torch.device):
        """Start without memory.

        Args:
            device: A GPU of this process, or the CPU for memory of the host.
        """
        self.device, self._name = device, _name_of(device)
        self._allocations: list[_Allocation] = []

    def clear(self) -> None:
        """Let new tensors overwrite all earlier ones."""
        for allocation in self._allocations:
            allocation.used = 0

    def clear_for(self, like: Sequence[Tensor]) -> bool:
        """Let new tensors overwrite all earlier ones; return whether these fit into the memory."""
        self.clear()
        size = sum(map(_size_of, like))
        return any(size <= allocation.memory.nbytes for allocation in self._allocations)

    def allocate(self, like: Sequence[Tensor]) -> list[tuple[Tensor, SharedTensor]]:
        """Return tensors without gaps with these shapes, dtypes and orders of strides.

        Returns:
            The tensors, and their locations.

        Raises:
            torch.OutOfMemoryError: The GPU has too little memory.
            OSError: The host has too little memory.
            RuntimeError: It would have too little left, or memory of the GPU has no IPC handle, as
                with PyTorch's expandable segments.
        """
        sizes = list(map(_size_of, like))
        allocation = self._find_room(sum(sizes))
        before, places = allocation.memory.data_ptr() - allocation.base, []
        for tensor, size in zip(like, sizes, strict=True):
            first, layout = allocation.used, DenseLayout.like(tensor)
            allocation.used += size
            shared = SharedTensor(
                process=_PROCESS,
                device=self._name,
                handle=allocation.handle,
                base=allocation.base,
                num_bytes=before + allocation.memory.nbytes,
                offset=before + first,
                layout=layout,
            )
            places.append((layout.view(allocation.memory[first:]), shared))
        return places

    def _find_room(self, num_bytes: int) -> _Allocation:
        """Return an allocation with room; a new one at least doubles the memory."""
        for allocation in self._allocations:
            if allocation.used + num_bytes <= allocation.memory.nbytes:
                return allocation
        present = sum(allocation.memory.nbytes for allocation in self._allocations)
        new = _Allocation(max(num_bytes, present, _LEAST_BYTES), self.device)
        self._allocations.append(new)
        return new


class OpenedMemory:
    """Access of a process to the shared memory of others."""

    def __init__(self, device: torch.device):
        """Start without open memory.

        Args:
            device: The device of this process; a GPU copies registered host memory faster.
        """
        self._device = device
        self._memories: dict[bytes, Tensor] = {}
        """Bytes of each open allocation, by its handle."""
        self._closers: list[Callable[[], object]] = []
        """Functions of CUDA that close this memory."""

    def tensor(self, shared: SharedTensor) -> Tensor:
        """Return a tensor over the memory of another process, valid until :meth:`close`.

        Raises:
            MemoryNotSharedError: The memory cannot be accessed, or its process has ended.
        """
        memory = self._memories.get(shared.handle)
        if memory is None or memory.nbytes < shared.num_bytes:
            opens = self._open_file if shared.device == _HOST else self._open_gpu_memory
            memory = self._memories[shared.handle] = opens(shared)
        return shared.layout.view(memory[shared.offset :])

    def _open_file(self, shared: SharedTensor) -> Tensor:
        """Return the bytes of host memory, which is registered with CUDA if there is a GPU."""
        path, name = shared.handle.decode().split()
        try:
            with open(path, "r+b", buffering=0) as file:
                if name not in os.readlink(f"/proc/self/fd/{file.fileno()}"):
                    raise FileNotFoundError(f"{path} is another file")
                memory = _map_file(file.fileno(), shared.num_bytes)
        except OSError as error:  # of another container or user, or a process that has ended
            raise MemoryNotSharedError(f"host memory cannot be opened: {error}") from error
        if self._device.type == "cuda":  # a copy engine reads it directly
            cudart, address = torch.cuda.cudart(), memory.data_ptr()
            if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) == 0:
                self._closers.append(partial(cudart.cudaHostUnregister, address))
        return memory

    def _open_gpu_memory(self, shared: SharedTensor) -> Tensor:
        """Return the bytes of an allocation of a GPU, of this process or another."""
        address, device = shared.base, torch.device("cuda", self._device.index or 0)
        known = self._memories.get(shared.handle)  # that of another allocation in the same block
        with torch.cuda.device(device):
            if known is not None:
                address = known.data_ptr()
            elif shared.process != _PROCESS:  # which cannot open its own memory
                torch.cuda.synchronize()  # makes the context current in this thread
                address = cuda_driver.open_memory(shared.handle)
                if not address:
                    raise MemoryNotSharedError("GPU memory of another process cannot be opened")
                self._closers.append(partial(cuda_driver.close_memory, address))
            return as_bytes(address, shared.num_bytes, device)

    def close(self) -> None:
        """Wait for the GPU and close all memory."""
        if self._closers:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                for close in self._closers:
                    close()
        self._closers.clear()
        self._memories.clear()


def _map_file(file: int, num_bytes: int) -> Tensor:
    """Return the bytes of a file; the mapping exists as long as a tensor refers to it."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # later page faults would be part of a call
    with torch.inference_mode(False):  # later runs may write outside of this mode
        return torch.frombuffer(mmap.mmap(file, num_bytes, flags), dtype=torch.uint8)


def _size_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return _HOST
    return str(torch.cuda.get_device_properties(device).uuid)
