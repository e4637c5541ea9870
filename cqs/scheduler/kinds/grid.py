"""Plans by rows and by 2-D grids."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from cqs.arguments import as_bool, as_integer
from cqs.scheduler.balancing import balance_rows
from cqs.scheduler.task import Step, join_ranges
from cqs.scheduler.token_groups import Strip, TokenGroups


@dataclass(frozen=True)
class Grid2D:
    """Each task reads the queries of ``query_groups`` groups and the keys of ``key_groups`` groups.

    The product of the two numbers is ``num_tasks``. Query groups are consecutive, key groups are
    spread over the sequence, and both include the group of the task's index. ``Grid2D(1, W)`` is
    the plan of ring attention and all-gather: a task has all keys of its queries, and nothing is
    merged.

    Work under causal masks and patterns is balanced among tasks with the same keys: rows move from
    the tasks with the most live pairs to those with the fewest. A causal grid is balanced within
    1 % or one row or tile of rows if ``query_groups`` is 1 or ``key_groups`` is even. Without
    balancing less is sent, but the busiest task of a causal grid has up to twice the mean.
    """

    query_groups: int
    key_groups: int
    is_balanced: bool = True
    """Whether rows move between tasks with the same keys."""

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless both numbers are positive integers."""
        for name in ("query_groups", "key_groups"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1))
        object.__setattr__(self, "is_balanced", as_bool("is_balanced", self.is_balanced))

    def __str__(self) -> str:
        """Describe the grid."""
        text = f"a grid of {self.query_groups} query groups x {self.key_groups} key groups"
        return text if self.is_balanced else f"{text}, not balanced"

    @property
    def num_groups(self) -> tuple[int, int]:
        """Number of groups of which a task reads queries, and keys, without balancing."""
        return self.query_groups, self.key_groups

    @property
    def busiest(self) -> float:
        """Live pairs of the busiest task of a causal plan, relative to the mean."""
        width, height = self.query_groups, self.key_groups
        if not self.is_balanced:
            return 2 - 1 / height
        return 1 + (width - 1) / (width * height**2) if height % 2 else 1.0

    def near(self, num_tasks: int, per_host: float) -> tuple[float, float]:
        """Return how many groups of queries, and of keys, a task reads of its own host.

        See :meth:`cqs.scheduler.kinds.Quorums.near`. The result is exact if ``query_groups``
        divides ``per_host`` or is a multiple of it.
        """
        width = self.query_groups
        return min(width, per_host), min(max(per_host / width, 1.0), self.key_groups)

    def fit(self, num_tasks: int) -> "Grid2D":
        """Return the grid, or raise ValueError if it has another number of tasks."""
        if self.query_groups * self.key_groups != num_tasks:
            raise ValueError(
                f"query_groups * key_groups must be the number of tasks, {num_tasks}, got {self}"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the field that defines the kind in a plan's JSON object."""
        numbers = [self.query_groups, self.key_groups]
        return {"grid": numbers if self.is_balanced else [*numbers, False]}

    def divide(self, groups: TokenGroups) -> Callable[[int], list[Step]]:
        """Return the function that lists the steps of a task, given its index.

        The first task of a column, which are the tasks with the same keys, balances the column.
        """
        columns = self._columns(groups)
        column_of = {group: column for column in columns for group in column}
        width = self.query_groups
        blocks = groups.merged(width).queries

        @cache
        def balanced(column: tuple[int, ...]) -> list[list[Strip]]:
            keys = join_ranges(groups.keys_of(column))
            strips = [[groups.strip(i * width, rows, keys)] for i, rows in enumerate(blocks)]
            return balance_rows(strips, groups) if self.is_balanced else strips

        return lambda index: groups.steps(balanced(column_of[index])[index // width])

    def _columns(self, groups: TokenGroups) -> list[tuple[int, ...]]:
        """Return the key groups of every column, which are also the indices of its tasks.

        A column has one of every ``query_groups`` consecutive groups: of these, the one with the
        most live pairs belongs to the column with the fewest so far. Causal columns are therefore
        zigzag.
        """
        width, everything = self.query_groups, range(groups.seqlen_q)
        columns: list[list[int]] = [[] for _ in range(width)]
        loads = [0] * width
        for first in range(0, groups.number, width):
            block = range(first, first + width)
            work = [groups.count_area(everything, groups.keys_of([group])) for group in block]
            ranked = sorted(block, key=lambda group: -work[group - first])
            for group, i in zip(ranked, sorted(range(width), key=loads.__getitem__), strict=True):
                columns[i].append(group)
                loads[i] += work[group - first]
        return [tuple(column) for column in columns]
