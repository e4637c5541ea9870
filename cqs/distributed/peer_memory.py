"""GPUs of a host that read each other's memory, beside whatever they compute.

Copy engines fetch the rows, and streams wait for numbers in memory. A message of NCCL is a kernel
at both ends: it takes multiprocessors from those that run meanwhile, or waits until they end.
"""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from cqs.cuda_graphs import check_not_captured, is_captured
from cqs.distributed.agreement import control_group, meet, timeout_of
from cqs.distributed.ipc_memory import IpcMemory, check
from cqs.distributed.transfer import Fill, Packet, PendingTransfer
from cqs.scheduler.heads import FETCHED

_ALIGNMENT = 512
_NUM_STREAMS = 2
_ENDED, _SEEN, _NUM_ROWS = range(2 * _NUM_STREAMS, 2 * _NUM_STREAMS + 3)
"""What numbers of passes say, after those of sends: that a rank has ended its pass, and that it has
seen that this one has."""
_RELEASED = 1 << 30
"""Later than any send."""
_RELEASED_SECONDS = 60.0
"""After which other ranks of an aborted group fetch no more."""
_POLL_SECONDS = 0.01
_WATCH_SECONDS = 1.0


class PeerMemory:
    """Carries packets: each rank packs them into memory of its own, from where others fetch.

    What the sends of a turn pack has the same place on all ranks. Before all are numbers: the last
    send of every rank that had something for this one, and the last of this rank's sends that it
    has fetched. Whoever needs a number to be high enough waits on the GPU: for rows to be there, or
    for room to be free. Lanes have numbers of their own, for numbers must rise.

    A pass ends when others have fetched all that it packed. The numbers of its sends are 0 again
    then, and ranks tell each other so before they tell anything else: what a pass does is the same
    each time, and may be replayed. So a rank that lags in one pass holds all others in the next.
    """

    num_streams = _NUM_STREAMS
    num_turns = 4
    chunk_rule = FETCHED

    def __init__(self, group: Any, device: torch.device, memory: IpcMemory) -> None:
        """Begin without room; see :func:`connect_peers`."""
        self._group = weakref.ref(group)
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._memory = device, memory
        self._timeout = timeout_of(group)
        self.peak_bytes = 0
        """The most that sends have needed."""
        self.num_sends = 0
        """Of all passes that were not captured."""
        self._is_captured = False
        """Whether this pass is."""
        self._number = 0
        """Of the last send of the pass."""
        self._unread: list[_Packed] = []
        self._opened: torch.cuda.Event | None = None
        """When others may be told of the pass."""
        self._waited: dict[int, torch.cuda.Event] = {}
        """When streams need no number of the pass any more."""
        self._ended: torch.cuda.Event | None = None
        """When the last pass had that was not captured."""
        self._fetching = torch.cuda.Stream(device)
        self._releasing = torch.cuda.Stream(device, priority=-1)  # streams have the lowest
        self._streams = {self._fetching}
        self._unfinished: deque[torch.cuda.Event] = deque()
        self._progress = time.monotonic()
        self._launching = threading.Lock()
        arguments = weakref.ref(self), memory, self._unfinished
        threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def begin(self) -> None:
        """Begin a pass; see :class:`cqs.distributed.transfer.Transport`.

        Raises:
            RuntimeError: after :meth:`release`; if a CUDA graph is captured and there is no memory,
                or the group is no more.
            torch.OutOfMemoryError: if a rank has no room for numbers.
        """
        if not self._memory.own.nbytes:
            self._grow(self._memory.header_bytes)
        with self._launching:
            self._check_released()
            self._is_captured = is_captured(self._device)
            if self._is_captured:
                self._memory.is_captured = True
            elif self._ended is not None:
                torch.cuda.current_stream(self._device).wait_event(self._ended)
            self._open_pass()

    def end(self) -> None:
        """End the pass; see :class:`cqs.distributed.transfer.Transport`."""
        with self._launching:
            if not self._memory.own.nbytes or self._memory.is_released:
                return
            event = self._close_pass()
            torch.cuda.current_stream(self._device).wait_event(event)
            if not self._is_captured:
                self._ended = event

    def send(
        self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int
    ) -> list[PendingTransfer]:
        """Send packets; see :class:`cqs.distributed.transfer.Transport`.

        Raises:
            RuntimeError: after :meth:`release`; if a CUDA graph is captured that needs more memory
                than any call before.
            torch.OutOfMemoryError: if a rank has no room for what is packed.
        """
        rooms = [_aligned(packet.places.most * packet.row_bytes) for packet in packets]
        header = _aligned(self._memory.header_bytes)
        num_bytes = header + num_turns * sum(rooms)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        stream_index, stream = turn % self.num_streams, torch.cuda.current_stream(self._device)
        if num_bytes > self._memory.own.nbytes:
            self._grow(num_bytes)
            with self._launching:
                self._open_pass()
        first = header + turn * sum(rooms)
        firsts = [first + sum(rooms[:i]) for i in range(len(rooms))]
        readers = [
            rank
            for rank in range(self._num_ranks)
            if any(packet.lengths[rank] for packet in packets)
        ]
        # memory that is free on this stream may be in use on it until now
        received = [packet.received for packet in packets if not packet.route.stays]
        free = stream.record_event()
        with self._launching:
            self._check_released()
            if not self._is_captured:
                self._streams.add(stream)
            places = range(first, first + sum(rooms))
            packed = _Packed(places, stream_index, self._number + 1, readers)
            unread = self._make_room(packed, stream)
            self._waited[stream_index] = stream.record_event()
        fill([self._rows(f, p) for f, p in zip(firsts, packets, strict=True)])
        with self._launching:  # where that fails, it is as if there had been no room
            self._check_released()
            self._unread = unread
            self._number += 1
            self.num_sends += not self._is_captured
            assert self._opened is not None
            stream.wait_event(self._opened)
            for reader in readers:
                self._tell(stream, reader, _told(stream_index), self._number)
            if not received:
                return []
            self._fetch(packets, firsts, stream_index, free)
            event = self._record_fetching()
            return [_PendingCopy(event, self._fetching, received)]

    def release(self, seconds: float) -> None:
        """End what waits for other ranks; what it was to fetch is garbage.

        Args:
            seconds: How long to wait for it. It goes on beyond, as ranks that are alive may yet
                write a lower number, and replays of CUDA graphs may yet begin.
        """
        with self._launching:
            self._memory.is_released = True
        is_idle = threading.Event()
        threading.Thread(target=self._release, args=(is_idle,), daemon=True).start()
        is_idle.wait(seconds)

    def _release(self, is_idle: threading.Event) -> None:
        _relax()
        memory = self._memory
        has_replays = memory.is_captured or memory.captured
        end = time.monotonic() + (_RELEASED_SECONDS if has_replays else 0)
        with torch.cuda.device(self._device):  # of a thread that has none yet
            while True:
                if all(stream.query() for stream in tuple(self._streams)):
                    is_idle.set()
                    if time.monotonic() >= end:
                        return
                for own in {*memory.captured, memory.addresses[self._rank]} - {0}:
                    for place in range(_NUM_ROWS * self._num_ranks):
                        number = own + 4 * place, _RELEASED, 0
                        check(driver.cuStreamWriteValue32(self._releasing.cuda_stream, *number))
                time.sleep(_POLL_SECONDS)

    def check_time(self) -> None:
        """End the process with a message if nothing has come from other ranks for too long."""
        while self._unfinished and self._unfinished[0].query():
            self._unfinished.popleft()
            self._progress = time.monotonic()
        if not self._unfinished:
            self._progress = time.monotonic()
        elif time.monotonic() > self._progress + self._timeout.total_seconds():
            print(
                f"cqs: what rank {self._rank} waits for has not come in "
                f"{self._timeout.total_seconds():g} s: another has died or hangs",
                file=sys.stderr,
                flush=True,
            )
            os.abort()

    def _open_pass(self) -> None:
        """Wait until all ranks have ended their last pass: only then may they be told anything."""
        stream = torch.cuda.current_stream(self._device)
        if not self._is_captured:
            self._streams.add(stream)
        self._number, self._unread, self._waited = 0, [], {}
        self._fetching.wait_event(stream.record_event())
        for rank in self._others:
            self._wait(self._fetching, rank, _ENDED, 1)
            self._tell(self._fetching, self._rank, _ENDED, 0, of=rank)
            self._tell(self._fetching, rank, _SEEN, 1)
        self._opened = self._record_fetching()

    def _close_pass(self) -> torch.cuda.Event:
        """Wait until all that was told has been fetched, clear its numbers, and say so.

        Lanes may still merge what came.

        Returns:
            When that has happened.
        """
        stream = self._fetching
        for event in self._waited.values():
            stream.wait_event(event)
        for old in self._unread:
            for reader in old.readers:
                self._wait(stream, reader, _fetched(old.stream_index), old.number)
        own, number = self._memory.addresses[self._rank], _ENDED * self._num_ranks
        with torch.cuda.device(self._device):
            check(driver.cuMemsetD32Async(own, 0, number, stream.cuda_stream))
        for rank in self._others:
            self._wait(stream, rank, _SEEN, 1)  # or it might miss that another pass has ended
            self._tell(stream, self._rank, _SEEN, 0, of=rank)
            self._tell(stream, rank, _ENDED, 1)
        return self._record_fetching()

    def _record_fetching(self) -> torch.cuda.Event:
        """Return when all is done that has been told to fetch; it must be before the time is up."""
        event: torch.cuda.Event = self._fetching.record_event()
        if not self._is_captured:
            self._unfinished.append(event)
        return event

    def _grow(self, num_bytes: int) -> None:
        """Take more memory instead, for a pass that is opened after; all ranks do.

        A pass that is open ends in the old memory: CUDA graphs may still use that.
        """
        if (group := self._group()) is None:
            raise RuntimeError("the group is no more")
        check_not_captured(self._device)
        control = control_group(group)
        meet(control)  # raises if a rank has died
        if self._memory.own.nbytes:
            with self._launching:
                self._close_pass()
        self._memory.grow(control, num_bytes)

    @property
    def _others(self) -> list[int]:
        """The other ranks, the next one first."""
        return [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _check_released(self) -> None:
        if self._memory.is_released:
            raise RuntimeError("the group was aborted")

    def _make_room(self, new: "_Packed", stream: torch.cuda.Stream) -> "list[_Packed]":
        """Let the stream of a stream wait until what was packed at some place has been fetched.

        Returns:
            What is unread once the new has been packed.
        """
        left = []
        for old in self._unread:
            if old.places.start < new.places.stop and new.places.start < old.places.stop:
                for reader in old.readers:
                    self._wait(stream, reader, _fetched(old.stream_index), old.number)
                old.streams.add(new.stream_index)
            # who waits for the readers of the new waits for those of the old
            is_covered = new.readers and _contains(new.places, old.places)
            if not is_covered and len(old.streams) < self.num_streams:
                left.append(old)
        return left + [new] if new.readers else left

    def _fetch(
        self,
        packets: Sequence[Packet],
        firsts: Sequence[int],
        stream_index: int,
        free: torch.cuda.Event,
    ) -> None:
        """Have rows copied here as soon as they are packed, those of the next rank first."""
        fetching = self._fetching
        fetching.wait_event(free)
        for owner in self._others:
            if not any(packet.expected[owner] for packet in packets):
                continue
            self._wait(fetching, owner, _told(stream_index), self._number)
            for packet, first in zip(packets, firsts, strict=True):
                if number := packet.expected[owner]:
                    row, there = sum(packet.expected[:owner]), packet.places.firsts[owner]
                    target = packet.received[row : row + number]
                    source = self._memory.addresses[owner] + first + there * packet.row_bytes
                    place = target.data_ptr(), source, target.nbytes
                    check(driver.cuMemcpyAsync(*place, fetching.cuda_stream))
            self._tell(fetching, owner, _fetched(stream_index), self._number)

    def _rows(self, first: int, packet: Packet) -> Tensor:
        """Return this rank's memory from some byte on as the rows that a packet has for others."""
        number = sum(packet.lengths)
        found = self._memory.own[first : first + number * packet.row_bytes]
        return found.view(packet.sources[0].dtype).view(number, *packet.row_shape)

    def _wait(self, stream: torch.cuda.Stream, rank: int, row: int, number: int) -> None:
        """Let a stream go on when a rank has told this one a number that is at least ``number``."""
        address = self._memory.addresses[self._rank] + 4 * (row * self._num_ranks + rank)
        at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        check(driver.cuStreamWaitValue32(stream.cuda_stream, address, number, at_least))

    def _tell(
        self, stream: torch.cuda.Stream, rank: int, row: int, number: int, *, of: int | None = None
    ) -> None:
        """Tell a rank a number, after all that a stream does before.

        Args:
            stream: Tells it.
            rank: Which to tell.
            row: What the number says.
            number: The number.
            of: Whose number it is; ``None`` means that of this rank.
        """
        place = row * self._num_ranks + (self._rank if of is None else of)
        address = self._memory.addresses[rank] + 4 * place
        check(driver.cuStreamWriteValue32(stream.cuda_stream, address, number, 0))


@dataclass(frozen=True)
class _Packed:
    """What others may not yet have fetched."""

    places: range
    """Its bytes."""
    stream_index: int
    number: int
    """Of the send."""
    readers: list[int]
    streams: set[int] = field(default_factory=set)
    """Those that go on only when it has been fetched."""


def connect_peers(group: Any, device: torch.device) -> PeerMemory | None:
    """Connect GPUs that reach each other's memory; every rank of the group must call this.

    A rank that waits longer for another than the group's time-out ends its process, as NCCL does.

    Returns:
        ``None`` on all ranks if one does not reach another.
    """
    control = control_group(group)
    num_ranks = control.size()
    numbers = [int(row == _ENDED) for row in range(_NUM_ROWS) for _ in range(num_ranks)]
    memory = IpcMemory(device, dist.get_rank(group), num_ranks, numbers)
    reached = memory.take(control, memory.header_bytes)
    return PeerMemory(group, device, memory) if reached else None


class _PendingCopy(NamedTuple):
    """Rows that a stream copies."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream
    received: list[Tensor]

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None or is_captured(self.stream.device):
            torch.cuda.current_stream(self.stream.device).wait_event(self.event)
            return
        end = time.monotonic() + timeout.total_seconds()
        while not self.event.query() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        for tensor in self.received:  # if it comes yet, nobody else may have the memory
            tensor.record_stream(self.stream)


def _watch(
    of: "weakref.ref[PeerMemory]", memory: IpcMemory, unfinished: deque[torch.cuda.Event]
) -> None:
    """Check the time while there is a transport, then free what others have read."""
    _relax()
    while (transport := of()) is not None:
        transport.check_time()
        del transport
        time.sleep(_WATCH_SECONDS)
    while unfinished and not unfinished[-1].query():
        time.sleep(_WATCH_SECONDS)
    if memory.is_captured:
        return  # a graph may yet be replayed, by all ranks
    memory.disconnect()
    if memory.is_released:
        time.sleep(_RELEASED_SECONDS)
    while not (memory.is_released or _is_at_rest(memory)):
        time.sleep(_WATCH_SECONDS)
    memory.free()


def _is_at_rest(memory: IpcMemory) -> bool:
    """Whether other ranks have ended the last pass, and tell no more; waits for the GPU."""
    num_ranks = len(memory.addresses)
    ended = memory.numbers[_ENDED * num_ranks : _SEEN * num_ranks]
    return all(ended[: memory.rank] + ended[memory.rank + 1 :])


def _relax() -> None:
    """Let this thread ask for events and streams while another captures a CUDA graph."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(driver.cuThreadExchangeStreamCaptureMode(relaxed))


def _contains(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _told(stream_index: int) -> int:
    """Return the row of numbers that say what is there."""
    return 2 * stream_index


def _fetched(stream_index: int) -> int:
    """Return the row of numbers that say what has been fetched."""
    return 2 * stream_index + 1
