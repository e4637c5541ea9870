"""GPUs of a host that read each other's memory, beside whatever they compute.

Copy engines move the rows, and streams wait for numbers in memory: unlike a message of NCCL, which
is a kernel at both ends, this takes no multiprocessor from kernels that run meanwhile.
"""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from cqs.distributed.agreement import control_group, meet, swap
from cqs.distributed.transfer import Parcel, UnderWay

_NUM_SLOTS = 2
_ALIGNMENT = 512
_LEAST_BYTES = 1 << 21
"""Less shares its page with memory that is none of the other ranks' business."""
_RELEASED = 1 << 30
"""Later than any send."""
_POLL_SECONDS = 0.01
_WATCH_SECONDS = 1.0
_HANDLE_BYTES = 64


class PeerMemory:
    """Carries parcels: each rank packs them into memory of its own, from where others fetch.

    The memory has two slots, which sends use in turn; they are of one size, and parcels at one
    place, on all ranks. Before them are two numbers for every rank: its last send that had
    something for this one, and the last of this rank's sends that it has fetched. Whoever needs a
    number to be high enough waits on the GPU: for rows to be there, or for a slot to be free.
    """

    def __init__(self, group: Any, device: torch.device, memory: "_Memory") -> None:
        """Begin with slots of no bytes; see :func:`connect_peers`."""
        self._group = weakref.ref(group)
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device, self.memory = device, memory
        self._timeout = group._get_backend(device).options._timeout
        self._slot_bytes = 0
        self._number = 0
        self._fetching = torch.cuda.Stream(device)
        self._packing = torch.cuda.current_stream(device)
        self._unfinished: deque[tuple[torch.cuda.Event, float]] = deque()
        self._is_released = False
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's memory that others fetch from; PyTorch does not count them."""
        return self.memory.own.nbytes

    def send(self, parcels: Sequence[Parcel]) -> list[UnderWay]:
        """Send parcels; see :class:`cqs.distributed.transfer.Carrier`.

        Raises:
            RuntimeError: after :meth:`release`.
            torch.OutOfMemoryError: if a rank has no memory for longer slots.
        """
        if self._is_released:
            raise RuntimeError("the group was aborted")
        rooms = [_aligned(parcel.places.most * parcel.row_bytes) for parcel in parcels]
        if sum(rooms) > self._slot_bytes:
            self._grow(sum(rooms))
        self._number += 1
        slot = self._number % _NUM_SLOTS
        begin = _header_bytes(self._num_ranks) + slot * self._slot_bytes
        firsts = [begin + sum(rooms[:i]) for i in range(len(rooms))]
        self._packing = torch.cuda.current_stream(self._device)
        for reader, number in self.memory.readers[slot].items():
            self._wait(self._packing, self._num_ranks + reader, number)
        for parcel, first in zip(parcels, firsts, strict=True):
            packed = self.memory.own[first : first + sum(parcel.lengths) * parcel.row_bytes]
            packed = packed.view(parcel.sources[0].dtype).view(-1, *parcel.row_shape)
            parcel.pack(packed)
        self.memory.readers[slot] = {
            rank: self._number
            for rank in range(self._num_ranks)
            if any(parcel.lengths[rank] for parcel in parcels)
        }
        for reader in self.memory.readers[slot]:
            self._tell(self._packing, reader, self._rank)
        return self._fetch(parcels, firsts)

    def release(self, seconds: float) -> None:
        """End what waits for other ranks, within some time; what it was to fetch is garbage."""
        self._is_released = True
        end = time.monotonic() + seconds
        numbers = self.memory.own[: _header_bytes(self._num_ranks)].view(torch.int32)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            while time.monotonic() < end:  # ranks that are alive may yet write a lower number
                numbers.fill_(_RELEASED)
                if self._fetching.query() and self._packing.query():
                    return
                time.sleep(_POLL_SECONDS)

    def check_time(self) -> None:
        """End the process with a message if it has waited for another rank for too long."""
        while self._unfinished and self._unfinished[0][0].query():
            self._unfinished.popleft()
        if self._unfinished and self._unfinished[0][1] < time.monotonic():
            print(
                f"cqs: what rank {self._rank} waits for has not come in "
                f"{self._timeout.total_seconds():g} s: another has died or hangs",
                file=sys.stderr,
                flush=True,
            )
            os.abort()

    def _fetch(self, parcels: Sequence[Parcel], firsts: Sequence[int]) -> list[UnderWay]:
        """Have rows copied here as soon as they are packed, those of the next rank first."""
        received = [parcel.received for parcel in parcels if not parcel.route.stays]
        if not received:
            return []
        self._fetching.wait_stream(self._packing)  # till then the memory may be in other use
        for step in range(1, self._num_ranks):
            owner = (self._rank + step) % self._num_ranks
            if not any(parcel.expected[owner] for parcel in parcels):
                continue
            self._wait(self._fetching, owner, self._number)
            for parcel, first in zip(parcels, firsts, strict=True):
                if not (num_rows := parcel.expected[owner]):
                    continue
                row, there = sum(parcel.expected[:owner]), parcel.places.firsts[owner]
                _check(
                    driver.cuMemcpyAsync(
                        parcel.received.data_ptr() + row * parcel.row_bytes,
                        self.memory.addresses[owner] + first + there * parcel.row_bytes,
                        num_rows * parcel.row_bytes,
                        self._fetching.cuda_stream,
                    )
                )
            self._tell(self._fetching, owner, self._num_ranks + self._rank)
        event = self._fetching.record_event()
        self._unfinished.append((event, time.monotonic() + self._timeout.total_seconds()))
        return [_Fetched(event, self._fetching, received)]

    def _wait(self, stream: torch.cuda.Stream, place: int, number: int) -> None:
        """Let a stream go on when a number of this rank's memory is at least ``number``."""
        address = self.memory.addresses[self._rank] + 4 * place
        at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        _check(driver.cuStreamWaitValue32(stream.cuda_stream, address, number, at_least))

    def _tell(self, stream: torch.cuda.Stream, rank: int, place: int) -> None:
        """Write the number of this send to a rank's memory, after all that the stream does."""
        address = self.memory.addresses[rank] + 4 * place
        _check(driver.cuStreamWriteValue32(stream.cuda_stream, address, self._number, 0))

    def _grow(self, slot_bytes: int) -> None:
        """Take memory for longer slots; all ranks do."""
        control = control_group(self._group())
        torch.cuda.synchronize(self._device)
        meet(control)  # nobody reads or tells any more
        self.memory.disconnect()
        meet(control)
        self.memory.free()
        num_bytes = _header_bytes(self._num_ranks) + _NUM_SLOTS * slot_bytes
        memory = _Memory.share(self._device, self._rank, control, num_bytes)
        if memory is None:
            raise torch.OutOfMemoryError(
                f"a rank of the group has no {num_bytes / 2**20:.0f} MiB for what others fetch"
            )
        self.memory, self._slot_bytes = memory, slot_bytes


def connect_peers(group: Any, device: torch.device) -> PeerMemory | None:
    """Connect GPUs that reach each other's memory; every rank of the group must call this.

    A rank that waits longer for another than the group's time-out ends its process, as NCCL does.

    Returns:
        ``None`` on all ranks if one does not reach another.
    """
    control = control_group(group)
    memory = _Memory.share(device, dist.get_rank(group), control, _header_bytes(control.size()))
    return None if memory is None else PeerMemory(group, device, memory)


class _Fetched:
    """Rows that a stream copies."""

    def __init__(
        self, event: torch.cuda.Event, stream: torch.cuda.Stream, received: list[Tensor]
    ) -> None:
        self._event, self._stream, self._received = event, stream, received

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
            return
        end = time.monotonic() + timeout.total_seconds()
        while not self._event.query() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        for tensor in self._received:  # if they come yet, nobody else may have the memory
            tensor.record_stream(self._stream)


class _Memory:
    """Memory of this rank's GPU that the others read, and theirs.

    It begins with two numbers for every rank; see :class:`PeerMemory`.
    """

    def __init__(self, device: torch.device, rank: int, addresses: list[int], num_bytes: int):
        self._device, self._rank = device, rank
        self.addresses = addresses
        """Of every rank, in this process."""
        self.own = torch.as_tensor(_Bytes(addresses[rank], num_bytes), device=device)
        self.readers: list[dict[int, int]] = [{} for _ in range(_NUM_SLOTS)]
        """Of each slot: who fetches what is in it, and since which send it is there."""

    @classmethod
    def share(
        cls, device: torch.device, rank: int, control: Any, num_bytes: int
    ) -> "_Memory | None":
        """Take memory, and open that of the other ranks; ``None`` on all if one cannot."""
        num_bytes = max(num_bytes, _LEAST_BYTES)
        with torch.cuda.device(device):
            address, handle = _allocate(num_bytes)
            handles = swap(control, handle, [len(handle)] * control.size())
            addresses = [
                _open(bytes(handles[other * len(handle) : (other + 1) * len(handle)]))
                if other != rank
                else address
                for other in range(control.size())
            ]
        memory = cls(device, rank, addresses, num_bytes)
        if all(swap(control, [all(addresses)], [1] * control.size())):
            return memory
        memory.disconnect()
        meet(control)
        memory.free()
        return None

    def disconnect(self) -> None:
        """Let go of other ranks' memory."""
        with torch.cuda.device(self._device):
            for rank, address in enumerate(self.addresses):
                if rank != self._rank and address:
                    driver.cuIpcCloseMemHandle(address)  # may fail if the rank has died

    def free(self) -> None:
        """Let go of this rank's memory, which nobody may read any more."""
        if self.addresses[self._rank]:
            with torch.cuda.device(self._device):
                _check(driver.cuMemFree(self.addresses[self._rank]))

    def has_been_read(self) -> bool:
        """Whether other ranks have fetched all that is for them; waits for the GPU."""
        numbers = self.own[: _header_bytes(len(self.addresses))].view(torch.int32).tolist()
        return all(
            numbers[len(self.addresses) + rank] >= number
            for readers in self.readers
            for rank, number in readers.items()
        )


class _Bytes:
    """Memory that PyTorch did not allocate."""

    def __init__(self, address: int, number: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (number,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _allocate(num_bytes: int) -> tuple[int, bytes]:
    """Return the address of memory that begins with zeros, and what opens it in other processes.

    Both are zero if there is none.
    """
    error, address = driver.cuMemAlloc(num_bytes)
    if error:
        torch.cuda.empty_cache()
        error, address = driver.cuMemAlloc(num_bytes)
    if error:
        return 0, bytes(_HANDLE_BYTES)
    _check(driver.cuMemsetD8(address, 0, _LEAST_BYTES))
    torch.cuda.synchronize()
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


def _watch(of: "weakref.ref[PeerMemory]") -> None:
    """Check the time while there is a carrier, then free what others have read."""
    memory = None
    while (carrier := of()) is not None:
        carrier.check_time()
        memory = carrier.memory
        del carrier
        time.sleep(_WATCH_SECONDS)
    if memory is not None:
        memory.disconnect()
        while not memory.has_been_read():
            time.sleep(_WATCH_SECONDS)
        memory.free()


def _check(answer: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the driver did not do what it was asked to."""
    if answer[0]:
        raise RuntimeError(f"the CUDA driver failed: {answer[0].name}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _header_bytes(num_ranks: int) -> int:
    """Bytes of two numbers for every rank."""
    return _aligned(2 * num_ranks * 4)
