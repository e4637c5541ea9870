"""Plans of hosts, whose tasks the ranks of a host share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from cqs.arguments import as_integer
from cqs.scheduler.balancing import balance_rows
from cqs.scheduler.kinds.grid import Grid2D
from cqs.scheduler.kinds.quorums import Quorums
from cqs.scheduler.task import Step
from cqs.scheduler.token_groups import Strip, TokenGroups


@dataclass(frozen=True)
class Hosts:
    """The tasks of one host together are a task of a plan of the hosts; they divide its rows.

    Task w belongs to host ``w // size``. A task reads ``1 / size`` of the queries of its host's
    task and all of its keys, so queries and results are sent between hosts once. With at most as
    many KV heads as query heads, this sends no more than tasks that divide the keys.
    """

    outer: Quorums | Grid2D
    """The plan of the hosts."""
    size: int
    """Number of tasks of a host."""

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless there is a plan of hosts and a positive size."""
        if not isinstance(self.outer, Quorums | Grid2D):
            raise TypeError(f"outer must be Quorums or Grid2D, got {self.outer!r}")
        object.__setattr__(self, "size", as_integer("size", self.size, 1))

    def __str__(self) -> str:
        """Describe both levels."""
        return f"{self.outer} for hosts of {self.size} tasks"

    @property
    def num_groups(self) -> tuple[int, int]:
        """Largest number of groups of which a task reads queries, and keys, without balancing."""
        queries, keys = self.outer.num_groups
        return queries, keys * self.size

    @property
    def busiest(self) -> float:
        """Live pairs of the busiest task of a causal plan, relative to the mean."""
        return self.outer.busiest

    def near(self, num_tasks: int, per_host: float) -> tuple[float, float]:
        """Return how many groups of queries, and of keys, a task reads of its own host.

        See :meth:`cqs.scheduler.kinds.Quorums.near`.
        """
        queries, keys = self.outer.near(num_tasks // self.size, max(per_host / self.size, 1.0))
        return queries, min(keys * self.size, per_host)

    def fit(self, num_tasks: int) -> "Hosts":
        """Return the kind for a number of tasks, or raise ValueError if hosts differ in size."""
        if num_tasks % self.size:
            raise ValueError(f"size must divide the number of tasks, {num_tasks}, got {self.size}")
        return Hosts(self.outer.fit(num_tasks // self.size), self.size)

    def to_json(self) -> dict[str, Any]:
        """Return the field that defines the kind in a plan's JSON object."""
        return {"hosts": [self.outer.to_json(), self.size]}

    def divide(self, groups: TokenGroups) -> Callable[[int], list[Step]]:
        """Return the function that lists the steps of a task, given its index."""
        steps_of_host = self.outer.divide(groups.merged(self.size))

        @cache
        def balanced(host: int) -> list[list[Strip]]:
            strips: list[list[Strip]] = [[] for _ in range(self.size)]
            for step in steps_of_host(host):
                keys = step.keys if step.causal_keys is None else (*step.keys, step.causal_keys)
                for group, rows in groups.cut(step.queries):
                    strips[group % self.size].append(groups.strip(group, rows, keys))
            return balance_rows(strips, groups)

        return lambda index: groups.steps(balanced(index // self.size)[index % self.size])
