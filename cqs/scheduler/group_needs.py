"""Count the token groups that tasks receive, for the cost model of communication."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cqs.ranges import overlap
from cqs.scheduler.kinds import Documents, Kind
from cqs.scheduler.plan import Plan
from cqs.scheduler.task import Task, join_ranges

_FEW_TASKS, _SIZE = 64, 60
"""Number of tasks up to which their needs are counted, and the tokens of a group in their plan."""


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


@lru_cache(maxsize=256)
def group_needs(kind: Kind, num_tasks: int, *, is_causal: bool) -> tuple[GroupNeeds, ...]:
    """Return the group counts of all tasks that differ, counted in a plan.

    Of many tasks, some read all groups that tasks read without a mask, so one entry is returned.
    Tasks of documents are predicted by :mod:`cqs.scheduler.document_cost`.
    """
    is_merged = float(not kind.is_final)
    if num_tasks > _FEW_TASKS or isinstance(kind, Documents):
        return (GroupNeeds(*kind.num_groups, *kind.num_groups, is_merged, is_merged),)
    length = _SIZE * num_tasks
    plan = Plan(length, length, num_tasks, is_causal, kind)
    read = [_rows_by_group(task, num_tasks) for task in plan.tasks]
    needs = set()
    for index, task in enumerate(plan.tasks):
        others = [i for i in range(num_tasks) if i != index]
        there = [1 + sum(read[index][side][i] for i in others) / _SIZE for side in (0, 1)]
        back = [1 + sum(read[i][side][index] for i in others) / _SIZE for side in (0, 1)]
        mixed = _mixed(task, range(index * _SIZE, (index + 1) * _SIZE))
        needs.add(GroupNeeds(*there, *back, *(is_merged * each for each in mixed)))
    return tuple(sorted(needs))


def _rows_by_group(task: Task, num_groups: int) -> tuple[list[int], list[int]]:
    """Return the numbers of queries, and of keys, that a task reads of every group."""
    counts = [0] * num_groups, [0] * num_groups
    queries = join_ranges(step.queries for step in task.steps)
    for of_groups, ranges in zip(counts, (queries, task.held_keys), strict=True):
        for tokens in ranges:
            for group in range(tokens.start // _SIZE, -(-tokens.stop // _SIZE)):
                of_groups[group] += len(overlap(tokens, range(group * _SIZE, (group + 1) * _SIZE)))
    return counts


def _mixed(task: Task, own: range) -> tuple[float, float]:
    """Return :attr:`GroupNeeds.home` and :attr:`GroupNeeds.own_keys` of a task."""
    blocks = [block for step in task.steps for block in step.blocks()]

    def inside(ranges: Iterable[range]) -> int:
        return sum(len(overlap(tokens, own)) for tokens in ranges)

    home = [block.queries for block in blocks if len(overlap(block.keys, own)) < len(block.keys)]
    away = [block.keys for block in blocks if not overlap(block.queries, own)]
    is_mixed = 0 < inside(away) < sum(map(len, away))
    return inside(join_ranges(home)) / _SIZE, float(is_mixed)
