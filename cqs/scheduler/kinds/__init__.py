"""The kinds of plans: which pairs of token groups a task computes."""

import math
from dataclasses import replace
from typing import Any

from cqs.scheduler.kinds.documents import Documents
from cqs.scheduler.kinds.grid import Grid2D
from cqs.scheduler.kinds.hosts import Hosts
from cqs.scheduler.kinds.quorums import Quorums

Kind = Quorums | Grid2D | Hosts | Documents
"""A frozen value that says how to divide a problem. Every kind has these members:

- ``fit(num_tasks)`` checks the kind against the number of tasks and returns the kind of a plan.
- ``divide(groups)`` returns the function that lists the steps of a task, given its index.
- ``num_groups``, the query and key groups of a task, ``busiest`` and ``near`` predict costs.
- ``to_json()`` returns the field that :func:`read_kind` reads, and ``str`` describes the kind.
"""


def check_kind(kind: Kind | str, name: str = "kind") -> Kind | str:
    """Return a kind or the name of one, or raise TypeError or ValueError."""
    if not isinstance(kind, Kind) and kind not in ("quorums", "rows", "grid", "documents"):
        error = ValueError if isinstance(kind, str) else TypeError
        raise error(
            f"{name} must be 'quorums', 'rows', 'grid', 'documents', Quorums, Grid2D, Hosts or "
            f"Documents, got {kind!r}"
        )
    return kind


def fit_kind(kind: Kind | str, num_tasks: int) -> Kind:
    """Return the kind for a number of tasks.

    Args:
        kind: ``"quorums"`` with the best known interest set; ``"rows"``, where a task reads a query
            group and all key groups; ``"grid"`` with the most equal numbers of query and key groups
            that a task reads; ``"documents"``; or a kind.
        num_tasks: Number of tasks.

    Raises:
        TypeError: ``kind`` is neither a kind nor a string.
        ValueError: ``kind`` is another string or does not fit the number of tasks.

    Example:
        >>> print(fit_kind("rows", 12), "or", fit_kind("grid", 12))
        a grid of 1 query groups x 12 key groups or a grid of 3 query groups x 4 key groups
    """
    kind = check_kind(kind)
    if kind == "rows":
        return Grid2D(1, num_tasks)
    if kind == "grid":
        width = max(n for n in range(1, math.isqrt(num_tasks) + 1) if num_tasks % n == 0)
        return Grid2D(width, num_tasks // width)
    if isinstance(kind, str):
        kind = Quorums() if kind == "quorums" else Documents()
    return kind.fit(num_tasks)


def is_final(kind: Kind) -> bool:
    """Return whether each query row has all its keys in one task: a task reads one query group."""
    return kind.num_groups[0] == 1


def list_kinds(plan: Kind | str, num_tasks: int, per_host: float) -> list[Kind]:
    """List the kinds that ``plan`` stands for.

    Args:
        plan: ``"quorums"``, ``"rows"``, ``"grid"`` for all grids, ``"any"`` for all kinds without a
            pattern, with grids that are not balanced, ``"documents"``, or a kind, which is listed
            if it fits the number of tasks.
        num_tasks: Number of tasks.
        per_host: Number of consecutive tasks of a host; ``"any"`` includes plans of hosts with at
            most so many tasks.

    Example:
        >>> len(list_kinds("any", 7, 7)), len(list_kinds("any", 6, 1)), len(list_kinds("any", 6, 3))
        (5, 9, 15)
    """
    if plan not in ("grid", "any"):
        try:
            return [fit_kind(plan, num_tasks)]
        except ValueError:
            return []

    def grids(number: int) -> list[Grid2D]:
        return [Grid2D(n, number // n) for n in range(1, number + 1) if number % n == 0]

    if plan == "grid":
        return [*grids(num_tasks)]
    kinds: list[Kind] = [Quorums().fit(num_tasks), *grids(num_tasks)]
    for size in range(2, num_tasks):
        if num_tasks % size == 0 and size <= per_host:
            number = num_tasks // size
            kinds += [Hosts(Quorums().fit(number), size)]
            kinds += [Hosts(grid, size) for grid in grids(number)]
    return kinds + [replace(grid, is_balanced=False) for grid in grids(num_tasks)]


def read_kind(written: dict[str, Any]) -> Kind:
    """Return the kind of a plan's JSON object, with one of the fields of ``to_json``."""
    if "grid" in written:
        return Grid2D(*written["grid"])
    if "documents" in written:
        shards, key_shards, tolerance = written["documents"]
        tolerance = math.inf if tolerance is None else tolerance
        return Documents(tuple(shards), tuple(key_shards), tolerance)
    if "hosts" in written:
        outer, size = written["hosts"]
        kind: Any = read_kind(outer)
        return Hosts(kind, size)
    return Quorums(written["interest_set"])
