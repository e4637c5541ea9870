"""Transport by peer-to-peer (P2P) copies between the GPUs of a host.

Copy engines fetch the rows, and CUDA streams wait for flags in device memory, so no multiprocessor
is used. An NCCL message is a kernel at both ends, which competes with compute kernels for them.

benchmarks/journal/protocols.md describes the protocol: its flags, epochs, invariants and abort.
"""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.agreement import calls_on, control_group, swap, timeout_of
from cqs.executors.distributed.transport import cuda_driver
from cqs.executors.distributed.transport.exchange import Fill, Packet, Transport, Wait
from cqs.executors.distributed.transport.ipc_memory import IpcMemory
from cqs.ranges import contains, meets
from cqs.scheduler.machines import FETCHED
from cqs.worker.cuda_graphs import check_not_captured, is_captured

_ALIGNMENT = 512  # bytes, at which each packet starts in the send buffer
_NUM_STREAMS = 2
_READY, _FETCHED = range(0, 2 * _NUM_STREAMS, 2), range(1, 2 * _NUM_STREAMS, 2)
"""Rows of the ready and fetched flags, by the index of the compute stream."""
_ENDED, _SEEN, _NUM_FLAG_ROWS = range(2 * _NUM_STREAMS, 2 * _NUM_STREAMS + 3)
"""Rows of flags after those: "rank r has ended its pass" and "rank r has seen the end of this
rank's pass". The last name is the number of rows."""
_RELEASED = 1 << 30
"""Epoch after an abort, greater than any epoch of a send: it satisfies every wait for a flag."""
_RELEASED_SECONDS = 60.0
"""Seconds after an abort in which other ranks may still copy from this rank."""
_POLL_SECONDS = 0.01
"""Seconds between two writes of the flags during a release, and between two looks at an event."""
_WATCH_SECONDS = 1.0
"""Seconds between two checks of the timeout."""


class PeerMemory(Transport):
    """Transport in which each rank packs rows into its send buffer and its peers copy them.

    The packets of one turn have the same offset in the send buffers of all ranks. Each buffer
    starts with flags, ``int32[rows, num_ranks]``. Column r is about rank r, which writes it:

    - ready: the epoch of rank r's last send for this rank. This rank then copies the packets.
    - fetched: the epoch of this rank's last send that rank r has copied. Its memory is free then.
    - ended: 1 if rank r has ended its pass, until this rank begins its next one.
    - seen: 1 if rank r has seen the end of this rank's pass, until this rank ends its next one.

    Streams wait until a flag is at least a value, so that a late wait is satisfied by a later
    epoch. Each compute stream has its own ready and fetched flags: two streams may write out of
    order, and the epochs of a flag must increase.

    A pass ends when the peers have copied everything that it packed. Its epochs are then reset to
    0, and no rank sends again before all peers have announced their end. Every pass thus does the
    same work, so a CUDA graph can replay it. A rank that lags in one pass delays the next of all.
    """

    num_streams = _NUM_STREAMS
    num_turns = 4
    has_buffer = True
    chunk_rule = FETCHED

    def __init__(self, group: Any, device: torch.device, memory: IpcMemory) -> None:
        """Start without a send buffer for packets; use :func:`connect_peers` to construct."""
        self._group = weakref.ref(group)
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + i) % self._num_ranks for i in range(1, self._num_ranks)]
        """The other ranks in ring order, starting after this rank."""
        self._device, self._memory = device, memory
        self._timeout = timeout_of(group)
        self.peak_bytes = 0
        """Peak size of the send buffer that a call required, in bytes."""
        self._calls = calls_on(group)
        self._is_captured = False
        """Whether a CUDA graph captures this pass."""
        self._epoch = 0
        """Epoch of the last send of this pass; the first send has epoch 1."""
        self._unread: list[_Packed] = []
        """Packets of this pass that peers may not have copied yet."""
        self._begun: torch.cuda.Event | None = None
        """Event at the beginning of this pass."""
        self._opened: torch.cuda.Event | None = None
        """Event after which this pass may write flags of other ranks; ``None`` before."""
        self._waited: dict[int, torch.cuda.Event] = {}
        """For each stream index, the event after which it waits for no flag of this pass."""
        self._ended: torch.cuda.Event | None = None
        """Event at the end of the last pass that was not captured."""
        self._copy_stream = torch.cuda.Stream(device)
        # Higher priority than the compute streams, which have the lowest.
        self._release_stream = torch.cuda.Stream(device, priority=-1)
        self._streams = {self._copy_stream}
        self._unfinished: deque[torch.cuda.Event] = deque()
        self._progress = time.monotonic()
        # Held while waits for flags are queued: an abort comes before all of them, which then are
        # not queued, or after all of them, which it releases.
        self._launching = threading.Lock()
        arguments = weakref.ref(self), memory, self._unfinished
        threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def begin(self, number: int) -> None:
        """Begin a pass; see :class:`cqs.executors.distributed.transport.exchange.Transport`.

        Raises:
            RuntimeError: The transport was released, the group was destroyed, or a CUDA graph is
                captured before the first allocation.
            torch.OutOfMemoryError: A rank has no device memory for the flags.
        """
        self._opened = None
        if not self._memory.buffer.nbytes:
            self._grow(self._memory.flag_bytes)
        with self._launching:
            self._check_released()
            self._is_captured = is_captured(self._device)
            if self._is_captured:
                self._memory.is_captured = True
            elif self._ended is not None:
                torch.cuda.current_stream(self._device.index).wait_event(self._ended)
            self._open_pass()

    def end(self) -> None:
        """End the pass; see :class:`cqs.executors.distributed.transport.exchange.Transport`."""
        with self._launching:
            if self._opened is None or not self._memory.buffer.nbytes or self._memory.is_released:
                return
            event = self._close_pass()
            torch.cuda.current_stream(self._device.index).wait_event(event)
            if not self._is_captured:
                self._ended = event

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets; see :class:`cqs.executors.distributed.transport.exchange.Transport`.

        Raises:
            RuntimeError: The transport was released, or a CUDA graph is captured that requires a
                larger send buffer than all earlier calls.
            torch.OutOfMemoryError: A rank has no device memory for the send buffer.
        """
        # Every rank computes the same sizes and offsets, because `most` is that of all ranks: a
        # peer's packet is found without asking, and all ranks grow their buffers in the same send.
        layouts = [packet.layout for packet in packets]
        sizes = [_aligned(layout.places.most * layout.row_bytes) for layout in layouts]
        flag_bytes = _aligned(self._memory.flag_bytes)
        num_bytes = flag_bytes + num_turns * sum(sizes)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        stream_index, stream = (
            turn % self.num_streams,
            torch.cuda.current_stream(self._device.index),
        )
        if num_bytes > self._memory.buffer.nbytes:
            self._grow(num_bytes)
            with self._launching:
                self._check_released()
                self._open_pass()
        *firsts, end = accumulate(sizes, initial=flag_bytes + turn * sum(sizes))
        readers = [rank for rank in self._others if any(layout.lengths[rank] for layout in layouts)]
        # The allocator may have given `received` memory that this stream still uses: the copies
        # wait for the event `free`.
        received = [packet.received for packet in packets if not packet.layout.route.stays]
        free = stream.record_event()
        with self._launching:
            self._check_released()
            if not self._is_captured:
                self._streams.add(stream)
            packed = _Packed(range(firsts[0], end), stream_index, self._epoch + 1, readers)
            unread = self._make_room(packed, stream)
            self._waited[stream_index] = stream.record_event()
        fill([self._rows(f, p) for f, p in zip(firsts, packets, strict=True)])
        with self._launching:  # an error in fill() leaves the epoch unchanged
            self._check_released()
            self._unread = unread
            self._epoch += 1
            self._calls.num_sends += not self._is_captured
            assert self._opened is not None
            stream.wait_event(self._opened)  # a peer resets its flags at the end of its last pass
            for reader in readers:
                self._write_flag(stream, reader, _READY[stream_index], self._epoch)
            if not received:
                return []
            # All copies are on one stream: a copy that waits for its flag must not hold up kernels.
            self._copy_stream.wait_event(free)
            self._copy_packets(packets, firsts, stream_index)
            event, copies, device = self._record_copies(), self._copy_stream, self._device

        def wait(timeout: timedelta | None) -> None:
            if timeout is None or is_captured(device):
                torch.cuda.current_stream(device.index).wait_event(event)
                return
            end = time.monotonic() + timeout.total_seconds()
            while not event.query() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            for tensor in received:  # a late copy must not write to memory that was reused
                tensor.record_stream(copies)

        return [wait]

    def release(self, seconds: float) -> None:
        """Release all streams that wait for other ranks; rows not yet received are undefined.

        Args:
            seconds: Seconds to wait until the streams are idle. A thread continues to write flags
                afterwards, because live ranks may still write a lower epoch and replays of CUDA
                graphs may still start.
        """
        with self._launching:
            self._memory.is_released = True
        is_idle = threading.Event()
        threading.Thread(target=self._release, args=(is_idle,), daemon=True).start()
        is_idle.wait(seconds)

    def _release(self, is_idle: threading.Event) -> None:
        """Write to all flags until the streams are idle, and for a while if graphs may run."""
        cuda_driver.relax_capture()
        memory = self._memory
        has_replays = memory.is_captured or memory.captured_addresses
        end = time.monotonic() + (_RELEASED_SECONDS if has_replays else 0)
        with torch.cuda.device(self._device):  # a new thread has no current device
            while True:
                if all(stream.query() for stream in tuple(self._streams)):
                    is_idle.set()
                    if time.monotonic() >= end:
                        return
                for own in {*memory.captured_addresses, memory.addresses[self._rank]} - {0}:
                    for place in range(_NUM_FLAG_ROWS * self._num_ranks):
                        stream, flag = self._release_stream.cuda_stream, own + 4 * place
                        cuda_driver.write_word(stream, flag, _RELEASED)
                time.sleep(_POLL_SECONDS)

    def check_time(self) -> None:
        """Abort the process with a message if no copy has completed within the group's timeout."""
        while self._unfinished and self._unfinished[0].query():
            self._unfinished.popleft()
            self._progress = time.monotonic()
        if not self._unfinished:
            self._progress = time.monotonic()
        elif time.monotonic() > self._progress + self._timeout.total_seconds():
            print(
                f"cqs: P2P copies of rank {self._rank} timed out after "
                f"{self._timeout.total_seconds():g} s: another rank has failed or does not answer",
                file=sys.stderr,
                flush=True,
            )
            os.abort()

    def _open_pass(self) -> None:
        """Make the copy stream wait until all ranks have ended their last pass.

        Flags of a rank may be written only then, because it resets them at the end of its pass.
        """
        stream = torch.cuda.current_stream(self._device.index)
        if not self._is_captured:
            self._streams.add(stream)
        self._epoch, self._unread, self._waited = 0, [], {}
        self._begun = stream.record_event()
        self._copy_stream.wait_event(self._begun)
        for rank in self._others:
            # The reset comes before `seen`, which allows the peer to end its next pass.
            self._wait_flag(self._copy_stream, rank, _ENDED, 1)
            self._write_flag(self._copy_stream, self._rank, _ENDED, 0, about=rank)
            self._write_flag(self._copy_stream, rank, _SEEN, 1)
        self._opened = self._record_copies()

    def _close_pass(self) -> torch.cuda.Event:
        """Wait on the copy stream for the peers' copies, reset the epochs, announce the end.

        Other streams may still read received rows.

        Returns:
            The event at which this rank's pass has ended.
        """
        stream = self._copy_stream
        for event in self._waited.values():
            stream.wait_event(event)
        for old in self._unread:
            for reader in old.readers:
                self._wait_flag(stream, reader, _FETCHED[old.stream_index], old.epoch)
        # No peer writes these flags any more: this rank has waited for every epoch of this pass,
        # and the peers' next pass waits for the end that is announced below.
        own, num_epochs = self._memory.addresses[self._rank], _ENDED * self._num_ranks
        with torch.cuda.device(self._device):
            cuda_driver.fill_words(own, 0, num_epochs, stream.cuda_stream)
        for rank in self._others:
            # A second end before the peer has seen the first would be lost when it resets the flag.
            self._wait_flag(stream, rank, _SEEN, 1)
            self._write_flag(stream, self._rank, _SEEN, 0, about=rank)
            self._write_flag(stream, rank, _ENDED, 1)
        return self._record_copies()

    def _record_copies(self) -> torch.cuda.Event:
        """Return an event after all copies so far, which must complete within the timeout."""
        event: torch.cuda.Event = self._copy_stream.record_event()
        if not self._is_captured:
            self._unfinished.append(event)
        return event

    def _grow(self, num_bytes: int) -> None:
        """Replace the send buffer by one of ``num_bytes`` bytes; every rank calls this.

        The open pass ends in the old buffer, which CUDA graphs may still use. The caller opens it
        again in the new buffer.

        Raises:
            RuntimeError: The group was destroyed, a rank has failed, or a CUDA graph is captured.
            torch.OutOfMemoryError: A rank has too little memory for the buffer.
        """
        if (group := self._group()) is None:
            raise RuntimeError("the process group was destroyed; make a new one")
        check_not_captured(self._device)
        control = control_group(group)
        swap(control, [0])  # raises if a rank has failed
        if self._memory.buffer.nbytes:
            with self._launching:
                self._close_pass()
                self._opened = None
        self._memory.grow(control, num_bytes)

    def _check_released(self) -> None:
        if self._memory.is_released:
            raise RuntimeError("the process group was aborted; make a new one")

    def _make_room(self, new: "_Packed", stream: torch.cuda.Stream) -> "list[_Packed]":
        """Make a stream wait until peers have copied earlier packets at the same place.

        Args:
            new: The packets to be written.
            stream: The CUDA stream that will write them.

        Returns:
            The packets that may be unread after ``new`` has been written.
        """
        unread = []
        for old in self._unread:
            if meets(old.places, new.places):
                for reader in old.readers:
                    self._wait_flag(stream, reader, _FETCHED[old.stream_index], old.epoch)
            # A wait for the readers of the new packets implies one for those of the old.
            if not (new.readers and contains(new.places, old.places)):
                unread.append(old)
        return unread + [new] if new.readers else unread

    def _copy_packets(
        self, packets: Sequence[Packet], firsts: Sequence[int], stream_index: int
    ) -> None:
        """Queue copies of the packets of all peers on the copy stream, in ring order.

        Each copy starts when the peer's ready flag reaches the epoch. The ring order spreads the
        copies over the peers, so that not all ranks read from one.
        """
        stream = self._copy_stream
        for owner in self._others:
            if not any(packet.layout.expected[owner] for packet in packets):
                continue
            self._wait_flag(stream, owner, _READY[stream_index], self._epoch)
            for packet, first in zip(packets, firsts, strict=True):
                layout = packet.layout
                if number := layout.expected[owner]:
                    row, there = sum(layout.expected[:owner]), layout.places.firsts[owner]
                    target = packet.received.data_ptr() + row * layout.row_bytes
                    source = self._memory.addresses[owner] + first + there * layout.row_bytes
                    num_bytes = number * layout.row_bytes
                    cuda_driver.copy(target, source, num_bytes, stream.cuda_stream)
            self._write_flag(stream, owner, _FETCHED[stream_index], self._epoch)

    def _rows(self, first: int, packet: Packet) -> Tensor:
        """Return the send buffer from byte ``first`` on as the packed rows of a packet."""
        layout = packet.layout
        packed = self._memory.buffer[first : first + layout.num_sent * layout.row_bytes]
        return packed.view(packet.sources[0].dtype).view(layout.num_sent, *layout.row_shape)

    def _wait_flag(self, stream: torch.cuda.Stream, rank: int, row: int, value: int) -> None:
        """Make a stream wait until a flag in this rank's memory is at least ``value``.

        The host does not wait; :meth:`check_time` enforces the timeout of the group.

        Args:
            stream: CUDA stream that waits.
            rank: Rank that the flag is about, which writes it.
            row: Row of the flag: its meaning.
            value: Epoch, or 1.
        """
        address = self._memory.addresses[self._rank] + 4 * (row * self._num_ranks + rank)
        cuda_driver.wait_word(stream.cuda_stream, address, value)

    def _write_flag(
        self, stream: torch.cuda.Stream, rank: int, row: int, value: int, about: int | None = None
    ) -> None:
        """Write a flag of a rank after all earlier work of a stream.

        Args:
            stream: CUDA stream that writes the flag.
            rank: Rank in whose memory the flag is.
            row: Row of the flag: its meaning.
            value: Epoch to write, or 0 or 1.
            about: Rank that the flag is about; ``None`` means this rank.
        """
        place = row * self._num_ranks + (self._rank if about is None else about)
        address = self._memory.addresses[rank] + 4 * place
        cuda_driver.write_word(stream.cuda_stream, address, value)


class _Packed(NamedTuple):
    """Packets of one send that peers may not have copied yet."""

    places: range
    """Byte offsets in the send buffer."""
    stream_index: int
    """Index of the compute stream that writes the packets."""
    epoch: int
    """Epoch of the send."""
    readers: list[int]
    """Ranks that copy the packets."""


def connect_peers(group: Any, device: torch.device) -> PeerMemory | None:
    """Connect the GPUs of a group for P2P copies; every rank of the group must call this.

    A rank that waits for another longer than the group's timeout aborts its process, as NCCL does.

    Args:
        group: The process group; all of its ranks are on one host.
        device: The GPU of this rank.

    Returns:
        The transport, or ``None`` on all ranks if a pair of GPUs does not support P2P access.

    Raises:
        RuntimeError: A rank has failed.
    """
    control = control_group(group)
    num_ranks = control.size()
    # Every rank counts as having ended a pass before the first.
    flags = [int(row == _ENDED) for row in range(_NUM_FLAG_ROWS) for _ in range(num_ranks)]
    memory = IpcMemory(device, dist.get_rank(group), num_ranks, flags)
    reached = memory.allocate(control, memory.flag_bytes)
    return PeerMemory(group, device, memory) if reached else None


def _watch(
    transport_ref: "weakref.ref[PeerMemory]", memory: IpcMemory, unfinished: deque[torch.cuda.Event]
) -> None:
    """Enforce the timeout while the transport exists, then free its send buffer."""
    cuda_driver.relax_capture()
    while (transport := transport_ref()) is not None:
        transport.check_time()
        del transport
        time.sleep(_WATCH_SECONDS)
    # This rank's copies read from its peers' buffers until here, and peers may still read from this
    # one's: its memory is freed when they have announced their end, or long after an abort.
    while unfinished and not unfinished[-1].query():
        time.sleep(_WATCH_SECONDS)
    if memory.is_captured:
        return  # all ranks may still replay the graph
    memory.disconnect()
    if memory.is_released:
        time.sleep(_RELEASED_SECONDS)
    while not (memory.is_released or _is_at_rest(memory)):
        time.sleep(_WATCH_SECONDS)
    memory.free()


def _is_at_rest(memory: IpcMemory) -> bool:
    """Return whether all peers have ended their last pass; synchronizes with the GPU."""
    num_ranks = len(memory.addresses)
    ended = memory.flags[_ENDED * num_ranks : _SEEN * num_ranks]
    return all(ended[: memory.rank] + ended[memory.rank + 1 :])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
