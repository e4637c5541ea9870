"""Count the token groups that tasks receive, for the cost model of communication."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cqs.ranges import overlap
from cqs.scheduler.kinds import Documents, Kind
from cqs.scheduler.plan import Plan
from cqs.scheduler.task import Task, join_ranges

_FEW_TASKS, _MOST_KEY_GROUPS = 32, 128
"""Number of tasks up to which all are counted, and of groups whose keys a task reads."""
_SIZE = 60
"""Tokens of a group in the plan whose needs are counted."""


class GroupNeeds(NamedTuple):
    """Numbers of token groups that one task reads and returns.

    Every count includes 1 for the task's own group, which has the task's index.
    """

    queries: float
    """Number of groups that the task reads queries of; half a group counts 0.5."""
    keys: float
    """Number of groups that the task reads keys and values of."""
    query_results: float
    """Number of tasks that return results for the queries of the task's own group."""
    key_results: float
    """Number of tasks that return results for the keys of the task's own group."""
    home: float
    """Fraction of its own queries that the task pairs with keys of other groups."""
    own_keys: float
    """1 if the task pairs queries of other groups with its own keys and with others, else 0."""


@lru_cache(maxsize=2048)
def group_needs(kind: Kind, num_tasks: int, *, is_causal: bool) -> tuple[GroupNeeds, ...]:
    """Return the group counts of all tasks that differ, counted in a plan.

    Of many tasks a few are counted, as if as many results were returned as are received. Tasks that
    read the keys of very many groups are counted without a mask, and those of documents by
    :mod:`cqs.scheduler.document_cost`.
    """
    merged, step = float(not kind.is_final), 1 if num_tasks <= _FEW_TASKS else num_tasks // 4
    if kind.num_groups[1] > _MOST_KEY_GROUPS or isinstance(kind, Documents):
        return (GroupNeeds(*kind.num_groups, *kind.num_groups, merged, merged),)
    plan = Plan(_SIZE * num_tasks, _SIZE * num_tasks, num_tasks, is_causal, kind)
    read = {i: _rows_by_group(plan.task(i), num_tasks) for i in range(0, num_tasks, step)}
    needs = set()
    for index, rows in read.items():
        there = [sum(counts) - counts[index] for counts in rows]
        back = [sum(read[i][side][index] for i in read if i != index) for side in (0, 1)]
        mixed = (merged * fraction for fraction in _mixed(plan.task(index), index * _SIZE))
        both = (1 + number / _SIZE for number in (*there, *(back if step == 1 else there)))
        needs.add(GroupNeeds(*both, *mixed))
    return tuple(sorted(needs))


def _rows_by_group(task: Task, num_groups: int) -> tuple[list[int], list[int]]:
    """Return the numbers of queries, and of keys, that a task reads of every group."""
    sides = [0] * num_groups, [0] * num_groups
    queries = join_ranges(step.queries for step in task.steps)
    for counts, ranges in zip(sides, (queries, task.held_keys), strict=True):
        for tokens in ranges:
            for group in range(tokens.start // _SIZE, -(-tokens.stop // _SIZE)):
                counts[group] += len(overlap(tokens, range(group * _SIZE, (group + 1) * _SIZE)))
    return sides


def _mixed(task: Task, first: int) -> tuple[float, float]:
    """Return ``home`` and ``own_keys`` of a task, given the first token of its own group."""
    own = range(first, first + _SIZE)
    blocks = [block for step in task.steps for block in step.blocks()]

    def inside(ranges: Iterable[range]) -> int:
        return sum(len(overlap(tokens, own)) for tokens in ranges)

    home = [block.queries for block in blocks if len(overlap(block.keys, own)) < len(block.keys)]
    away = [block.keys for block in blocks if not overlap(block.queries, own)]
    return inside(join_ranges(home)) / _SIZE, float(0 < inside(away) < sum(map(len, away)))
