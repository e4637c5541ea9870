"""Rows of tokens from the shards to who computes with them, and results back."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cqs.distributed.layout import Route
from cqs.distributed.moves import Move, Moves, move

HeadsOfRanks = tuple[range, ...]
"""For every rank, some heads; equally many for each."""


class Piece(NamedTuple):
    """What one rank sent back for some rows of the shard."""

    rank: int
    rows: range
    tensor: Tensor
    """``[batch, heads, rows, ...]``."""


class Transfer:
    """Tensors under way, those that go the same way in one collective.

    A GPU goes on meanwhile with what it has been given.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._collectives: list[tuple[Any, Tensor, Tensor, list[int]]] = []

    def add(
        self,
        packed: Tensor,
        widths: list[int],
        lengths: Sequence[int],
        expected: Sequence[int],
        group: Any,
    ) -> None:
        """Send rows to every rank.

        Args:
            packed: ``[rows, batch, heads, ...]``, contiguous: all heads of several tensors.
            widths: Heads of each tensor.
            lengths: Number of rows for every rank.
            expected: Number of rows from every rank.
            group: The process group.
        """
        received = packed.new_empty((sum(expected), *packed.shape[1:]))
        work = dist.all_to_all_single(
            received, packed, list(expected), list(lengths), group=group, async_op=True
        )
        # The collective reads `packed` until it is done: its memory must not be given to others.
        self._collectives.append((work, packed, received, widths))

    def wait(self) -> list[Tensor]:
        """Return what came for each tensor, ``[batch, heads, rows, ...]``, rows first in memory.

        On a GPU it is there for what is launched from now on.
        """
        tensors: list[Tensor] = []
        for work, _, received, widths in self._collectives:
            work.wait()
            tensors += received.movedim(0, 2).split(widths, dim=1)
        return tensors


def send_out(
    shards: Sequence[Tensor],
    heads: Sequence[HeadsOfRanks],
    routes: Sequence[Route],
    group: Any,
) -> Transfer:
    """Send every rank the rows that it needs, of its heads; get those that this one needs.

    Args:
        shards: Each ``[batch, heads, rows, ...]``.
        heads: Of each of them, the heads that every rank needs.
        routes: Of each of them.
        group: The process group.

    Returns:
        Of tensors ``[batch, heads of a rank, tokens held, ...]``.
    """
    transfer = Transfer()
    for route, chosen in _by_way(shards, routes):
        together = tuple(heads[i] for i in chosen)
        widths = [len(of_ranks[0]) for of_ranks in together]
        sources = [shards[i] for i in chosen]
        batch, _, _, *dim = sources[0].shape
        packed = sources[0].new_empty((sum(route.lengths), batch, sum(widths), *dim))
        targets = packed.movedim(0, 2).split(widths, dim=1)
        move(sources, targets, _moves_out(route, together))
        transfer.add(packed, widths, route.lengths, route.receives, group)
    return transfer


def send_back(held: Sequence[Tensor], routes: Sequence[Route], group: Any) -> Transfer:
    """Return results for the tokens held to whose they are; see :func:`pieces`.

    Args:
        held: Each ``[batch, heads of a rank, tokens held, ...]``.
        routes: Of each of them, that by which the tokens came.
        group: The process group.
    """
    transfer = Transfer()
    for route, chosen in _by_way(held, routes):
        sources = [held[i] for i in chosen]
        widths = [source.shape[1] for source in sources]
        batch, _, num_rows, *dim = sources[0].shape
        packed = sources[0].new_empty((num_rows, batch, sum(widths), *dim))
        targets = packed.movedim(0, 2).split(widths, dim=1)
        whole = (Move(i, 0, 0, num_rows, 0, 0, width) for i, width in enumerate(widths))
        move(sources, targets, tuple(whole))
        transfer.add(packed, widths, route.receives, route.lengths, group)
    return transfer


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
    return tuple(
        Move(i, there, here, num_rows, 0, of_rank.start, len(of_rank))
        for i, here, there, num_rows, of_rank in _parts(route, heads)
    )


@lru_cache(maxsize=256)
def _moves_out(route: Route, heads: tuple[HeadsOfRanks, ...]) -> Moves:
    return tuple(
        Move(i, here, there, num_rows, of_rank.start, 0, len(of_rank))
        for i, here, there, num_rows, of_rank in _parts(route, heads)
    )


def _parts(
    route: Route, heads: tuple[HeadsOfRanks, ...]
) -> Iterator[tuple[int, int, int, int, range]]:
    """Yield tensor, first row in the shard, first row under way, number of rows, and heads."""
    first = 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            for i, of_ranks in enumerate(heads):
                yield i, rows.start, first, len(rows), of_ranks[rank]
            first += len(rows)


def _by_way(tensors: Sequence[Tensor], routes: Sequence[Route]) -> list[tuple[Route, list[int]]]:
    """Group neighbours that travel together: by one route, of one shape but for the heads.

    Two routes that are equal on this rank may differ on another.
    """

    def way(i: int) -> Any:
        return id(routes[i]), tensors[i].shape[3:], tensors[i].dtype

    groups = [list(chosen) for _, chosen in groupby(range(len(tensors)), way)]
    return [(routes[chosen[0]], chosen) for chosen in groups]
