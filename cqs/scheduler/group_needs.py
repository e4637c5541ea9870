"""Of how many token groups a worker needs the queries, and of how many the keys."""

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from cqs.scheduler.quorum import pair_offsets


class GroupNeeds(NamedTuple):
    """Of how many groups a worker needs what; its own is one of each."""

    queries: float
    keys: float
    query_results: float
    """How often what was computed for its own group is there: for its queries..."""
    key_results: float
    """... and for its keys."""


@lru_cache(maxsize=256)
def group_needs(
    interest_set: tuple[int, ...], num_workers: int, is_causal: bool
) -> tuple[GroupNeeds, ...]:
    """Return what workers need.

    If attention is causal they differ by which of their groups come before others; some of each
    kind are looked at. Of a pair that two workers share each needs half of the queries.
    """
    partners, shared = pair_offsets(interest_set, num_workers)
    if not is_causal:
        num_queries = num_keys = len(interest_set)
        if shared is not None:
            num_queries = len({*partners, shared[0]})
            num_keys = len({*chain(*partners.values()), shared[1]})
        return (GroupNeeds(num_queries, num_keys, num_queries, num_keys),)

    def needs(worker: int, offset: int) -> tuple[float, float]:
        """Return what part of the queries of a group a worker needs for others, and of its keys."""
        group = (worker + offset) % num_workers
        others = [(worker + other) % num_workers for other in partners.get(offset, ())]
        part = 1.0 if any(other < group for other in others) else 0.0
        if shared is not None and offset in shared:
            others.append((worker + sum(shared) - offset) % num_workers)
            part = max(part, 0.5 if others[-1] < group else 0.0)
        return part, float(any(other > group for other in others))

    distances = [offset for offset in interest_set if offset]
    found = []
    for worker in {(-offset - i) % num_workers for offset in interest_set for i in (0, 1)}:
        of_others = [needs(worker, each) for each in distances]
        by_others = [needs((worker - each) % num_workers, each) for each in distances]
        sums = (
            1 + sum(part[i] for part in parts) for parts in (of_others, by_others) for i in (0, 1)
        )
        found.append(GroupNeeds(*sums))
    return tuple(found)
