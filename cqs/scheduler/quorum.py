"""Cyclic quorums, and the owner of every pair of token groups."""

from functools import lru_cache
from typing import NamedTuple


class PairOffsets(NamedTuple):
    """Pairs of token groups that task 0 owns. Task w owns the same pairs, shifted by w modulo W."""

    partners: dict[int, tuple[int, ...]]
    """Query group -> key groups (ascending) of the ordered pairs that task 0 does not share."""
    shared: tuple[int, int] | None
    """The two groups at distance W / 2, which two tasks share; ``None`` if W is odd."""


def quorum(index: int, interest_set: tuple[int, ...], num_tasks: int) -> tuple[int, ...]:
    """Return the token groups of one task's quorum, ascending.

    Args:
        index: Index of the task, in ``range(num_tasks)``.
        interest_set: Difference cover of the integers modulo ``num_tasks``; contains 0.
        num_tasks: Number of tasks and of token groups.

    Example:
        >>> quorum(5, interest_set=(0, 1, 3), num_tasks=7)
        (1, 5, 6)
    """
    return tuple(sorted((offset + index) % num_tasks for offset in interest_set))


@lru_cache(maxsize=64)
def pair_offsets(interest_set: tuple[int, ...], num_tasks: int) -> PairOffsets:
    """Choose one pair of interest-set elements for every distance modulo ``num_tasks``.

    Distances d and W - d belong to the same unordered pairs of groups, so one choice (a, b) with
    a - b = +-d serves both directions. The diagonal is the pair (0, 0). Takes O(m^2) for m
    elements, which is O(num_tasks) for the sets of :func:`~cqs.scheduler.load_interest_set`.
    """
    chosen: dict[int, tuple[int, int]] = {}
    for i, a in enumerate(interest_set):
        for b in interest_set[:i]:
            chosen.setdefault(min((a - b) % num_tasks, (b - a) % num_tasks), (b, a))
        if len(chosen) == num_tasks // 2:
            break  # all distances found; the later elements of a large set are redundant
    shared = chosen.pop(num_tasks // 2, None) if num_tasks % 2 == 0 else None
    partners: dict[int, list[int]] = {0: [0]}
    for a, b in chosen.values():
        partners.setdefault(a, []).append(b)
        partners.setdefault(b, []).append(a)
    return PairOffsets({a: tuple(sorted(bs)) for a, bs in sorted(partners.items())}, shared)


def owned_pairs(
    index: int, interest_set: tuple[int, ...], num_tasks: int
) -> tuple[tuple[int, int], ...]:
    """Return the (query group, key group) pairs that one task owns alone.

    Over all tasks every ordered pair of groups appears exactly once. If ``num_tasks`` is even,
    pairs at distance ``num_tasks / 2`` are excluded: two tasks share each of them, see
    :func:`shared_pair`.

    Args:
        index: Index of the task, in ``range(num_tasks)``.
        interest_set: Difference cover of the integers modulo ``num_tasks``; contains 0.
        num_tasks: Number of tasks and of token groups.

    Returns:
        The pairs in ascending order.

    Example:
        >>> owned_pairs(0, interest_set=(0, 1, 3), num_tasks=7)
        ((0, 0), (0, 1), (0, 3), (1, 0), (1, 3), (3, 0), (3, 1))
    """
    pairs = (
        ((a + index) % num_tasks, (b + index) % num_tasks)
        for a, key_offsets in pair_offsets(interest_set, num_tasks).partners.items()
        for b in key_offsets
    )
    return tuple(sorted(pairs))


def shared_pair(
    index: int, interest_set: tuple[int, ...], num_tasks: int
) -> tuple[int, int] | None:
    """Return the pair of groups (p, q) that a task shares with task ``index + num_tasks / 2``.

    The task computes queries of p against keys of q; the other task gets the pair (q, p) and
    computes the rest. With causal attention one of the two rectangles is masked out. The task then
    computes the first half of the rows of p against the keys of q, and the second half of the rows
    of q against the keys of p.

    For 4 tasks with interest set (0, 1, 2), these tasks compute the rectangles. ``2|0`` means that
    task 2 computes the first half of the rows and task 0 the second half::

                     non-causal        causal
        keys         0  1  2  3        0    1    2  3
        queries 0    0  0  0  3        0
        queries 1    0  1  1  1        0    1
        queries 2    2  1  2  2        2|0  1    2
        queries 3    3  3  2  3        3    3|1  2  3

    Args:
        index: Index of the task, in ``range(num_tasks)``.
        interest_set: Difference cover of the integers modulo ``num_tasks``; contains 0.
        num_tasks: Number of tasks and of token groups.

    Returns:
        The pair (p, q), or ``None`` if ``num_tasks`` is odd.

    Example:
        >>> shared_pair(0, (0, 1, 2), 4), shared_pair(2, (0, 1, 2), 4), shared_pair(0, (0, 1), 3)
        ((0, 2), (2, 0), None)
    """
    shared = pair_offsets(interest_set, num_tasks).shared
    if shared is None:
        return None
    return (shared[0] + index) % num_tasks, (shared[1] + index) % num_tasks
