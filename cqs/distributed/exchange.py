"""Rows of tokens from the shards to who computes with them, and results back."""

from collections.abc import Sequence
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


def send_out(shard: Tensor, heads: Sequence[range], route: Route, group: Any) -> Tensor:
    """Send every rank the rows that it needs, of its heads; return those that this one needs.

    One collective. Its buffers begin with the tokens, so that what comes from different ranks is
    one tensor in the order of tokens.

    Args:
        shard: ``[batch, heads, rows, ...]``.
        heads: For every rank, which of the heads it needs; as many for each.
        route: Of this side of the problem.
        group: The process group.

    Returns:
        ``[batch, heads of a slice, tokens held, ...]``, tokens first in memory.
    """
    pieces = [
        shard[:, of_rank.start : of_rank.stop, rows.start : rows.stop]
        for of_rank, ranges in zip(heads, route.sends, strict=True)
        for rows in ranges
    ]
    packed = _tokens_first(torch.cat([shard[:, : len(heads[0]), :0], *pieces], dim=2))
    received = packed.new_empty((sum(route.receives), *packed.shape[1:]))
    dist.all_to_all_single(received, packed, list(route.receives), route.lengths, group=group)
    return received.movedim(0, 2)


def send_back(held: Tensor, route: Route, group: Any) -> list[Piece]:
    """Return results for the tokens held to whose they are; list what came, rank by rank.

    Args:
        held: ``[batch, heads of a slice, tokens held, ...]``.
        route: That by which the tokens came.
        group: The process group.
    """
    packed = _tokens_first(held)
    received = packed.new_empty((sum(route.lengths), *packed.shape[1:]))
    dist.all_to_all_single(received, packed, route.lengths, list(route.receives), group=group)
    whole, first = received.movedim(0, 2), 0
    pieces = []
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            pieces.append(Piece(rank, rows, whole[:, :, first : first + len(rows)]))
            first += len(rows)
    return pieces


def _tokens_first(tensor: Tensor) -> Tensor:
    return tensor.movedim(2, 0).contiguous()
