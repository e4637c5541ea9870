"""Packets of tensor rows that ranks exchange, and the transport that sends them as messages."""

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.layout import PackOffsets, Route
from cqs.executors.distributed.transport.row_copies import CopySchedule, copy_rows
from cqs.scheduler.cost_model import SENT, ChunkRule, Links

_FIRST_TAG = 1 << 30
"""First message tag of this package. Every call has its own tag, apart from the user's tags."""
_NUM_TAGS = 1 << 29
"""Number of tags of rows. As many tags follow, of messages that ask for rows."""
_LATENCIES_OF_ROUND = 20
"""Rows are sent in rounds if a round is expected to take so many times the latency of the links."""
_ROUNDS_AT_ONCE = 2
"""Rounds in progress: with one, ranks wait for those whose rounds take longer."""


@dataclass(frozen=True, eq=False)
class PacketLayout:
    """Route, heads and row shape of a packet, which all calls of a signature share."""

    route: Route
    row_shape: tuple[int, ...]
    """Shape ``(batch, heads, ...)`` of one packed row; the same on all ranks."""
    itemsize: int
    """Size of an element in bytes."""
    widths: tuple[int, ...]
    """Number of heads of each source that are sent to a rank."""
    schedule: CopySchedule = ()
    """Copies from the sources, listed twice, to the rows for other ranks and then to
    :attr:`Packet.received_by_source`. Empty if nothing is copied or the caller writes the rows."""
    _: KW_ONLY
    is_home: bool
    """Whether the rows are results, sent along the route in reverse to the token owners."""

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows that this rank sends to every rank; 0 for itself."""
        numbers = list(self.route.receives if self.is_home else self.route.lengths)
        numbers[self.route.rank] = 0
        return numbers

    @cached_property
    def num_sent(self) -> int:
        """Number of rows that this rank sends to others."""
        return sum(self.lengths)

    @cached_property
    def expected(self) -> Sequence[int]:
        """Number of rows that this rank receives from every rank, itself included."""
        return self.route.lengths if self.is_home else self.route.receives

    @cached_property
    def num_received(self) -> int:
        """Number of rows that this rank receives, from itself included."""
        return sum(self.expected)

    @cached_property
    def places(self) -> PackOffsets:
        """Row offsets of the packed rows in the send buffers of all ranks."""
        return self.route.offsets[self.is_home]

    @cached_property
    def row_bytes(self) -> int:
        """Size of one packed row in bytes."""
        return math.prod(self.row_shape) * self.itemsize

    def by_source(self, rows: Tensor) -> list[Tensor]:
        """Return views ``[batch, heads, rows, ...]`` of packed rows, one for each source."""
        of_all = rows.movedim(0, 2)
        return [of_all] if len(self.widths) == 1 else list(of_all.split_with_sizes(self.widths, 1))


@dataclass(frozen=True)
class Packet:
    """Rows of several tensors that follow one route and are packed into one message per rank."""

    layout: PacketLayout
    sources: Sequence[Tensor]
    """Tensors ``[batch, heads, rows, ...]`` of one dtype, equal in shape except for the heads."""
    views: list[Tensor] | None = None
    """Parts of the sources that take the place of the received rows, if no rows are exchanged."""

    @cached_property
    def received(self) -> Tensor:
        """Uninitialised receive buffer, ``[rows, batch, heads, ...]``, ordered by sending rank."""
        return self.new_rows(self.layout.num_received)

    @cached_property
    def received_by_source(self) -> list[Tensor]:
        """Views of :attr:`received`, ``[batch, heads, rows, ...]``, one for each source."""
        return self.layout.by_source(self.received) if self.views is None else self.views

    def new_rows(self, number: int) -> Tensor:
        """Allocate ``[number, batch, heads, ...]``, uninitialised."""
        return self.sources[0].new_empty((number, *self.layout.row_shape))

    def pack(self, packed: Tensor) -> None:
        """Copy rows for other ranks to ``packed``, and this rank's own rows to :attr:`received`."""
        if self.layout.schedule:
            targets = *self.layout.by_source(packed), *self.received_by_source
            copy_rows((*self.sources, *self.sources), targets, self.layout.schedule)


Fill = Callable[[list[Tensor]], None]
"""Writes the rows of each packet into ``[rows, batch, heads, ...]``, ordered by receiving rank."""


Wait = Callable[[timedelta | None], None]
"""Makes the current stream wait for rows; with a timeout, blocks the host instead.

A transport on CPUs blocks the host in both cases.
"""


class Pass(NamedTuple):
    """A forward or backward pass of one call."""

    number: int = 0
    """Number of the call on its group; equal on all ranks."""
    confirm: Callable[[], object] | None = None
    """Waits until all ranks are known to make the same pass, or raises. A transport calls it before
    it does anything that other ranks can notice. ``None`` if the ranks have agreed already."""


class Transport:
    """Sends packets between the ranks of a group."""

    num_streams: int
    """Number of CUDA streams that may compute in turns without delaying communication."""
    num_turns: int
    """Maximum number of head chunks that are in transit in one direction at a time."""
    chunk_rule: ChunkRule
    """Thresholds of the number of head chunks for this transport."""
    has_buffer = False
    """Whether packed rows are in a send buffer that stays allocated between sends."""
    peak_bytes = 0
    """Peak size of the send buffer in bytes, which PyTorch's memory statistics do not include."""

    def begin(self, of_pass: "Pass") -> None:
        """Begin a forward or backward pass; all ranks of the group must call this equally often."""

    def end(self) -> None:
        """End the pass, also after an error. Later work on the current stream waits for its end."""

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets to the other ranks and start receiving theirs.

        Every rank of the group must call this equally often, with packets of equal row sizes. The
        host waits for the GPU only if the packets require a larger send buffer than any before.

        Args:
            packets: The packets to send in this turn.
            fill: Function that writes the rows for other ranks; called once the buffer has room.
            turn: Index of the buffer slot, from 0 to ``num_turns - 1``. Sends in one slot are
                ordered: a send waits until the previous one has been read.
            num_turns: Number of buffer slots in this pass.

        Returns:
            Functions that wait; the received rows are valid once all of them have returned.
        """
        raise NotImplementedError


class MessageTransport(Transport):
    """Sends packets as messages of torch.distributed, one for each packet and pair of ranks.

    On CPUs of several hosts long packets are sent in rounds, as by MPI's pairwise exchange (Thakur
    et al., 2005, doi 10.1177/1094342005051521): a rank sends to one or two ranks at a time, which
    have asked for it. With all messages at once TCP uses the links less well. NCCL makes such
    rounds itself.
    """

    num_streams = 1
    num_turns = 2
    chunk_rule = SENT

    def __init__(self, group: Any, links: Links | None = None) -> None:
        """Use a process group; ranks without rows post no messages.

        Args:
            group: The process group.
            links: Links between the hosts of a group on CPUs, the same on all ranks; ``None`` if
                nothing is sent in rounds.
        """
        # Its user decides how long a group lives, not the calls that are prepared for it.
        self._group = weakref.ref(group)
        self._links = links
        self._pass = Pass()
        self._last: Future[None] | None = None
        """The last transfer in rounds: the next begins when it has ended."""

    def begin(self, of_pass: Pass) -> None:
        """Begin a pass, whose messages carry the tag of its call."""
        self._pass = of_pass

    def end(self) -> None:
        """End the pass."""
        self._pass = Pass()  # its functions refer to the group

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets as described in :meth:`Transport.send`.

        Raises:
            LostError: A message could not be sent because a rank has failed.
        """
        # New buffers for every send: gloo and NCCL read them until the messages complete, and the
        # allocator returns their memory afterwards.
        rows_of_packets = [packet.new_rows(packet.layout.num_sent) for packet in packets]
        fill(rows_of_packets)
        if self._pass.confirm is not None:
            self._pass.confirm()
        group, tag = self._group(), _FIRST_TAG + self._pass.number % _NUM_TAGS
        outgoing, incoming = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for packet, packed in zip(packets, rows_of_packets, strict=True):
            layout = packet.layout
            sides: list[tuple[dict[int, list[Tensor]], Tensor, Sequence[int]]]
            sides = [(outgoing, packed, layout.lengths)]
            if not layout.route.stays:
                sides.append((incoming, packet.received, layout.expected))
            for found, tensor, lengths in sides:
                for rank, rows in enumerate(tensor.split_with_sizes(lengths)):
                    if lengths[rank] and rank != layout.route.rank:
                        found.setdefault(rank, []).append(rows)
        if self._are_long(packets):
            done = self._last = _start_rounds(group, tag, outgoing, incoming, self._last)
            return [partial(_wait_for_rounds, done)]
        messages = [
            dist.P2POp(operation, rows, group=group, tag=tag, group_peer=rank)
            for operation, found in ((dist.isend, outgoing), (dist.irecv, incoming))
            for rank, tensors in found.items()
            for rows in tensors
        ]
        if not messages:
            return []
        # One batch: messages posted one by one can wait for each other in a cycle of ranks.
        with _raising_lost_error():
            works = dist.batch_isend_irecv(messages)

        def wait(timeout: timedelta | None) -> None:
            of_works = [[each] for each in messages] if len(works) == len(messages) else [messages]
            with _raising_lost_error():
                for work, waited_for in zip(works, of_works, strict=True):
                    _wait_for(work, waited_for, timeout)
            messages.clear()  # releases the packed rows, which the messages read until now

        return [wait]

    def _are_long(self, packets: Sequence[Packet]) -> bool:
        """Return whether packets are sent in rounds; the same on all ranks."""
        if self._links is None:
            return False
        layouts = [packet.layout for packet in packets]
        most = sum(layout.places.most * layout.row_bytes for layout in layouts)
        num_rounds = len(layouts[0].lengths) - 1
        least = _LATENCIES_OF_ROUND * num_rounds * self._links.latency
        return most / self._links.bandwidth >= least


def _start_rounds(
    group: Any,
    tag: int,
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    previous: "Future[None] | None",
) -> "Future[None]":
    """Start a thread that sends and receives rows in rounds, after a previous one has ended."""
    done = Future[None]()

    def pass_rows() -> None:
        try:
            if previous is not None:
                previous.exception()
            _pass_in_rounds(group, tag, outgoing, incoming)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon: a process that ends does not wait for ranks that have failed.
    threading.Thread(target=pass_rows, daemon=True).start()
    return done


def _pass_in_rounds(
    group: Any,
    tag: int,
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
) -> None:
    """Send rows to the rank at each distance in turn, when it asks for them, and receive so."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    asking = torch.zeros(1, dtype=torch.uint8)

    def post(
        operation: Any, tensors: Sequence[Tensor], peer: int, tag: int = tag
    ) -> list[Callable[[], None]]:
        messages = [dist.P2POp(operation, each, None, group, tag, peer) for each in tensors]
        works = dist.batch_isend_irecv(messages) if messages else []
        return [partial(_wait_for, work, messages[:1], None) for work in works]

    sent, receiving = list[Callable[[], None]](), deque[list[Callable[[], None]]]()
    for distance in range(1, num_ranks):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        received = post(dist.irecv, incoming.get(source, ()), source)
        if received:
            sent += post(dist.isend, [asking], source, tag + _NUM_TAGS)
        if to in outgoing:
            for wait in post(dist.irecv, [asking.clone()], to, tag + _NUM_TAGS):
                wait()
            sent += post(dist.isend, outgoing[to], to)
        receiving.append(received)
        if len(receiving) >= _ROUNDS_AT_ONCE:
            for wait in receiving.popleft():
                wait()
    for wait in chain(*receiving, sent):
        wait()


def _wait_for(work: dist.Work, messages: Sequence[dist.P2POp], timeout: timedelta | None) -> None:
    """Wait for a message, or for several; if it is one, an error names the other rank."""
    try:
        work.wait(*([] if timeout is None else [timeout]))
    except RuntimeError as error:
        if len(messages) != 1:
            raise
        raise RuntimeError(f"rank {messages[0].group_peer}: {error}") from error


def _wait_for_rounds(done: "Future[None]", timeout: timedelta | None) -> None:
    with _raising_lost_error():
        try:
            done.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("rows were not received in time") from None


class LostError(dist.DistError):
    """A rank has failed or does not answer; the group cannot be used any more."""


@contextmanager
def _raising_lost_error() -> Iterator[None]:
    """Raise a RuntimeError of torch.distributed as LostError."""
    try:
        yield
    except RuntimeError as lost:
        raise LostError(
            "rows of other ranks were not received: a rank has failed or did not make this call; "
            f"restart all ranks of the group ({lost})"
        ) from lost


class Transfer:
    """Tensors that are being received while the GPU runs other work."""

    def __init__(self, tensors: list[Tensor], pending: list[Wait]) -> None:
        """Track tensors that are being received.

        Args:
            tensors: Tensors ``[batch, heads, rows, ...]`` that are valid after the transfer.
            pending: Functions that wait for their rows.
        """
        self._tensors, self._pending = tensors, pending

    def wait(self) -> list[Tensor]:
        """Wait for the transfer and return its tensors, ``[batch, heads, rows, ...]``.

        May be called once. On a GPU only the current stream waits.
        """
        for wait in self._pending:
            wait(None)
        self._pending.clear()
        tensors, self._tensors = self._tensors, []  # the caller frees the memory
        return tensors

    def settle(self, end: float) -> None:
        """Wait until the time ``end`` of ``time.monotonic()`` for tensors that will not be used."""
        with suppress(RuntimeError):  # the other ranks may have failed too
            for wait in self._pending:
                wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
