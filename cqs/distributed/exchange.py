"""Rows of tokens from the shards to who computes with them, and results back."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.distributed.layout import Route
from cqs.distributed.moves import Move, Moves, move

HeadsOfRanks = tuple[range, ...]
"""For every rank, some heads; equally many for each."""

_TAG = 0x637173
"""Of our messages, among those of the caller."""
_SETTLING_SECONDS = 10.0
"""How long a call that fails waits for messages, at most."""
_connected: "WeakSet[Any]" = WeakSet()


def connect(group: Any, device: torch.device) -> None:
    """Connect all ranks of a group, once; every rank must call this.

    The first thing that NCCL does in a group takes all ranks, and messages may concern some.
    """
    group = group or dist.group.WORLD
    if device.type == "cuda" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class Piece(NamedTuple):
    """What one rank sent back for some rows of the shard."""

    rank: int
    rows: range
    tensor: Tensor
    """``[batch, heads, rows, ...]``."""


class Transfer:
    """Tensors under way, those that go the same way in one message for each rank.

    A GPU goes on meanwhile with what it has been given, once all is posted.
    """

    def __init__(self, group: Any) -> None:
        """Begin with nothing.

        Args:
            group: The process group. A rank takes part where it sends or receives something.
        """
        self._group, self._rank = group, dist.get_rank(group)
        self._messages: list[dist.P2POp] = []
        self._under_way: list[Any] = []
        self._coming: list[Tensor] = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors that need not travel at all."""
        self._coming += tensors

    def pack(
        self,
        sources: Sequence[Tensor],
        widths: list[int],
        moves: Moves,
        lengths: Sequence[int],
        expected: Sequence[int],
    ) -> None:
        """Pack rows that are to be sent.

        Args:
            sources: ``[batch, heads, rows, ...]``.
            widths: Heads that travel of each of them.
            moves: Between the sources, twice, and the rows for other ranks, then those that come.
            lengths: Number of rows for every rank.
            expected: Number of rows from every rank; those of this rank are among the moves.
        """
        batch, _, _, *dim = sources[0].shape
        packed, received = (
            sources[0].new_empty((num_rows, batch, sum(widths), *dim))
            for num_rows in (sum(lengths) - lengths[self._rank], sum(expected))
        )
        coming = received.movedim(0, 2).split(widths, dim=1)
        move((*sources, *sources), (*packed.movedim(0, 2).split(widths, dim=1), *coming), moves)
        leaving = list(lengths)
        leaving[self._rank] = 0
        self._messages += [
            dist.P2POp(act, rows, group=self._group, tag=_TAG, group_peer=rank)
            for act, parts in (
                (dist.isend, packed.split(leaving)),
                (dist.irecv, received.split(list(expected))),
            )
            for rank, rows in enumerate(parts)
            if len(rows) and rank != self._rank
        ]
        self._coming += coming

    def post(self) -> "Transfer":
        """Send what was packed."""
        if self._messages:
            self._under_way = dist.batch_isend_irecv(self._messages)
        return self

    def wait(self) -> list[Tensor]:
        """Return what came for each tensor, ``[batch, heads, rows, ...]``; once.

        On a GPU it is there for what is launched from now on.
        """
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        self._messages.clear()  # only now may the memory of what was packed be given to others
        coming, self._coming = self._coming, []
        return coming

    def settle(self, end: float) -> None:
        """Wait, until some time of the clock, for what is under way and will not be used."""
        with suppress(RuntimeError):  # others have failed too
            for work in self._under_way:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))


class Exchange:
    """Sends tensors between the ranks of a group, which can be used again if something fails."""

    def __init__(self, group: Any, *, in_place: bool) -> None:
        """Begin with nothing.

        Args:
            group: The process group.
            in_place: Whether what stays on its rank may be the caller's own memory.
        """
        self._group, self._rank, self._in_place = group, dist.get_rank(group), in_place
        self._transfers: list[Transfer] = []

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            end = time.monotonic() + _SETTLING_SECONDS
            for transfer in self._transfers:
                transfer.settle(end)

    def send_out(
        self, shards: Sequence[Tensor], heads: Sequence[HeadsOfRanks], routes: Sequence[Route]
    ) -> Transfer:
        """Send every rank the rows that it needs, of its heads; get those that this one needs.

        Args:
            shards: Each ``[batch, heads, rows, ...]``.
            heads: Of each of them, the heads that every rank needs.
            routes: Of each of them.

        Returns:
            Of tensors ``[batch, heads of a rank, tokens held, ...]``.
        """
        transfer, rank = self._begin(), self._rank
        for route, chosen in _by_way(shards, routes):
            sources, together = [shards[i] for i in chosen], tuple(heads[i] for i in chosen)
            if self._in_place and route.stays(rank) and len(route.sends[rank]) == 1:
                (rows,) = route.sends[rank]
                transfer.keep(
                    [
                        source[:, of_rank.start : of_rank.stop, rows.start : rows.stop]
                        for source, of_rank in zip(
                            sources, (of_ranks[rank] for of_ranks in together), strict=True
                        )
                    ]
                )
                continue
            widths = [len(of_ranks[0]) for of_ranks in together]
            moves = _moves_out(route, together, rank)
            transfer.pack(sources, widths, moves, route.lengths, route.receives)
        return transfer.post()

    def send_back(self, held: Sequence[Tensor], routes: Sequence[Route]) -> Transfer:
        """Return results for the tokens held to whose they are; see :func:`pieces`.

        Args:
            held: Each ``[batch, heads of a rank, tokens held, ...]``.
            routes: Of each of them, that by which the tokens came.
        """
        transfer, rank = self._begin(), self._rank
        for route, chosen in _by_way(held, routes):
            sources = [held[i] for i in chosen]
            if route.stays(rank):
                transfer.keep(sources)
                continue
            widths = tuple(source.shape[1] for source in sources)
            moves = _moves_home(route, widths, rank)
            transfer.pack(sources, list(widths), moves, route.receives, route.lengths)
        return transfer.post()

    def _begin(self) -> Transfer:
        self._transfers.append(Transfer(self._group))
        return self._transfers[-1]


def pieces(received: Tensor, route: Route) -> Iterator[Piece]:
    """Tell apart what was sent back to this rank, rank by rank."""
    first = 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            yield Piece(rank, rows, received[:, :, first : first + len(rows)])
            first += len(rows)


@lru_cache(maxsize=256)
def moves_back(route: Route, heads: tuple[HeadsOfRanks, ...]) -> Moves:
    """Return what places tensors that were sent back in shards, if nothing is to be added up.

    Args:
        route: Of all of them.
        heads: Of each of them, the heads that every rank sent.
    """
    moves, there = [], 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            for i, of_ranks in enumerate(heads):
                first, width = of_ranks[rank].start, len(of_ranks[rank])
                moves.append(Move(i, there, rows.start, len(rows), 0, first, width))
            there += len(rows)
    return tuple(moves)


@lru_cache(maxsize=256)
def _moves_out(route: Route, heads: tuple[HeadsOfRanks, ...], own: int) -> Moves:
    """Return what packs shards for other ranks, and places what stays on this one."""
    moves = []
    of_others, of_own = 0, sum(route.receives[:own])
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            there = of_own if rank == own else of_others
            for i, of_ranks in enumerate(heads, start=len(heads) if rank == own else 0):
                first, width = of_ranks[rank].start, len(of_ranks[rank])
                moves.append(Move(i, rows.start, there, len(rows), first, 0, width))
            of_own += len(rows) if rank == own else 0
            of_others += len(rows) if rank != own else 0
    return tuple(moves)


@lru_cache(maxsize=256)
def _moves_home(route: Route, widths: tuple[int, ...], own: int) -> Moves:
    """Return what packs results for other ranks, and places those for this one."""
    before, here = sum(route.receives[:own]), route.receives[own]
    after = sum(route.receives) - before - here
    return tuple(
        Move(tensor, source_row, target_row, num_rows, 0, 0, width)
        for i, width in enumerate(widths)
        for tensor, source_row, target_row, num_rows in (
            (i, 0, 0, before),
            (i + len(widths), before, sum(route.lengths[:own]), here),
            (i, before + here, before, after),
        )
        if num_rows
    )


def _by_way(tensors: Sequence[Tensor], routes: Sequence[Route]) -> list[tuple[Route, list[int]]]:
    """Group neighbours that travel together: by one route, of one shape but for the heads.

    Two routes that are equal on this rank may differ on another.
    """

    def way(i: int) -> Any:
        return id(routes[i]), tensors[i].shape[3:], tensors[i].dtype

    groups = [list(chosen) for _, chosen in groupby(range(len(tensors)), way)]
    return [(routes[chosen[0]], chosen) for chosen in groups]
