"""Which task computes which part of a pattern, so that none has many live pairs above the mean.

Groups of equal length are not equal work here, as they are where every pair is live. First each
pair of groups goes to a task whose quorum holds both: the one that owns it in a plan without a
pattern, unless that one is full. Then tasks above the mean pass on strips of rows. First to those
whose quorums hold both groups, who pass on others in turn: any two quorums have a group in common,
and all who hold it may compute it against itself. What is left goes to tasks that must hold a
group beyond their quorum, again by way of others if fewer groups are held so.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import or_
from typing import NamedTuple

from cqs.scheduler.shares import Shares, elements, set_of
from cqs.scheduler.strips import Count, Strip, live_strips

_TOLERANCE = 100
"""The busiest task may have this part more than the mean: one in a hundred."""


class _Load(NamedTuple):
    """Numbers of live pairs that decide who passes on work, and how much."""

    limit: int
    """A task with more passes some on."""
    goal: int
    """Until it has this, between mean and limit; no task takes more."""
    least: int
    """Smaller strips stay where they are, and a task that lacks less takes none."""


class _Hop(NamedTuple):
    """A strip, or some of its rows, passed on from one task to another."""

    giver: int
    strip: Strip
    receiver: int


def level_work(
    query_groups: Sequence[range],
    key_groups: Sequence[range],
    interest_set: tuple[int, ...],
    tile: int,
    count: Count,
) -> tuple[tuple[Strip, ...], ...]:
    """Share out all live pairs among as many tasks as there are query groups.

    Args:
        query_groups: ``num_tasks`` ranges that tile the queries.
        key_groups: Ranges that tile the keys; number i is of token group ``i % num_tasks``.
        interest_set: Difference cover of the integers modulo ``num_tasks``; contains 0.
        tile: Cut a group only at multiples of so many rows, if it has twice as many.
        count: Counts the live pairs of a range of queries and a range of keys.

    Returns:
        For every task the strips that it owns, of one key group each. Over all tasks every
        live pair lies in exactly one.
    """
    shares = Shares(query_groups, key_groups, interest_set, tile, count)
    strips = list(live_strips(query_groups, key_groups, count))
    mean = -(-sum(strip.live_pairs for strip in strips) // shares.num_tasks)
    tolerated = mean // _TOLERANCE
    load = _Load(mean + tolerated, mean + tolerated // 2, max(tolerated, 1))
    _assign(shares, strips, load.limit)
    _level(shares, load, within_quorums=True)
    _level(shares, load._replace(least=max(tolerated // 2, 1)), within_quorums=False)
    _settle(shares, load.limit)
    return tuple(map(tuple, shares.strips))


def _assign(shares: Shares, strips: list[Strip], limit: int) -> None:
    """Give every strip to a holder of its groups; first those without a choice, then the largest.

    Of several holders it goes to the one that it lifts least beyond the limit; among equals to the
    owner in a plan without a pattern, or where fewest groups are to be held newly, or to the one
    with the least work.
    """

    def order(part: tuple[Strip, int]) -> tuple[bool, int]:
        strip, _ = part
        return len(shares.holders(strip)) > 1, -strip.live_pairs

    parts = [part for strip in strips for part in shares.plain_parts(strip)]
    for strip, owner in sorted(parts, key=order):
        groups = shares.groups(strip)
        choices = []
        for index in shares.holders(strip):
            total = shares.live_pairs[index] + strip.live_pairs
            new = shares.num_new(index, groups)
            choices.append((max(total - limit, 0), index != owner, new, total, index))
        *_, chosen = min(choices)
        shares.add(chosen, strip)


def _level(shares: Shares, load: _Load, within_quorums: bool) -> None:
    """Let tasks beyond the limit pass on work, the busiest first."""
    live_pairs = shares.live_pairs
    givers = [index for index, total in enumerate(live_pairs) if total > load.limit]
    for giver in sorted(givers, key=lambda giver: -live_pairs[giver]):
        while live_pairs[giver] > load.limit:
            hops = _find_hops(shares, giver, load, within_quorums)
            if not hops:
                break
            most = min(live_pairs[giver] - load.goal, load.goal - live_pairs[hops[0].receiver])
            for hop in hops:
                most = shares.pass_on(*hop, most)
            if not most:
                break


def _find_hops(shares: Shares, giver: int, load: _Load, within_quorums: bool) -> list[_Hop]:
    """Return the hops that take work from one task to one that lacks some, the last hop first.

    The fewest hops and newly held groups in all; among equals the largest strips, to tasks that
    lack most. Empty if there is no way. Within quorums: only to holders of both groups.
    """
    live_pairs = shares.live_pairs
    able = [index for index, total in enumerate(live_pairs) if total <= load.limit]
    lacking = set_of(index for index in able if load.goal - live_pairs[index] >= load.least)
    by_step: defaultdict[tuple[int, int], int] = defaultdict(int)
    for index in able:
        for num_new in range(3):
            by_step[shares.cost(index, num_new), num_new] |= 1 << index
    steps = sorted(by_step.items())
    givers: dict[int, tuple[int, int]] = {}
    reached, waiting = defaultdict(int, {0: 1 << giver}), [(0, giver)]
    bound, end = 1 << 62, giver
    while waiting and waiting[0][0] + 1 < bound:
        cost, index = heappop(waiting)
        strips = [each for each in shares.ranked(index) if each.live_pairs >= load.least]
        for (step, num_new), receivers in steps:
            if (total := cost + step) >= bound:
                break
            for known, workers in reached.items():
                receivers &= ~workers if known <= total else -1
            if not receivers:
                continue
            by_strip = [shares.receivers(each, num_new, within_quorums) for each in strips]
            receivers &= reduce(or_, by_strip, 0)
            reached[total] |= receivers
            for receiver in elements(receivers):
                givers[receiver] = index, num_new
                heappush(waiting, (total, receiver))
            if ends := receivers & lacking:
                first = next(found for each in by_strip if (found := ends & each))
                bound, end = total, min(elements(first), key=live_pairs.__getitem__)
    path = []
    while end != giver:
        index, num_new = givers[end]
        for strip in shares.ranked(index):
            if shares.receivers(strip, num_new, within_quorums) >> end & 1:
                path.append(_Hop(index, strip, end))
                break
        end = index
    return path


def _settle(shares: Shares, limit: int) -> None:
    """Even out what is left where single rows are more than is tolerated."""
    live_pairs = shares.live_pairs
    while max(live_pairs) > limit:
        giver, receiver = live_pairs.index(max(live_pairs)), live_pairs.index(min(live_pairs))
        half = (live_pairs[giver] - live_pairs[receiver] + 1) // 2
        groups = map(shares.groups, shares.strips[giver])
        costs = [shares.cost(receiver, shares.num_new(receiver, each)) for each in groups]
        ranked = sorted(zip(costs, shares.strips[giver], strict=True), key=lambda pair: pair[0])
        if not any(shares.pass_on(giver, strip, receiver, half) for _, strip in ranked):
            break
