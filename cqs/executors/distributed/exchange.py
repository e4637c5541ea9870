"""Exchange of token rows: shards to the ranks that compute with them, results to their owners."""

import time
from collections.abc import Sequence
from itertools import count

from torch import Tensor

from cqs.executors.distributed.layout import HeadsOfRanks
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.shard_results import by_route
from cqs.executors.distributed.transport.row_copies import CopySchedule, RowCopy
from cqs.executors.distributed.transport.transfer import (
    Fill,
    LostError,
    Packet,
    PacketLayout,
    Transfer,
    Transport,
)

BOUNDED_TURNS = 2
"""Number of sends in transit in one direction if memory is limited."""
_SETTLING_SECONDS = 10.0
"""Seconds that a failed call waits for pending transfers, at most."""


class Exchange:
    """Sends tensors between the ranks of a group in one forward or backward pass.

    The group remains usable after an error if the pass fails on all ranks after the same sends.
    """

    def __init__(self, transport: Transport, number: int, num_chunks: int | None) -> None:
        """Prepare an exchange; use it as a context manager.

        Args:
            transport: Transport between the ranks of the group.
            number: Number of the call on its group.
            num_chunks: Number of head chunks of the pass, each sent once in each direction, or
                ``None`` if memory is limited, so that only :data:`BOUNDED_TURNS` sends are in
                transit. Chunk or send i uses buffer slot ``i % num_turns`` of the transport.
        """
        self._transport, self._number = transport, number
        self._num_turns = min(num_chunks or BOUNDED_TURNS, transport.num_turns)
        self._sends = count() if num_chunks is None else None
        self._transfers: list[Transfer] = []

    def __enter__(self) -> "Exchange":
        self._transport.begin(self._number)
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
        layouts: Sequence[PacketLayout],
        fill: Fill | None = None,
    ) -> Transfer:
        """Send rows of tensors to the other ranks, and start receiving theirs.

        Args:
            chunk: Index of the head chunk.
            sources: Tensors ``[batch, heads, rows, ...]``, in the order of the layouts.
            layouts: Layouts of the packets, from :func:`lay_out_fetch` or :func:`lay_out_return`.
            fill: Writes the rows; ``None`` copies them from the sources, of which only shape, dtype
                and device count otherwise.

        Returns:
            The transfer of one tensor ``[batch, heads of a rank, rows, ...]`` per source.
        """
        packets, received, first, most = list[Packet](), list[Tensor](), 0, 0
        for layout in layouts:
            stop = first + len(layout.widths)
            packets.append(Packet(layout, sources[first:stop]))
            received += packets[-1].received_by_source
            first, most = stop, max(most, layout.places.most)

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


def lay_out_fetch(
    shards: Sequence[Tensor], heads: Sequence[HeadsOfRanks], routes: Sequence[Route]
) -> list[PacketLayout]:
    """Return the layouts of the packets that send rows to the ranks which compute with them.

    Adjacent tensors with the same route, dtype and shape share a packet.

    Args:
        shards: This rank's tensors, each ``[batch, heads, rows, ...]``.
        heads: For each tensor, the heads that every rank requires, equally many of each.
        routes: For each tensor, the rows that ranks send and receive.
    """
    layouts = []
    for route, chosen in by_route(shards, routes):
        rank_heads = [heads[i] for i in chosen]
        widths = [len(ranges[0]) for ranges in rank_heads]
        schedule = _schedule_out(route, rank_heads)
        layouts.append(_lay_out(route, shards[chosen[0]], widths, schedule, is_home=False))
    return layouts


def lay_out_return(
    results: Sequence[Tensor], routes: Sequence[Route], *, has_copies: bool = True
) -> list[PacketLayout]:
    """Return the layouts of the packets that send results to the ranks that own the tokens.

    Args:
        results: Results, each ``[batch, heads of a rank, tokens held, ...]``.
        routes: For each result, the route by which its tokens were received.
        has_copies: Whether the results are copied, or else computed in the send buffer.
    """
    layouts = []
    for route, chosen in by_route(results, routes):
        widths, is_copied = [results[i].shape[1] for i in chosen], has_copies and not route.stays
        schedule = _schedule_home(route, widths) if is_copied else ()
        layouts.append(_lay_out(route, results[chosen[0]], widths, schedule, is_home=True))
    return layouts


def _lay_out(
    route: Route, source: Tensor, widths: Sequence[int], schedule: CopySchedule, *, is_home: bool
) -> PacketLayout:
    """Return the layout of a packet of tensors like ``source``, with these numbers of heads."""
    row_shape = source.shape[0], sum(widths), *source.shape[3:]
    sizes = row_shape, source.itemsize, tuple(widths)
    return PacketLayout(route, *sizes, schedule, is_home=is_home)


def _schedule_out(route: Route, heads: Sequence[HeadsOfRanks]) -> CopySchedule:
    """Return the copies that pack shard rows for other ranks and place this rank's own rows."""
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
