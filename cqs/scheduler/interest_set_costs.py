"""Costs of the interest sets of one number of tasks, for one problem."""

from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from cqs.arguments import as_integer
from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.interest_sets import load_interest_sets
from cqs.scheduler.kinds import Quorums
from cqs.scheduler.plan import Plan

_MAX_COMPARED = 1024
"""Most tasks of plans that are compared: 4 s, and four times as many for twice the tasks."""
_ORDERS = {"traffic": attrgetter("traffic", "memory"), "memory": attrgetter("memory", "traffic")}
"""Keys by which sets are compared, with the costs that decide between equals."""


class InterestSetCosts(NamedTuple):
    """Costs of the plan of an interest set."""

    interest_set: tuple[int, ...]
    """The interest set."""
    longest: int
    """Tokens that a task holds, at most: the longest subsequence."""
    mean_tokens: float
    """Tokens that a task holds, on average."""
    traffic: float
    """Bytes that a task receives and returns in a forward pass, on average."""
    memory: int
    """Predicted peak memory of a task in bytes, at most."""


def compare_interest_sets(
    plan: Plan, shape: AttentionShape | None = None
) -> list[InterestSetCosts]:
    """Return the costs of all stored interest sets, in the order in which they are stored.

    Sets of one size have the same costs if attention is neither causal nor sparse and ``num_tasks``
    divides the lengths.

    Args:
        plan: A plan of any kind for the problem, of at most 1,024 tasks; all tasks are made for
            every set.
        shape: Heads, head dimensions, batch and element size of the tensors; ``None`` means one
            head of 64 in half precision.

    Raises:
        ValueError: The plan has more tasks.

    Example:
        >>> from cqs.scheduler import make_plan
        >>> [costs.longest for costs in compare_interest_sets(make_plan(10, num_tasks=4))]
        [8, 8]
    """
    num_tasks = as_integer("num_tasks", plan.num_tasks, 1, _MAX_COMPARED)
    shape = AttentionShape(1, 64) if shape is None else shape
    compared = []
    for interest_set in load_interest_sets(num_tasks):
        candidate = replace(plan, kind=Quorums(interest_set))
        costs = [candidate.predict_cost(index, shape) for index in range(num_tasks)]
        held = [task.held_tokens for task in candidate.tasks]
        traffic = sum(cost.bytes_in + cost.bytes_out for cost in costs) / num_tasks
        peak = max(cost.peak_bytes for cost in costs)
        compared.append(
            InterestSetCosts(interest_set, max(held), sum(held) / num_tasks, traffic, peak)
        )
    return compared


def choose_interest_set(
    plan: Plan, shape: AttentionShape | None = None, *, by: str
) -> tuple[int, ...]:
    """Return the stored interest set with the least traffic or memory for a problem.

    Args:
        plan: See :func:`compare_interest_sets`.
        shape: See :func:`compare_interest_sets`.
        by: ``"traffic"`` for the fewest bytes on average, ``"memory"`` for the lowest peak of any
            task. The other one decides between equals, then the order of the stored sets.

    Raises:
        ValueError: The plan has more than 1,024 tasks, or ``by`` is another text.

    Example:
        >>> from cqs.scheduler import make_plan
        >>> choose_interest_set(make_plan(4096, num_tasks=7, is_causal=True), by="traffic")
        (0, 1, 5)
    """
    if by not in _ORDERS:
        raise ValueError(f"by must be 'traffic' or 'memory', got {by!r}")
    return min(compare_interest_sets(plan, shape), key=_ORDERS[by]).interest_set
