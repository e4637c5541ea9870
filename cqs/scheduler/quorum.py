"""Cyclic quorums, and the owner of every pair of token groups."""

from functools import lru_cache


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
def owner_offsets(interest_set: tuple[int, ...], num_tasks: int) -> dict[int, tuple[int, ...]]:
    """Choose the owner of every pair of groups, by the distance from query to key group modulo W.

    Task ``p - offset`` owns the pairs with query group p, for the offset of their distance. At
    distance W / 2 there are two offsets, because two tasks share such a pair: p is the first group
    of the :func:`shared_pair` of one task, and the second group of that of the other task.

    Distances d and W - d belong to the same unordered pairs of groups, so one choice (a, b) of
    interest-set elements with a - b = +-d serves both directions. The diagonal is the pair (0, 0).
    Takes O(m^2) for m elements, which is O(num_tasks) for the sets of
    :func:`~cqs.scheduler.load_interest_set`.
    """
    offsets: dict[int, tuple[int, ...]] = {0: (0,)}
    for i, a in enumerate(interest_set):
        for b in interest_set[:i]:
            distance = (a - b) % num_tasks
            if distance not in offsets:
                offsets[distance], offsets[num_tasks - distance] = (b,), (a,)
                if 2 * distance == num_tasks:
                    offsets[distance] = b, a
        if len(offsets) == num_tasks:
            break  # all distances found; the later elements of a large set are redundant
    return offsets


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
        ((offset + index) % num_tasks, (offset + distance + index) % num_tasks)
        for distance, (offset, *others) in owner_offsets(interest_set, num_tasks).items()
        if not others
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
    first, *second = owner_offsets(interest_set, num_tasks)[num_tasks // 2]
    return ((first + index) % num_tasks, (second[0] + index) % num_tasks) if second else None
