"""Plans by cyclic quorum sets."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from cqs.scheduler.interest_sets import check_interest_set, list_elements, load_interest_set
from cqs.scheduler.quorum import owner_offsets, shared_pair
from cqs.scheduler.quorum_balancing import balance_quorums
from cqs.scheduler.task import Step
from cqs.scheduler.token_groups import TokenGroups


@dataclass(frozen=True)
class Quorums:
    """Each task reads the queries and keys of a cyclic quorum of about ``sqrt(num_tasks)`` groups.

    Causal attention needs no zig-zag order, because one task owns both group pairs (p, q) and
    (q, p), and exactly one of them is live.
    """

    interest_set: tuple[int, ...] = ()
    """A difference cover of the integers modulo ``num_tasks`` that contains 0; ``()`` means the
    best known one. With 7, 13, 21, 31, 57, ... tasks, each task reads the fewest tokens for its
    number."""

    def __post_init__(self) -> None:
        """Make the interest set a tuple; raise TypeError or ValueError if it holds no integers."""
        object.__setattr__(self, "interest_set", list_elements(self.interest_set))

    def __str__(self) -> str:
        """Describe the quorums."""
        if not self.interest_set:
            return "quorums"
        return f"quorums of {len(self.interest_set)} groups (interest set {self.interest_set})"

    @property
    def num_groups(self) -> tuple[int, int]:
        """Largest number of groups of which a task reads queries, and keys."""
        return len(self.interest_set), len(self.interest_set)

    busiest: ClassVar[float] = 1.0
    """Live pairs of the busiest task of a causal plan, relative to the mean."""

    def near(self, num_tasks: int, per_host: float) -> tuple[float, float]:
        """Return how many groups of queries, and of keys, a task reads of its own host.

        Args:
            num_tasks: Number of tasks, at least ``per_host``.
            per_host: Number of consecutive tasks of a host.

        Returns:
            The two numbers, including the task's own group, as a mean over all tasks.
        """
        distances = (min(offset, num_tasks - offset) for offset in self.interest_set)
        number = sum(max(per_host - distance, 0) for distance in distances) / per_host
        return number, number

    def fit(self, num_tasks: int) -> "Quorums":
        """Return the kind for a number of tasks, after checking the interest set."""
        if not self.interest_set:
            return Quorums(load_interest_set(num_tasks))
        return Quorums(check_interest_set(self.interest_set, num_tasks))

    def to_json(self) -> dict[str, Any]:
        """Return the field that defines the kind in a plan's JSON object."""
        return {"interest_set": list(self.interest_set)}

    def divide(self, groups: TokenGroups) -> Callable[[int], list[Step]]:
        """Return the function that lists the steps of a task, given its index.

        With a pattern, all tasks are counted and balanced at once, in O(num_tasks^2) counts.
        """
        if groups.pattern is None:
            return partial(self._steps, groups)
        shares = balance_quorums(groups, self.interest_set)
        return lambda index: groups.join(shares[index])

    def _steps(self, groups: TokenGroups, index: int) -> list[Step]:
        """Return the steps of a task without a pattern; two tasks share pairs W/2 apart."""
        num_tasks, seen = groups.number, defaultdict[int, list[int]](list)
        for distance, owners in owner_offsets(self.interest_set, num_tasks).items():
            if len(owners) == 1:
                group = (owners[0] + index) % num_tasks
                seen[group].append((group + distance) % num_tasks)
        pair = shared_pair(index, self.interest_set, num_tasks)
        steps = []
        for group in sorted({*seen, *(pair or ())}):
            rows, partners = groups.queries[group], seen[group]
            parts = [(rows, partners)]
            if pair and group in pair:
                half = pair.index(group)
                other, tile = pair[1 - half], groups.unit(rows)
                # Without a mask the first half is the whole group, and an empty half has no step.
                middle = len(rows) // 2 // tile * tile if groups.is_causal else len(rows)
                if not groups.is_causal or other < group or groups.num_prefix:
                    parts = [
                        (rows[:middle], partners + [other] * (half == 0)),
                        (rows[middle:], partners + [other] * (half == 1)),
                    ]
            for queries, key_groups in parts:
                steps += groups.steps_of_group(group, queries, groups.keys_of(key_groups))
        return steps
