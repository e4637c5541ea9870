"""Costs of the interest sets of one number of tasks, for one problem."""

from functools import partial
from typing import Any, NamedTuple

from cqs.arguments import as_integer
from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.interest_sets import load_interest_sets
from cqs.scheduler.kinds import Quorums
from cqs.scheduler.plan import make_plan

_MAX_COMPARED = 1024
"""Most tasks of plans that are compared: 4 s, and four times as many for twice the tasks."""


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
    seqlen_q: int,
    seqlen_kv: int | None = None,
    *,
    num_tasks: int,
    is_causal: bool = False,
    pattern: Any = None,
    shape: AttentionShape | None = None,
) -> list[InterestSetCosts]:
    """Return the costs of all stored interest sets, in the order in which they are stored.

    Sets of one size have the same costs if attention is neither causal nor sparse and ``num_tasks``
    divides the lengths.

    Args:
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys; ``None`` means the number of queries.
        num_tasks: Number of tasks, from 1 to 1,024, all of which are made for every set.
        is_causal: Whether attention is causal.
        pattern: Sparse pattern, see :func:`cqs.make_plan`.
        shape: Heads, head dimensions, batch and element size of the tensors; ``None`` means one
            head of 64 in half precision.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of range.

    Example:
        >>> [costs.longest for costs in compare_interest_sets(10, num_tasks=4)]
        [8, 8]
    """
    num_tasks = as_integer("num_tasks", num_tasks, 1, _MAX_COMPARED)
    shape = AttentionShape(1, 64) if shape is None else shape
    plan_of = partial(
        make_plan, seqlen_q, seqlen_kv, num_tasks=num_tasks, is_causal=is_causal, pattern=pattern
    )
    found = []
    for interest_set in load_interest_sets(num_tasks):
        plan = plan_of(kind=Quorums(interest_set))
        costs = [plan.predict_cost(index, shape) for index in range(num_tasks)]
        held = [task.held_tokens for task in plan.tasks]
        traffic = sum(cost.bytes_in + cost.bytes_out for cost in costs) / num_tasks
        peak = max(cost.peak_bytes for cost in costs)
        found.append(
            InterestSetCosts(interest_set, max(held), sum(held) / num_tasks, traffic, peak)
        )
    return found


def choose_interest_set(
    seqlen_q: int,
    seqlen_kv: int | None = None,
    *,
    by: str,
    num_tasks: int,
    is_causal: bool = False,
    pattern: Any = None,
    shape: AttentionShape | None = None,
) -> tuple[int, ...]:
    """Return the stored interest set with the least traffic or memory for a problem.

    Args:
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys; ``None`` means the number of queries.
        by: ``"traffic"`` for the fewest bytes on average, ``"memory"`` for the lowest peak of any
            task. The other one decides between equals, then the order of the stored sets.
        num_tasks: Number of tasks, from 1 to 1,024.
        is_causal: Whether attention is causal.
        pattern: Sparse pattern, see :func:`cqs.make_plan`.
        shape: See :func:`compare_interest_sets`.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of range, or ``by`` is another text.

    Example:
        >>> choose_interest_set(4096, num_tasks=7, is_causal=True, by="traffic")
        (0, 1, 5)
    """
    if by not in ("traffic", "memory"):
        raise ValueError(f"by must be 'traffic' or 'memory', got {by!r}")
    other = "memory" if by == "traffic" else "traffic"
    found = compare_interest_sets(
        seqlen_q,
        seqlen_kv,
        num_tasks=num_tasks,
        is_causal=is_causal,
        pattern=pattern,
        shape=shape,
    )
    return min(found, key=lambda each: (getattr(each, by), getattr(each, other))).interest_set
