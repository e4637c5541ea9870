"""Tensors on GPUs that other processes of the host read and write in place, by CUDA IPC."""

import torch
from cuda.bindings import driver
from torch import Tensor

from cqs.executors.distributed.transport.ipc_memory import as_bytes, check, open_memory
from cqs.executors.ray.pool import MemoryNotSharedError


class SharedTensor:
    """A GPU tensor as an IPC handle, which pickles in a few hundred bytes.

    The tensor must exist, and its values must be complete, for as long as other processes use it.
    """

    def __init__(self, tensor: Tensor):
        """Export the memory of a tensor.

        Raises:
            RuntimeError: The memory has no IPC handle, as with PyTorch's expandable segments.
        """
        with torch.cuda.device(tensor.device):
            # The values are then complete, and the context is current in this thread.
            torch.cuda.current_stream().synchronize()
            error, base, _ = driver.cuMemGetAddressRange(tensor.data_ptr())
            check((error,))
            error, handle = driver.cuIpcGetMemHandle(base)
            check((error,))
        self._handle = bytes(handle.reserved)
        self._offset = tensor.data_ptr() - int(base)
        self._dtype, self._shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
        self._gpu = _name_of(tensor.device)

    def is_on(self, device: torch.device) -> bool:
        """Return whether the tensor is on this GPU."""
        return self._gpu == _name_of(device)


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
            MemoryNotSharedError: The memory cannot be accessed.
        """
        with torch.cuda.device(self._device):
            if shared._handle not in self._addresses:
                torch.cuda.synchronize()  # makes the context current in this thread
                address = open_memory(shared._handle)
                if not address:
                    raise MemoryNotSharedError("GPU memory of the driver cannot be opened")
                self._addresses[shared._handle] = address
            address = self._addresses[shared._handle]
            last = sum(
                (length - 1) * stride
                for length, stride in zip(shared._shape, shared._strides, strict=True)
            )
            size = (last + 1) * shared._dtype.itemsize
            found = as_bytes(address + shared._offset, size, self._device).view(shared._dtype)
        return found.as_strided(shared._shape, shared._strides)

    def close(self) -> None:
        """Wait for the GPU and close all memory."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for address in self._addresses.values():
                driver.cuIpcCloseMemHandle(address)  # fails if the other process has exited
        self._addresses.clear()


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
