"""Exchange of token rows between ranks: packets, transports, and copies of rows.

Shards are sent to the ranks that compute with them, and results to the owners of their tokens.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Size, Tensor

from cqs.executors.distributed.agreement import calls_on
from cqs.executors.distributed.route import HeadsOfRanks, Route
from cqs.partial import has_triton
from cqs.scheduler.machines import SENT, ChunkRule

BOUNDED_TURNS = 2
"""Number of sends in transit in one direction if memory is limited."""
_FIRST_TAG = 1 << 30
"""First message tag of this package. Every pass has its own tag, apart from the user's tags."""
_NUM_TAGS = 1 << 30
"""Number of tags; later passes take them again."""
_SETTLING_SECONDS = 10.0
"""Seconds that a failed call waits for pending transfers, at most."""


class RowCopy(NamedTuple):
    """One copy: adjacent rows of adjacent heads from a source tensor to a target tensor."""

    tensor: int
    """Index of the source, and of the target."""
    source_row: int
    target_row: int
    num_rows: int
    source_head: int
    target_head: int
    num_heads: int


CopySchedule = tuple[RowCopy, ...]


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor], schedule: CopySchedule) -> None:
    """Run all copies of a schedule; on a GPU with Triton in one kernel launch.

    Args:
        sources: Tensors ``[batch, heads, rows, dim]``, or all ``[batch, heads, rows]``.
        targets: Tensors of the same dtype, device and number of dimensions; written to.
        schedule: The copies. No two may write the same row of a head.
    """
    if not schedule:
        return
    if (
        targets[0].is_cuda
        and all(tensor.stride()[3:] == (1,) for tensor in (*sources, *targets))
        and has_triton()
    ):
        from cqs.executors.distributed.transport import fused_copies

        fused_copies.copy_rows(sources, targets, schedule)
        return
    for number, source_row, target_row, num_rows, source_head, target_head, num_heads in schedule:
        target = targets[number][:, target_head : target_head + num_heads]
        source = sources[number][:, source_head : source_head + num_heads]
        target[:, :, target_row : target_row + num_rows].copy_(
            source[:, :, source_row : source_row + num_rows]
        )


class PacketLayout:
    """Route, heads and row shape of a packet, the same for all calls with equal arguments."""

    def __init__(
        self,
        route: Route,
        shapes: Sequence[Size],
        itemsize: int,
        heads: Sequence[HeadsOfRanks] | None,
        has_copies: bool,
    ) -> None:
        """Lay out the tensors of a packet, see :meth:`Exchange.send`.

        Args:
            route: The route of its tensors.
            shapes: The shape of each tensor.
            itemsize: Size of an element in bytes.
            heads: For each tensor, the heads that every rank requires; ``None`` for results, which
                are sent along the route in reverse to the token owners.
            has_copies: Whether results are copied, or else computed in the send buffer.
        """
        (batch, _, _, *columns), is_home, self.route = shapes[0], heads is None, route
        self.schedule = CopySchedule()
        """Copies from the sources, listed twice, to the rows for other ranks and then to
        :attr:`Packet.received_by_source`. Empty if nothing is copied or the caller writes the rows.
        """
        if heads is not None:
            self.widths = [len(ranges[0]) for ranges in heads]
            self.schedule = _schedule_out(route, heads)
        else:
            self.widths = [shape[1] for shape in shapes]
            if has_copies and not route.stays:
                self.schedule = _schedule_home(route, self.widths)
        """Number of heads of each source that are sent to a rank."""
        self.row_shape = batch, sum(self.widths), *columns
        """Shape ``(batch, heads, ...)`` of one packed row; the same on all ranks."""
        self.row_bytes = math.prod(self.row_shape) * itemsize
        """Size of one packed row in bytes."""
        sent, self.expected = route.lengths, route.receives
        """Number of rows that this rank receives from every rank, itself included."""
        if is_home:
            sent, self.expected = self.expected, sent
        self.lengths = list(sent)
        """Number of rows that this rank sends to every rank; 0 for itself."""
        self.lengths[route.rank] = 0
        self.num_sent, self.num_received = sum(self.lengths), sum(self.expected)
        self.firsts, self.most = route.find_offsets(is_home=is_home)
        """For every rank, the index of the first row that it packs for this rank; and the number
        of rows in the largest send buffer of any rank."""
        self.stays_home = is_home and route.stays
        """Whether these are results of which this rank neither sends nor receives any."""

    def by_source(self, rows: Tensor) -> list[Tensor]:
        """Return views ``[batch, heads, rows, ...]`` of packed rows, one for each source."""
        packed = rows.movedim(0, 2)
        return [packed] if len(self.widths) == 1 else list(packed.split_with_sizes(self.widths, 1))


_find_layout = lru_cache(maxsize=1024)(PacketLayout)


class Packet:
    """Rows of several tensors that follow one route and are packed into one message per rank."""

    def __init__(self, layout: PacketLayout, sources: Sequence[Tensor]) -> None:
        """Allocate the receive buffer.

        Args:
            layout: Route, heads and row shape.
            sources: Tensors ``[batch, heads, rows, ...]`` of one dtype, equal in shape except for
                the heads. If no results move, they take the place of the received ones.
        """
        self.layout, self.sources = layout, sources
        self.received_by_source = sources
        """Tensors ``[batch, heads, rows, ...]`` of the received rows, one for each source."""
        if not layout.stays_home:
            self.received = self.new_rows(layout.num_received)
            """Uninitialised, ``[rows, batch, heads, ...]``, ordered by sending rank."""
            self.received_by_source = layout.by_source(self.received)

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
    """Peak size of the send buffer that a call required, in bytes, which PyTorch's memory
    statistics do not include."""

    def begin(self) -> None:
        """Begin a forward or backward pass on which all ranks have agreed."""

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


class LostError(dist.DistError):
    """A rank has failed or does not answer; the group cannot be used any more."""


class MessageTransport(Transport):
    """Sends packets as messages of torch.distributed, one for each packet and pair of ranks."""

    num_streams = 1
    num_turns = 2
    chunk_rule = SENT

    def __init__(self, group: Any) -> None:
        """Use a process group; ranks without rows post no messages."""
        # Its user decides how long a group lives, not the calls that are prepared for it.
        self._group, self._calls = weakref.ref(group), calls_on(group)

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets as described in :meth:`Transport.send`.

        Raises:
            LostError: A message could not be sent because a rank has failed.
        """
        # New buffers for every send: gloo and NCCL read them until the messages complete, and the
        # allocator returns their memory afterwards.
        rows_of_packets = [packet.new_rows(packet.layout.num_sent) for packet in packets]
        fill(rows_of_packets)
        group, tag = self._group(), _FIRST_TAG + self._calls.num_calls % _NUM_TAGS
        sent, received = list[dist.P2POp](), list[dist.P2POp]()
        for packet, packed in zip(packets, rows_of_packets, strict=True):
            layout, own = packet.layout, packet.layout.route.rank
            if layout.route.stays:
                continue
            for messages, operation, rows, lengths in (
                (sent, dist.isend, packed, layout.lengths),
                (received, dist.irecv, packet.received, layout.expected),
            ):
                parts = rows.split_with_sizes(lengths)
                # A rank sends to the next one first: at the same time no two send to one rank.
                for rank in (*range(own + 1, len(parts)), *range(own)):
                    if lengths[rank]:
                        choices = {"group": group, "tag": tag, "group_peer": rank}
                        messages.append(dist.P2POp(operation, parts[rank], **choices))
        # Receives first: gloo tells a sender on their one connection that it may send, which would
        # wait behind rows that are sent the other way.
        messages = received + sent
        if not messages:
            return []
        # One batch: messages posted one by one can wait for each other in a cycle of ranks.
        try:
            works = dist.batch_isend_irecv(messages)
        except RuntimeError as error:
            raise lost(error) from error

        def wait(timeout: timedelta | None) -> None:
            limit = [] if timeout is None else [timeout]
            for i, work in enumerate(works):
                try:
                    work.wait(*limit)
                except RuntimeError as error:  # a work may stand for all messages
                    is_one = len(works) == len(messages)
                    raise lost(error, messages[i].group_peer if is_one else None) from error
            messages.clear()  # releases the packed rows, which the messages read until now

        return [wait]


def lost(error: RuntimeError, rank: int | None = None) -> LostError:
    """Return the error for one of torch.distributed, about a message of a rank if it is known."""
    reason = error if rank is None else f"rank {rank}: {error}"
    return LostError(
        "rows of other ranks were not received: a rank has failed or did not make this call; "
        f"restart all ranks of the group ({reason})"
    )


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


class Exchange:
    """Sends tensors between the ranks of a group in one forward or backward pass.

    The group remains usable after an error if the pass fails on all ranks after the same sends.
    """

    def __init__(self, transport: Transport, num_chunks: int | None) -> None:
        """Prepare an exchange; use it as a context manager.

        Args:
            transport: Transport between the ranks of the group.
            num_chunks: Number of head chunks of the pass, each sent once in each direction, or
                ``None`` if memory is limited, so that only :data:`BOUNDED_TURNS` sends are in
                transit. Chunk or send i uses buffer slot ``i % num_turns`` of the transport.
        """
        self._transport = transport
        self._num_turns = min(num_chunks or BOUNDED_TURNS, transport.num_turns)
        self._sends = count() if num_chunks is None else None
        self._transfers: list[Transfer] = []

    def __enter__(self) -> "Exchange":
        self._transport.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The transport may still write to buffers of a failed pass, which must not be freed before.
        # After a LostError nothing more is received.
        if kind is not None and not issubclass(kind, LostError):
            end = time.monotonic() + _SETTLING_SECONDS
            for transfer in self._transfers:
                transfer.settle(end)
        self._transport.end()

    def send(
        self,
        chunk: int,
        sources: Sequence[Tensor],
        routes: Sequence[Route],
        heads: Sequence[HeadsOfRanks] | None = None,
        fill: Fill | None = None,
    ) -> Transfer:
        """Send rows of tensors to the other ranks, and start receiving theirs.

        Args:
            chunk: Index of the head chunk.
            sources: Tensors ``[batch, heads, rows, ...]``.
            routes: For each tensor, its route.
            heads: For each tensor, the heads that every rank requires. ``None`` means that the
                tensors are results, ``[batch, heads of a rank, tokens held, ...]``, which are sent
                along their routes in reverse to the ranks that own the tokens.
            fill: Writes the rows; ``None`` copies them from the sources, of which only shape, dtype
                and device count otherwise.

        Returns:
            The transfer of one tensor ``[batch, heads of a rank, rows, ...]`` per source.
        """
        packets, received, most = list[Packet](), list[Tensor](), 0
        for route, chosen in by_route(sources, routes):
            tensors = sources[chosen.start : chosen.stop]
            rank_heads = None if heads is None else tuple(heads[chosen.start : chosen.stop])
            shapes = tuple(map(attrgetter("shape"), tensors))
            layout = _find_layout(route, shapes, tensors[0].itemsize, rank_heads, fill is None)
            packets.append(Packet(layout, tensors))
            received += packets[-1].received_by_source
            most = max(most, layout.most)

        def pack(rows: list[Tensor]) -> None:
            for packet, packed in zip(packets, rows, strict=True):
                packet.pack(packed)

        if not most:  # no rank sends another any
            if fill is None:
                pack([packet.new_rows(0) for packet in packets])  # places this rank's own rows
            return Transfer(received, [])
        # Chunks share the transport's buffers in turns: a send waits only for the one before it in
        # the same turn, while those of the other turns are in transit.
        turn = (chunk if self._sends is None else next(self._sends)) % self._num_turns
        pending = self._transport.send(packets, fill or pack, turn, self._num_turns)
        self._transfers.append(Transfer(received, pending))
        return self._transfers[-1]


def by_route(tensors: Sequence[Tensor], routes: Sequence[Route]) -> list[tuple[Route, range]]:
    """Group adjacent tensors that one packet can hold: same route, trailing shape and dtype.

    Routes are compared by identity, because routes that are equal on this rank may differ on
    another, and all ranks must form the same packets.

    Returns:
        For each group its route and the indices of its tensors.
    """
    groups, last = list[tuple[Route, range]](), None
    for i, (tensor, route) in enumerate(zip(tensors, routes, strict=True)):
        kind = id(route), tensor.shape[3:], tensor.dtype
        first = groups.pop()[1].start if kind == last else i
        groups.append((route, range(first, i + 1)))
        last = kind
    return groups


def _schedule_out(route: Route, heads: Sequence[HeadsOfRanks]) -> CopySchedule:
    """Return the copies that pack shard rows for other ranks and place this rank's own rows.

    Args:
        route: ``sends`` has the ranges of shard rows for every rank, also this one; ``receives``
            the number of rows from every rank.
        heads: For each tensor, the heads that every rank requires.
    """
    # Source i of this rank is listed twice, see Packet.schedule: target i is the packed rows, which
    # have none of this rank's own, and target i + len(heads) is the received rows, which have them.
    schedule, next_rows = [], [0, sum(route.receives[: route.rank])]
    for rank, ranges in enumerate(route.sends):
        is_own = rank == route.rank
        for rows in ranges:
            there = next_rows[is_own]
            for i, head_ranges in enumerate(heads, start=len(heads) if is_own else 0):
                first, width = head_ranges[rank].start, len(head_ranges[rank])
                schedule.append(RowCopy(i, rows.start, there, len(rows), first, 0, width))
            next_rows[is_own] += len(rows)
    return tuple(schedule)


def _schedule_home(route: Route, widths: Sequence[int]) -> CopySchedule:
    """Return the copies that pack results for other ranks and place those for this rank."""
    own = route.rank
    before, here = sum(route.receives[:own]), route.receives[own]
    after = sum(route.receives) - before - here
    # The held rows are ordered by owner: those for ranks before this one, its own, those for ranks
    # after it. The send buffer has no gap for the own rows.
    return tuple(
        RowCopy(tensor, source_row, target_row, num_rows, 0, 0, width)
        for i, width in enumerate(widths)
        for tensor, source_row, target_row, num_rows in (
            (i, 0, 0, before),
            (i + len(widths), before, sum(route.lengths[:own]), here),
            (i, before + here, before, after),
        )
        if num_rows
    )
