"""Plans of packed documents."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cqs.scheduler.task import Step
from cqs.scheduler.token_groups import TokenGroups

if TYPE_CHECKING:  # other kinds are planned without NumPy
    from cqs.scheduler.placement import Placement


@dataclass(frozen=True)
class Documents:
    """Each task computes the documents of the tokens that it holds, and gives away what it must.

    The kind requires a pattern of :func:`cqs.patterns.documents`. A task has all keys of its
    queries. Whole documents stay where their tokens are, and a document that ends in another task's
    tokens requires its first keys there. Tasks with more live pairs than others give rows away: the
    longest documents first, and one of them in part.
    """

    shards: tuple[int, ...] = ()
    """Number of queries that each task holds; ``()`` means token groups."""
    key_shards: tuple[int, ...] = ()
    """Number of keys that each task holds; ``()`` means that of queries if there are as many
    keys as queries, and otherwise equal parts."""
    tolerance: float = 0.015
    """Live pairs of a task above the mean, relative to it, from which the task gives rows away."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the tolerance is at least 0; it may be infinite."""
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}")

    def __str__(self) -> str:
        """Describe the kind."""
        return "whole documents where their tokens are"

    num_groups: ClassVar[tuple[int, int]] = 1, 1
    """Number of groups of which a task reads queries, and keys, if documents are short."""

    @property
    def busiest(self) -> float:
        """Live pairs of the busiest task, relative to the mean."""
        return 1 + self.tolerance

    def near(self, num_tasks: int, per_host: float) -> tuple[float, float]:
        """Return how many groups a task reads of its own host, if documents are short."""
        return 1, 1

    def fit(self, num_tasks: int) -> "Documents":
        """Return the kind, or raise ValueError if it has shards of another number of tasks."""
        for name in ("shards", "key_shards"):
            if getattr(self, name) and len(getattr(self, name)) != num_tasks:
                raise ValueError(f"{name} must be of {num_tasks} tasks, got {getattr(self, name)}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the field that defines the kind in a plan's JSON object."""
        tolerance = None if math.isinf(self.tolerance) else self.tolerance
        return {"documents": [list(self.shards), list(self.key_shards), tolerance]}

    def divide(self, groups: TokenGroups) -> Callable[[int], list[Step]]:
        """Return the function that lists the steps of a task, given its index."""
        placement = self.place(groups)

        def steps(index: int) -> list[Step]:
            ranges = placement.queries.task_ranges(index)
            return placement.steps([part for queries in ranges for part in groups.cut(queries)])

        return steps

    def place(self, groups: TokenGroups) -> "Placement":
        """Assign every query to a task: the ranges that each computes, and the keys that it reads.

        Raises:
            ValueError: The pattern is not one of documents, or the shards have another length.
        """
        from cqs.patterns.bound_documents import BoundDocuments
        from cqs.scheduler.placement import place_documents

        documents, lengths = groups.pattern, (groups.seqlen_q, groups.seqlen_kv)
        if not isinstance(documents, BoundDocuments):
            raise ValueError(
                "kind must not be Documents without a pattern of cqs.patterns.documents alone; use "
                '"quorums" for other patterns'
            )
        shards = self.shards or tuple(map(len, groups.queries))
        even_groups = replace(groups, tile=1, pattern=None)
        key_shards = self.key_shards or tuple(map(len, even_groups.keys))
        if not self.key_shards and lengths[0] == lengths[1]:
            key_shards = shards
        for name, held, length in zip(
            ("shards", "key_shards"), (shards, key_shards), lengths, strict=True
        ):
            if sum(held) != length:
                raise ValueError(f"{name} must have {length} tokens together, got {held}")
        return place_documents(documents, shards, key_shards, groups.tile, self.tolerance)
