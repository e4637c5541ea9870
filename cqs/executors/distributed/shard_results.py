"""Results for this rank's shard: the rows and heads that the ranks sent back."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from cqs.executors.distributed.layout import HeadChunk, HeadsOfRanks, Layout
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.transport.row_copies import CopySchedule, RowCopy, copy_rows
from cqs.partial import Gradients, sum_rows


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


@lru_cache(maxsize=256)
def by_heads(route: Route, heads: HeadsOfRanks) -> dict[range, list[tuple[slice, slice]]]:
    """Split results that were sent back to this rank by heads, and by rank and row range.

    Args:
        route: The route by which this rank sent the tokens out.
        heads: The heads that every rank sent back.

    Returns:
        For each range of heads, rows of the results, and the rows of this rank's shard.
    """
    groups: dict[range, list[tuple[slice, slice]]] = {rank_heads: [] for rank_heads in heads}
    first = 0
    for rank_heads, ranges in zip(heads, route.sends, strict=True):
        for rows in ranges:
            received = slice(first, first + len(rows))
            groups[rank_heads].append((received, slice(rows.start, rows.stop)))
            first = received.stop
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


def place_results(
    targets: Sequence[Tensor],
    received: Sequence[Tensor],
    heads: Sequence[HeadsOfRanks],
    route: Route,
    nothing: float,
    *,
    done: int | None = None,
) -> None:
    """Copy results of which each row and head was received at most once into the shards.

    Args:
        targets: This rank's tensors, each ``[batch, heads, rows, ...]``; written to.
        received: Results of other ranks, each ``[batch, heads of a rank, rows, ...]``.
        heads: For each target, the heads of every rank.
        route: The route by which this rank sent the tokens out.
        nothing: Value for rows that no rank sent.
        done: Rank whose heads are in the targets already, except the rows received, if any.
    """
    for target, groups in zip(targets, heads, strict=True):
        num_rows = dict.fromkeys(groups, 0)
        for group, number in zip(groups, route.lengths, strict=True):
            num_rows[group] += number
        if done is not None:
            del num_rows[groups[done]]
        for group, number in num_rows.items():
            if number < target.shape[2]:
                narrow(target, group).fill_(nothing)
    copy_rows(received, targets, schedule_back(route, tuple(heads)))


def add_gradients(
    gradients: Gradients, received: Sequence[Tensor], layout: Layout, chunk: HeadChunk
) -> None:
    """Write the sum of the received gradients of each row and head into this rank's gradients.

    Args:
        gradients: This rank's gradients; written to.
        received: Gradients that other ranks sent back.
        layout: The rank's work and routing tables.
        chunk: The heads of the gradients.
    """
    heads = chunk.heads
    for route, chosen in by_route(received, layout.routes):
        # One rank alone has the gradient of a row and head: of final queries, or of its own heads.
        once = [
            n for n in chosen if layout.is_final and n == 0 or len({*heads[n]}) == len(heads[n])
        ]
        targets, sent = [gradients[n] for n in once], [received[n] for n in once]
        place_results(targets, sent, [heads[n] for n in once], route, 0)
        for n in set(chosen).difference(once):
            for group, places in by_heads(route, heads[n]).items():
                parts = [(received[n][:, :, part], rows) for part, rows in places]
                sum_rows(narrow(gradients[n], group), parts)


def narrow(tensor: Tensor, heads: range) -> Tensor:
    """Return a range of heads of a tensor ``[batch, heads, ...]``."""
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads.start : heads.stop]
