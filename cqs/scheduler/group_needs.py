"""Count the token groups that tasks receive, for the cost model of communication."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import NamedTuple

from cqs.ranges import overlap
from cqs.scheduler.kinds import Documents, Kind, is_final
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
    merged, step = float(not is_final(kind)), 1 if num_tasks <= _FEW_TASKS else num_tasks // 4
    if kind.num_groups[1] > _MOST_KEY_GROUPS or isinstance(kind, Documents):
        return (GroupNeeds(*kind.num_groups, *kind.num_groups, merged, merged),)
    plan = Plan(_SIZE * num_tasks, _SIZE * num_tasks, num_tasks, is_causal, kind)
    tasks = {index: plan.task(index) for index in range(0, num_tasks, step)}
    read = {
        index: (join_ranges(part.queries for part in task.steps), task.held_keys)
        for index, task in tasks.items()
    }
    needs = set()
    for index, task in tasks.items():
        in_own = partial(_count, range(index * _SIZE, (index + 1) * _SIZE))
        there = [sum(map(len, ranges)) - in_own(ranges) for ranges in read[index]]
        back = [sum(in_own(read[i][side]) for i in read if i != index) for side in (0, 1)]
        both = (1 + number / _SIZE for number in (*there, *(back if step == 1 else there)))
        needs.add(GroupNeeds(*both, *(merged * part for part in _mixed(task, in_own))))
    return tuple(sorted(needs))


def _count(own: range, ranges: Iterable[range]) -> int:
    """Return the number of tokens of a group in disjoint ranges."""
    return sum(len(overlap(tokens, own)) for tokens in ranges)


def _mixed(task: Task, in_own: Callable[[Iterable[range]], int]) -> tuple[float, float]:
    """Return ``home`` and ``own_keys`` of a task, given the count of tokens of its own group."""
    blocks = [block for step in task.steps for block in step.blocks()]
    home = [block.queries for block in blocks if in_own([block.keys]) < len(block.keys)]
    away = [block.keys for block in blocks if not in_own([block.queries])]
    return in_own(join_ranges(home)) / _SIZE, float(0 < in_own(away) < sum(map(len, away)))
