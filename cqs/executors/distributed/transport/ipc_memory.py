"""Device memory that the processes of a host share by CUDA IPC.

PyTorch's allocator cannot provide it: an IPC handle covers a whole allocation of the driver, which
PyTorch divides among tensors. Memory that a peer has open must not be freed before the peer closes
it, which PyTorch does not know.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cqs.executors.distributed.agreement import swap
from cqs.executors.distributed.transport import cuda_driver

_LEAST_BYTES = 1 << 21
"""Smallest allocation in bytes, a page of 2 MiB. An IPC handle opens whole pages: a smaller buffer
would expose other memory of the process."""


class IpcMemory:
    """A buffer on this rank's GPU that its peers can access, and access to theirs.

    Each buffer starts with flags, int32, which this rank and its peers write.
    """

    def __init__(
        self, device: torch.device, rank: int, num_ranks: int, initial_flags: Sequence[int]
    ) -> None:
        """Start without a buffer; :meth:`allocate` allocates one.

        Args:
            device: The GPU of this rank.
            rank: Rank of this process in the group.
            num_ranks: Number of ranks in the group.
            initial_flags: Initial values of the flags.
        """
        self._device, self.rank, self._initial_flags = device, rank, list(initial_flags)
        self.flag_bytes = 4 * len(initial_flags)
        """Size of the flags in bytes."""
        self.addresses = [0] * num_ranks
        """Device address of every rank's buffer, valid in this process; 0 if there is none."""
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        """This rank's buffer, ``uint8[num_bytes]`` on the GPU; empty if there is none."""
        self.is_captured = False
        """Whether a CUDA graph uses the current buffer, and so may be replayed at any time."""
        self.captured_addresses: list[int] = []
        """Addresses of this rank's earlier buffers that CUDA graphs may use; they are not freed."""
        self.is_released = False
        """Whether the group was aborted, so that the flags are not valid any more."""

    @property
    def flags(self) -> list[int]:
        """Values of the flags; synchronizes with the GPU."""
        return list(self.buffer[: self.flag_bytes].view(torch.int32).tolist())

    def allocate(self, control: Any, num_bytes: int) -> bool:
        """Allocate this rank's buffer and open those of the peers; every rank must call this.

        Args:
            control: Process group of all ranks for CPU tensors.
            num_bytes: Size of the buffer in bytes.

        Returns:
            Whether all ranks succeeded; otherwise no rank has a buffer.
        """
        num_bytes = max(num_bytes, _LEAST_BYTES)
        with torch.cuda.device(self._device):
            address, handle = _allocate(num_bytes)
            if address:
                self.buffer = as_bytes(address, num_bytes, self._device)
                flags = torch.tensor(self._initial_flags, dtype=torch.int32, device="cpu")
                self.buffer[: self.flag_bytes].view(torch.int32).copy_(flags)
                torch.cuda.synchronize()  # peers may write flags once they have the handle
            handles = swap(control, handle)
            rank_handles = [
                bytes(handles[first : first + len(handle)])
                for first in range(0, len(handles), len(handle))
            ]
            self.addresses = [
                address if rank == self.rank else cuda_driver.open_memory(rank_handle)
                for rank, rank_handle in enumerate(rank_handles)
            ]
        # One rank without memory or access would leave the others with buffers of different sizes.
        if all(swap(control, [all(self.addresses)])):
            return True
        self.close(control)
        return False

    def grow(self, control: Any, num_bytes: int) -> None:
        """Replace the buffer by a larger one; every rank must call this.

        The caller no longer uses the old buffer. It is kept for CUDA graphs, if they may use it.

        Args:
            control: Process group of all ranks for CPU tensors.
            num_bytes: Size of the new buffer.

        Raises:
            torch.OutOfMemoryError: A rank has too little device memory; no rank has a buffer then.
            RuntimeError: A rank has failed.
        """
        torch.cuda.synchronize(self._device)  # this rank copies from no peer's buffer any more
        if self.is_captured:  # equal on all ranks, which capture the same calls
            self.captured_addresses.append(self.addresses[self.rank])
            self._forget()
        else:
            self.close(control)
        if not self.allocate(control, num_bytes):
            raise torch.OutOfMemoryError(
                f"a rank of the group cannot allocate a send buffer of {num_bytes / 2**20:.0f} MiB"
            )

    def close(self, control: Any) -> None:
        """Close the peers' buffers and free this rank's; every rank must call this.

        Args:
            control: Process group of all ranks for CPU tensors.

        Raises:
            RuntimeError: A rank has failed; this rank's buffer is not freed.
        """
        self.disconnect()
        swap(control, [0])  # memory that a peer has open must not be freed
        self.free()

    def disconnect(self) -> None:
        """Close the peers' buffers."""
        with torch.cuda.device(self._device):
            for rank, address in enumerate(self.addresses):
                if rank != self.rank and address:
                    cuda_driver.close_memory(address)
                    self.addresses[rank] = 0

    def free(self) -> None:
        """Free this rank's buffer; no peer may access it any more."""
        address = self.addresses[self.rank]
        self._forget()
        if address:
            with torch.cuda.device(self._device):
                cuda_driver.free(address)

    def _forget(self) -> None:
        self.buffer, self.is_captured = self.buffer[:0], False
        self.addresses = [0] * len(self.addresses)


def as_bytes(address: int, number: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor over device memory that PyTorch did not allocate."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, number)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (number,), (1,))


def _allocate(num_bytes: int) -> tuple[int, bytes]:
    """Allocate device memory and return its address and its IPC handle.

    The address is 0 and the handle all zeros if there is too little memory. The handle alone is all
    zeros if the device does not support IPC.
    """
    address = cuda_driver.allocate(num_bytes)
    if not address:  # perhaps because PyTorch caches memory that no tensor uses
        torch.cuda.empty_cache()
        address = cuda_driver.allocate(num_bytes)
    handle = bytes(cuda_driver.HANDLE_BYTES)
    if address:
        with suppress(RuntimeError):
            handle = cuda_driver.export_memory(address)
    return address, handle
