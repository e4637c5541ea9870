"""Count the token groups that a task receives, for the cost model of communication."""

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from cqs.scheduler.quorum import pair_offsets

_FEW_TASKS = 256
"""Number of tasks up to which the needs of every task are counted."""


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
def group_needs(
    interest_set: tuple[int, ...], num_tasks: int, is_causal: bool
) -> tuple[GroupNeeds, ...]:
    """Return the group counts of all tasks that may differ.

    Non-causal tasks are all alike, so one entry is returned. Causal tasks differ in the order of
    their groups, and one entry is returned for each of them or, if there are many, for each order
    sampled. If two tasks share a pair of groups, each reads half of the queries. Takes
    O(num_tasks log num_tasks): 6 s for 2^18 tasks.

    Args:
        interest_set: Difference cover of the integers modulo ``num_tasks``; contains 0.
        num_tasks: Number of tasks and of token groups.
        is_causal: Whether attention is causal.
    """
    partners, shared = pair_offsets(interest_set, num_tasks)
    if not is_causal:
        pairs = [(a, b) for a, others in partners.items() for b in others]
        pairs += [] if shared is None else [shared]
        num_queries, num_keys = (len({*groups}) for groups in zip(*pairs, strict=True))
        home = float(any(a == 0 != b for a, b in pairs))
        seen_by_others = {b for a, b in pairs if a}
        own_keys = float(0 in seen_by_others and len(seen_by_others) > 1)
        return (GroupNeeds(num_queries, num_keys, num_queries, num_keys, home, own_keys),)

    def needs(index: int, offset: int, *, without_own: bool = False) -> tuple[float, float]:
        """Return the fractions of a group's queries and keys that the task pairs across groups.

        With ``without_own``, pairs with the task's own group are not counted.
        """
        group = (index + offset) % num_tasks
        others = partners.get(offset, ())
        if without_own and others and others[0] == 0:
            others = others[1:]
        lowest = highest = group
        if others:  # ascending; offsets from ``wrapped`` on wrap around to group 0
            wrapped = bisect_left(others, num_tasks - index)
            lowest = (index + others[wrapped % len(others)]) % num_tasks
            highest = (index + others[wrapped - 1]) % num_tasks
        part, is_key = float(lowest < group), highest > group
        if shared is not None and offset in shared:
            other = sum(shared) - offset
            across = (index + other) % num_tasks
            part = max(part, 0.5 if across < group else 0.0)
            is_key |= across > group and not (without_own and other == 0)
        return part, float(is_key)

    distances = [offset for offset in interest_set if offset]
    found = []
    indices = {(-offset - i) % num_tasks for offset in interest_set for i in (0, 1)}
    for index in range(num_tasks) if num_tasks <= _FEW_TASKS else indices:
        of_others = [needs(index, each) for each in distances]
        by_others = [needs((index - each) % num_tasks, each) for each in distances]
        queries, keys, query_results, key_results = (
            1 + sum(part[i] for part in parts) for parts in (of_others, by_others) for i in (0, 1)
        )
        home = needs(index, 0)[0]
        num_seen = sum(needs(index, each, without_own=True)[1] for each in distances)
        own_keys = float(needs(index, 0)[1] and num_seen > 0)
        found.append(GroupNeeds(queries, keys, query_results, key_results, home, own_keys))
    return tuple(found)
