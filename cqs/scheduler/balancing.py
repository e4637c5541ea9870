"""Balance the live pairs of a pattern across tasks.

With a pattern, groups of equal length do not hold equal work. Balancing has four phases:

1. Assign every pair of groups to a task whose quorum holds both: the owner in a plan without a
   pattern, unless that task is full.
2. Move strips of rows from tasks above the mean to tasks whose quorums hold both groups. A move may
   pass through other tasks, which give away other strips: any two quorums share a group, and every
   task that holds a group may compute it against itself.
3. Move the remaining excess to tasks that must hold a group outside their quorum, also through
   other tasks if this adds fewer groups.
4. Even out single rows that exceed the tolerance.
"""

from collections import defaultdict
from functools import reduce
from heapq import heappop, heappush
from operator import or_
from typing import NamedTuple

from cqs.scheduler.strip_assignment import StripAssignment, bit_mask, elements
from cqs.scheduler.token_groups import Strip, TokenGroups

_TOLERANCE = 100
"""The busiest task may exceed the mean by one part in this number, that is, by 1 %."""


class _Thresholds(NamedTuple):
    """Thresholds of the balancing, in live pairs."""

    limit: int
    """A task with more live pairs gives some away."""
    goal: int
    """Target of givers and receivers, between the mean and ``limit``."""
    least: int
    """Size of the smallest strip that is moved, and the smallest deficit that is filled."""


class _Move(NamedTuple):
    """The move of a strip, or of some of its rows, from task ``giver`` to task ``receiver``."""

    giver: int
    strip: Strip
    receiver: int


def balance_work(token_groups: TokenGroups, interest_set: tuple[int, ...]) -> list[list[Strip]]:
    """Assign every live pair to one of ``token_groups.number`` tasks, with balanced work.

    Args:
        token_groups: The token groups of a problem with a pattern.
        interest_set: Difference cover of the integers modulo the number of tasks; contains 0.

    Returns:
        The strips of every task. Every live pair lies in exactly one strip of one task.
    """
    assignment = StripAssignment(token_groups, interest_set)
    rows, columns = list(enumerate(token_groups.queries)), range(len(token_groups.keys))
    strips = list(token_groups.live_strips(rows, columns))
    mean = -(-sum(strip.live_pairs for strip in strips) // assignment.num_tasks)
    tolerated = mean // _TOLERANCE
    thresholds = _Thresholds(mean + tolerated, mean + tolerated // 2, max(tolerated, 1))
    _assign(assignment, strips, thresholds.limit)
    _rebalance(assignment, thresholds, within_quorums=True)
    _rebalance(assignment, thresholds._replace(least=max(tolerated // 2, 1)), within_quorums=False)
    _even_out(assignment, thresholds.limit)
    return assignment.strips


def _assign(assignment: StripAssignment, strips: list[Strip], limit: int) -> None:
    """Assign every strip to a task whose quorum holds its groups.

    Strips with a single candidate are assigned first, then the largest. Candidates are compared by
    their excess over ``limit``, then in this order: the owner in a plan without a pattern, the
    fewest newly held groups, the least work.
    """

    def order(part: tuple[Strip, int]) -> tuple[bool, int]:
        strip, _ = part
        return len(assignment.holders(strip)) > 1, -strip.live_pairs

    parts = [part for strip in strips for part in assignment.plain_parts(strip)]
    for strip, owner in sorted(parts, key=order):
        groups = assignment.groups(strip)
        choices = []
        for index in assignment.holders(strip):
            total = assignment.live_pairs[index] + strip.live_pairs
            new = assignment.num_new(index, groups)
            choices.append((max(total - limit, 0), index != owner, new, total, index))
        *_, chosen = min(choices)
        assignment.add(chosen, strip)


def _rebalance(assignment: StripAssignment, thresholds: _Thresholds, within_quorums: bool) -> None:
    """Move work away from tasks above the limit, the busiest first."""
    live_pairs = assignment.live_pairs
    givers = [index for index, total in enumerate(live_pairs) if total > thresholds.limit]
    for giver in sorted(givers, key=lambda giver: -live_pairs[giver]):
        while live_pairs[giver] > thresholds.limit:
            moves = _find_moves(assignment, giver, thresholds, within_quorums)
            if not moves:
                break
            most = min(
                live_pairs[giver] - thresholds.goal, thresholds.goal - live_pairs[moves[0].receiver]
            )
            for move in moves:
                most = assignment.move_rows(*move, most)
            if not most:
                break


def _find_moves(
    assignment: StripAssignment, giver: int, thresholds: _Thresholds, within_quorums: bool
) -> list[_Move]:
    """Return the cheapest path of moves from ``giver`` to a task below the goal, last move first.

    This is Dijkstra's algorithm on tasks with the costs of ``StripAssignment.cost``; sets of tasks
    are bit masks. Ties are resolved by the largest strip, then by the largest deficit.

    Args:
        assignment: The strips of every task.
        giver: The task that gives work away.
        thresholds: Thresholds in live pairs.
        within_quorums: Whether a strip may move only to tasks whose quorums hold both groups.

    Returns:
        The moves, or an empty list if no path exists.
    """
    live_pairs = assignment.live_pairs
    able = [index for index, total in enumerate(live_pairs) if total <= thresholds.limit]
    lacking = bit_mask(
        index for index in able if thresholds.goal - live_pairs[index] >= thresholds.least
    )
    by_step: defaultdict[tuple[int, int], int] = defaultdict(int)
    for index in able:
        for num_new in range(3):
            by_step[assignment.cost(index, num_new), num_new] |= 1 << index
    steps = sorted(by_step.items())
    givers: dict[int, tuple[int, int]] = {}
    reached, queue = defaultdict(int, {0: 1 << giver}), [(0, giver)]
    bound, end = 1 << 62, giver
    while queue and queue[0][0] + 1 < bound:
        cost, index = heappop(queue)
        strips = [each for each in assignment.ranked(index) if each.live_pairs >= thresholds.least]
        for (step, num_new), receivers in steps:
            if (total := cost + step) >= bound:
                break
            for known, tasks in reached.items():
                receivers &= ~tasks if known <= total else -1
            if not receivers:
                continue
            by_strip = [assignment.receivers(each, num_new, within_quorums) for each in strips]
            receivers &= reduce(or_, by_strip, 0)
            reached[total] |= receivers
            for receiver in elements(receivers):
                givers[receiver] = index, num_new
                heappush(queue, (total, receiver))
            if ends := receivers & lacking:
                first = next(found for each in by_strip if (found := ends & each))
                bound, end = total, min(elements(first), key=live_pairs.__getitem__)
    path = []
    while end != giver:
        index, num_new = givers[end]
        for strip in assignment.ranked(index):
            if assignment.receivers(strip, num_new, within_quorums) >> end & 1:
                path.append(_Move(index, strip, end))
                break
        end = index
    return path


def _even_out(assignment: StripAssignment, limit: int) -> None:
    """Move half the difference from the busiest to the least busy task until none exceeds limit."""
    live_pairs = assignment.live_pairs
    while max(live_pairs) > limit:
        giver, receiver = live_pairs.index(max(live_pairs)), live_pairs.index(min(live_pairs))
        half = (live_pairs[giver] - live_pairs[receiver] + 1) // 2
        groups = map(assignment.groups, assignment.strips[giver])
        costs = [assignment.cost(receiver, assignment.num_new(receiver, each)) for each in groups]
        ranked = sorted(zip(costs, assignment.strips[giver], strict=True), key=lambda pair: pair[0])
        if not any(assignment.move_rows(giver, strip, receiver, half) for _, strip in ranked):
            break
