"""The work of steps, in row numbers of the tensors that a worker holds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cqs.patterns import BoundPattern
from cqs.patterns.views import View
from cqs.ranges import moved, rows_of
from cqs.scheduler import Step


class BlockRow(NamedTuple):
    """Query rows, which have one result each, and the keys that they attend to."""

    queries: range
    """Row numbers of the queries."""
    views: tuple[View, ...]
    """The live pairs of these queries; no pair is in two views."""


@dataclass(frozen=True, eq=False)
class Work:
    """Block rows of any number of tasks; no pair is in two of them.

    Compared by identity, because a work is made once, cached, and the key of other caches.
    """

    block_rows: tuple[BlockRow, ...]
    positions: tuple[tuple[range, ...], tuple[range, ...]] | None = None
    """Positions of the rows of queries and keys, ``None`` if no score depends on them. Those of
    queries are counted such that ALiBi is 0 for a key at the position of its query."""

    def offset(self, view: View) -> int:
        """Return the number to be added to ``row of query - row of key`` for their distance."""
        if self.positions is None:
            return 0
        queries, keys = map(_position_of_row_0, (view.queries, view.keys), self.positions)
        return queries - keys


@lru_cache(maxsize=512)  # several for each head, if heads differ in their patterns
def make_work(
    steps: tuple[Step, ...],
    pattern: BoundPattern | None,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    distance: int | None = None,
) -> Work:
    """Translate the tokens of steps into row numbers of tensors.

    Args:
        steps: The steps; each has at least one query.
        pattern: The pattern that masks pairs of the steps, or ``None``.
        queries: Token ranges that the rows of the query tensor hold, one after another.
        keys: Token ranges that the rows of the key tensor hold, one after another.
        distance: ``seqlen_kv - seqlen_q``, if scores depend on positions.

    Raises:
        KeyError: Tokens of a step are not held.
    """
    return Work(
        tuple(
            BlockRow(rows_of(step.queries, queries), _step_views(step, pattern, queries, keys))
            for step in steps
        ),
        None if distance is None else (tuple(moved(r, distance) for r in queries), keys),
    )


def _step_views(
    step: Step,
    pattern: BoundPattern | None,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
) -> tuple[View, ...]:
    """Return the live pairs of a step as rows of tensors that hold these queries and keys."""
    rows = rows_of(step.queries, queries)
    views = []
    for tokens in step.keys:
        columns = rows_of(tokens, keys)
        if pattern is None:
            views.append(View(rows, columns))
            continue
        by = rows.start - step.queries.start, columns.start - tokens.start
        views += [view.moved(*by) for view in pattern.views(step.queries, tokens)]
    if step.causal_keys is not None:
        columns = rows_of(step.causal_keys, keys)
        views.append(View(rows, columns, high=columns.start - rows.start))
    return tuple(views)


def _position_of_row_0(rows: range, positions: tuple[range, ...]) -> int:
    """Return the position that row 0 would have if all rows were adjacent to these."""
    first = 0
    for tokens in positions:
        if rows.start < first + len(tokens):
            return tokens.start - first
        first += len(tokens)
    raise KeyError(rows)
