"""Exchange of token rows: shards to the ranks that compute with them, results to their owners."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from cqs.executors.distributed.route import Route
from cqs.executors.distributed.transport.row_copies import CopySchedule, RowCopy
from cqs.executors.distributed.transport.transfer import (
    Fill,
    LostError,
    Packet,
    PacketLayout,
    Transfer,
    Transport,
)

HeadsOfRanks = tuple[range, ...]
"""A range of heads for every rank; all ranges have one length."""

_SETTLING_SECONDS = 10.0
"""Seconds that a failed call waits for pending transfers, at most."""


class Exchange:
    """Sends tensors between the ranks of a group in one forward or backward pass.

    The group remains usable after an error if the pass fails on all ranks after the same sends.
    """

    def __init__(self, transport: Transport, number: int, num_chunks: int) -> None:
        """Prepare an exchange; use it as a context manager.

        Args:
            transport: Transport between the ranks of the group.
            number: Number of the call on its group.
            num_chunks: Number of head chunks of the pass, each sent once in each direction, or of
                exchanges in transit. Chunk i uses buffer slot ``i % num_turns`` of the transport.
        """
        self._transport, self._number = transport, number
        self._num_turns = min(num_chunks, transport.num_turns)
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

    def fetch(
        self,
        chunk: int,
        shards: Sequence[Tensor],
        heads: Sequence[HeadsOfRanks],
        routes: Sequence[Route],
    ) -> Transfer:
        """Send the rows of one head chunk or part, and start receiving this rank's.

        Args:
            chunk: Index of the head chunk, or of the exchange.
            shards: This rank's tensors, each ``[batch, heads, rows, ...]``.
            heads: For each tensor, the heads that every rank requires.
            routes: For each tensor, its route.

        Returns:
            The transfer of one tensor ``[batch, heads of a rank, tokens held, ...]`` per shard.
        """
        packets = []
        for route, chosen in by_route(shards, routes):
            sources, together = [shards[i] for i in chosen], [heads[i] for i in chosen]
            layout = _layout_out(route, tuple(together), *_row_of(sources[0]))
            packets.append(Packet(layout, sources))
        return self._send(chunk, packets)

    def send_back(self, chunk: int, held: Sequence[Tensor], routes: Sequence[Route]) -> Transfer:
        """Send results for the tokens held to the ranks that own the tokens.

        Args:
            chunk: Index of the head chunk.
            held: Results, each ``[batch, heads of a rank, tokens held, ...]``.
            routes: For each result, the route by which its tokens were received.

        Returns:
            The transfer of the results for this rank's shard; :func:`by_heads` splits them.
        """
        packets = []
        for route, chosen in by_route(held, routes):
            sources = [held[i] for i in chosen]
            widths = tuple([source.shape[1] for source in sources])
            layout = _layout_home(route, widths, *_row_of(sources[0]))
            packets.append(Packet(layout, sources, sources if route.stays else None))
        return self._send(chunk, packets)

    def send_computed(
        self, chunk: int, like: Sequence[Tensor], route: Route, make: Callable[[list[Tensor]], None]
    ) -> Transfer:
        """Write results directly into the send buffer and send them to the token owners.

        Args:
            chunk: Index of the head chunk.
            like: Tensors with the shape, dtype and device of the results, except the number of
                rows: ``[batch, heads of a rank, any rows, ...]``.
            route: The route by which the tokens were received, all of them from other ranks.
            make: Function that writes the results, each ``[batch, heads of a rank, tokens held,
                ...]``, into the views of the send buffer that it is given.

        Returns:
            The transfer of the results for this rank's shard; :func:`by_heads` splits them.
        """
        packets = [
            Packet(_layout_home(route, (out.shape[1],), *_row_of(out), is_packed=True), [out])
            for out in like
        ]
        return self._send(chunk, packets, lambda rows: make([view.movedim(0, 2) for view in rows]))

    def _send(self, chunk: int, packets: Sequence[Packet], fill: Fill | None = None) -> Transfer:
        """Send packets, whose rows ``fill`` writes or each packet copies from its sources."""

        def pack(rows: list[Tensor]) -> None:
            for packet, packed in zip(packets, rows, strict=True):
                packet.pack(packed)

        received = [tensor for packet in packets for tensor in packet.received_by_source]
        if not any(packet.layout.places.most for packet in packets):  # no rank sends another any
            if fill is None:
                pack([packet.new_rows(0) for packet in packets])  # places this rank's own rows
            return Transfer(received, [])
        # Chunks share the transport's buffers in turns: a send waits only for the one before it in
        # the same turn, while those of the other turns are in transit.
        turn = chunk % self._num_turns
        pending = self._transport.send(packets, fill or pack, turn, self._num_turns)
        self._transfers.append(Transfer(received, pending))
        return self._transfers[-1]


def by_route(tensors: Sequence[Tensor], routes: Sequence[Route]) -> list[tuple[Route, list[int]]]:
    """Group adjacent tensors that one packet can hold: same route, trailing shape and dtype.

    Routes are compared by identity, because routes that are equal on this rank may differ on
    another, and all ranks must form the same packets.

    Returns:
        For each group its route and the indices of its tensors.
    """
    groups: list[tuple[Route, list[int]]] = []
    last = None
    for i, (tensor, route) in enumerate(zip(tensors, routes, strict=True)):
        kind = id(route), tensor.shape[3:], tensor.dtype
        if kind != last:
            groups.append((route, []))
        groups[-1][1].append(i)
        last = kind
    return groups


def by_heads(
    received: Tensor, route: Route, heads: HeadsOfRanks
) -> dict[range, list[tuple[Tensor, slice]]]:
    """Split results that were sent back to this rank by heads, and by rank and row range.

    Args:
        received: Results ``[batch, heads of a rank, rows, ...]``, ordered by sending rank.
        route: The route by which this rank sent the tokens out.
        heads: The heads that every rank sent back.

    Returns:
        For each range of heads, results ``[batch, heads, rows, ...]`` and their rows of this rank's
        shard.
    """
    groups: dict[range, list[tuple[Tensor, slice]]] = {rank_heads: [] for rank_heads in heads}
    first = 0
    for rank_heads, ranges in zip(heads, route.sends, strict=True):
        for rows in ranges:
            part = received[:, :, first : first + len(rows)]
            groups[rank_heads].append((part, slice(rows.start, rows.stop)))
            first += len(rows)
    return groups


@lru_cache(maxsize=256)
def schedule_back(route: Route, heads: tuple[HeadsOfRanks, ...]) -> CopySchedule:
    """Return the copies of results into shards, where at most one rank sent each row and head.

    Args:
        route: The route by which this rank sent the tokens out.
        heads: For each tensor, the heads that every rank sent back.
    """
    schedule, there = [], 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            for i, head_ranges in enumerate(heads):
                first, width = head_ranges[rank].start, len(head_ranges[rank])
                schedule.append(RowCopy(i, there, rows.start, len(rows), 0, first, width))
            there += len(rows)
    return tuple(schedule)


def _row_of(tensor: Tensor) -> tuple[int, tuple[int, ...], int]:
    """Return batch, trailing shape and itemsize of a tensor ``[batch, heads, rows, ...]``."""
    return tensor.shape[0], tensor.shape[3:], tensor.itemsize


@lru_cache(maxsize=256)
def _layout_out(
    route: Route, heads: tuple[HeadsOfRanks, ...], batch: int, dim: tuple[int, ...], itemsize: int
) -> PacketLayout:
    """Return the layout of shard rows that are sent to the ranks which require them."""
    widths = tuple(len(head_ranges[0]) for head_ranges in heads)
    row_shape, schedule = (batch, sum(widths), *dim), _schedule_out(route, heads)
    return PacketLayout(route, row_shape, itemsize, widths, schedule, is_home=False)


@lru_cache(maxsize=256)
def _layout_home(
    route: Route,
    widths: tuple[int, ...],
    batch: int,
    dim: tuple[int, ...],
    itemsize: int,
    *,
    is_packed: bool = False,
) -> PacketLayout:
    """Return the layout of results that are sent home; ``is_packed`` if they need no copies."""
    row_shape = batch, sum(widths), *dim
    schedule = () if is_packed or route.stays else _schedule_home(route, widths)
    return PacketLayout(route, row_shape, itemsize, widths, schedule, is_home=True)


def _schedule_out(route: Route, heads: tuple[HeadsOfRanks, ...]) -> CopySchedule:
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


def _schedule_home(route: Route, widths: tuple[int, ...]) -> CopySchedule:
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
