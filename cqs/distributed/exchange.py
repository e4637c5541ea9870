"""Rows of tokens from the shards to who computes with them, and results back."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.distributed.layout import Route


class Piece(NamedTuple):
    """What one rank sent back for some rows of the shard."""

    rank: int
    rows: range
    tensor: Tensor
    """``[batch, heads, rows, ...]``."""


class Transfer:
    """One collective under way; a GPU goes on with what it has been given."""

    def __init__(
        self, packed: Tensor, lengths: Sequence[int], expected: Sequence[int], group: Any
    ) -> None:
        """Send rows to every rank.

        Args:
            packed: ``[rows, batch, heads, ...]``, contiguous.
            lengths: Number of rows for every rank.
            expected: Number of rows from every rank.
            group: The process group.
        """
        self._packed = packed  # until it has left
        self._received = packed.new_empty((sum(expected), *packed.shape[1:]))
        self._work = dist.all_to_all_single(
            self._received, packed, list(expected), list(lengths), group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return what came, ``[batch, heads, rows, ...]``, rows first in memory.

        On a GPU it is there for what is launched from now on.
        """
        self._work.wait()
        return self._received.movedim(0, 2)


def send_out(shard: Tensor, heads: Sequence[range], route: Route, group: Any) -> Transfer:
    """Send every rank the rows that it needs, of its heads; get those that this one needs.

    Rows come first in memory, so that what comes from different ranks is one tensor in the order
    of tokens.

    Args:
        shard: ``[batch, heads, rows, ...]``.
        heads: For every rank, which of the heads it needs; as many for each.
        route: Of this side of the problem.
        group: The process group.

    Returns:
        Of ``[batch, heads of a rank, tokens held, ...]``.
    """
    by_row = shard.movedim(2, 0)
    pieces = [
        by_row[rows.start : rows.stop, :, of_rank.start : of_rank.stop]
        for of_rank, ranges in zip(heads, route.sends, strict=True)
        for rows in ranges
    ]
    packed = torch.cat(pieces or [by_row[:0, :, : len(heads[0])]])
    return Transfer(packed, route.lengths, route.receives, group)


def send_back(held: Tensor, route: Route, group: Any) -> Transfer:
    """Return results for the tokens held to whose they are; see :func:`pieces`.

    Args:
        held: ``[batch, heads of a rank, tokens held, ...]``.
        route: That by which the tokens came.
        group: The process group.
    """
    return Transfer(held.movedim(2, 0).contiguous(), route.receives, route.lengths, group)


def pieces(transfer: Transfer, route: Route) -> Iterator[Piece]:
    """Wait for what was sent back to this rank, and tell it apart, rank by rank."""
    received, first = transfer.wait(), 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            yield Piece(rank, rows, received[:, :, first : first + len(rows)])
            first += len(rows)
