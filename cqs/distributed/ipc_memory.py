"""Memory of GPUs that processes of one host read from each other, by CUDA's IPC."""

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from cqs.distributed.agreement import meet, swap

_LEAST_BYTES = 1 << 21
"""Less shares its page with memory that is none of the other ranks' business."""
_HANDLE_BYTES = 64


class IpcMemory:
    """Memory of this rank's GPU that the others read, and theirs.

    It begins with numbers, which all ranks write.
    """

    def __init__(
        self, device: torch.device, rank: int, num_ranks: int, first_numbers: Sequence[int]
    ) -> None:
        """Have none.

        Args:
            device: The GPU.
            rank: Of this process.
            num_ranks: In the group.
            first_numbers: int32, with which memory begins when it is taken.
        """
        self._device, self.rank, self._first_numbers = device, rank, list(first_numbers)
        self.addresses = [0] * num_ranks
        """Of every rank, in this process."""
        self.own = torch.empty(0, dtype=torch.uint8)
        """The bytes of this rank's memory."""
        self.is_captured = False
        """Whether a CUDA graph may use it, and be replayed at any time."""
        self.captured: list[int] = []
        """Addresses of what this rank had before, if graphs may use it: nobody lets go of that."""
        self.is_released = False
        """Whether numbers in it are not to be believed any more."""

    @property
    def header_bytes(self) -> int:
        """Bytes of the numbers."""
        return 4 * len(self._first_numbers)

    @property
    def numbers(self) -> list[int]:
        """What the numbers are; waits for the GPU."""
        found: list[int] = self.own[: self.header_bytes].view(torch.int32).tolist()
        return found

    def take(self, control: Any, num_bytes: int) -> bool:
        """Take memory, and open that of the other ranks; say whether all ranks could."""
        num_bytes = max(num_bytes, _LEAST_BYTES)
        with torch.cuda.device(self._device):
            address, handle = _allocate(num_bytes)
            if address:
                self.own = _as_bytes(address, num_bytes, self._device)
                numbers = torch.tensor(self._first_numbers, dtype=torch.int32)
                self.own[: self.header_bytes].view(torch.int32).copy_(numbers)
                torch.cuda.synchronize()  # before others write
            handles = swap(control, handle, [len(handle)] * control.size())
            self.addresses = [
                _open(bytes(handles[other * len(handle) : (other + 1) * len(handle)]))
                if other != self.rank
                else address
                for other in range(control.size())
            ]
        if all(swap(control, [all(self.addresses)], [1] * control.size())):
            return True
        self.let_go(control)
        return False

    def grow(self, control: Any, num_bytes: int) -> None:
        """Take more memory instead; all ranks do, when nobody uses it any more but CUDA graphs.

        Raises:
            torch.OutOfMemoryError: if a rank has not as much; all have none then.
        """
        torch.cuda.synchronize(self._device)
        if self.is_captured:
            self.captured.append(self.addresses[self.rank])
            self._forget()
        else:
            self.let_go(control)
        if not self.take(control, num_bytes):
            raise torch.OutOfMemoryError(
                f"a rank of the group has no {num_bytes / 2**20:.0f} MiB for what others fetch"
            )

    def let_go(self, control: Any) -> None:
        """Let go of all memory; all ranks do."""
        self.disconnect()
        meet(control)
        self.free()

    def disconnect(self) -> None:
        """Let go of other ranks' memory."""
        with torch.cuda.device(self._device):
            for rank, address in enumerate(self.addresses):
                if rank != self.rank and address:
                    driver.cuIpcCloseMemHandle(address)  # may fail if the rank has died
                    self.addresses[rank] = 0

    def free(self) -> None:
        """Let go of this rank's memory, which nobody may read any more."""
        address = self.addresses[self.rank]
        self._forget()
        if address:
            with torch.cuda.device(self._device):
                check(driver.cuMemFree(address))

    def _forget(self) -> None:
        self.own, self.is_captured = self.own[:0], False
        self.addresses = [0] * len(self.addresses)


def check(answer: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the driver did not do what it was asked to."""
    if answer[0]:
        raise RuntimeError(f"the CUDA driver failed: {answer[0].name}")


def _as_bytes(address: int, number: int, device: torch.device) -> Tensor:
    """Return memory that PyTorch did not allocate."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, number)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (number,), (1,))


def _allocate(num_bytes: int) -> tuple[int, bytes]:
    """Return the address of memory, and what opens it in other processes.

    Both are zero if there is none.
    """
    error, address = driver.cuMemAlloc(num_bytes)
    if error:
        torch.cuda.empty_cache()
        error, address = driver.cuMemAlloc(num_bytes)
    if error:
        return 0, bytes(_HANDLE_BYTES)
    error, handle = driver.cuIpcGetMemHandle(address)
    return int(address), bytes(_HANDLE_BYTES) if error else handle.reserved


def _open(reserved: bytes) -> int:
    """Return the address of another process's memory, zero if it cannot be reached."""
    if not any(reserved):
        return 0
    handle = driver.CUipcMemHandle()
    handle.reserved = reserved
    enable = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    error, address = driver.cuIpcOpenMemHandle(handle, int(enable))
    return 0 if error else int(address)
