"""The steps of a rank's task, split by the tokens that its shard has."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cqs.patterns import BoundPattern
from cqs.ranges import contains, overlap
from cqs.scheduler import Step
from cqs.scheduler.placement import Placement
from cqs.scheduler.task import join_ranges


class SplitSteps(NamedTuple):
    """The steps of a task in three parts; their ``live_pairs`` ignore a pattern."""

    own: tuple[Step, ...]
    """Steps whose queries and keys are both in the rank's shard."""
    home: tuple[Step, ...]
    """Steps with queries of the rank's shard and keys that it does not hold in full."""
    away: tuple[Step, ...]
    """Steps with queries of other ranks."""


def split_steps(
    steps: Iterable[Step], queries: range, keys: range, pattern: BoundPattern | None = None
) -> SplitSteps:
    """Split steps by the tokens of a rank's shard, given as positions of its queries and keys.

    A causal square is not split along its keys: it is ``own`` only if the shard has all of them.
    Parts without a live pair of ``pattern`` are dropped.

    Example:
        >>> step = Step(0, range(4, 8), (range(0, 4),), range(4, 8), 26)
        >>> split = split_steps([step], range(6, 9), range(5, 9))
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.own]
        [(range(6, 8), (range(5, 6),), range(6, 8))]
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.home]
        [(range(6, 8), (range(0, 5),), None)]
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.away]
        [(range(4, 6), (range(0, 4),), range(4, 6))]
    """
    own: list[Step] = []
    home: list[Step] = []
    away: list[Step] = []
    for step in steps:
        for rows in _split(step.queries, queries):
            seen, square = _keys_of_rows(step, rows)
            parts = [(away, seen, square)]
            if contains(queries, rows):
                here = [overlap(span, keys) for span in seen]
                there = [e for span in seen for e in _split(span, keys) if not contains(keys, e)]
                is_own = square is not None and contains(keys, square)
                parts = [(own, here, square if is_own else None)]
                parts += [(home, there, None if is_own else square)]
            for chosen, spans, diagonal in parts:
                part = Step.of(step.query_group, rows, spans, diagonal)
                live = pattern is None or any(pattern.count(rows, span) for span in part.keys)
                if part.live_pairs and live:
                    chosen.append(part)
    return SplitSteps(tuple(own), tuple(home), tuple(away))


def split_documents(
    placement: Placement, owned: Sequence[range], head_parallel: int
) -> list[SplitSteps]:
    """Return the steps of every rank for packed documents; their query group is the rank.

    Args:
        placement: The queries of all tasks, of which each has all keys.
        owned: For every rank, the positions of the queries that count as its own.
        head_parallel: Number of ranks of a task.
    """
    parts = [
        (rank, part)
        for rank, own in enumerate(owned)
        for queries in placement.queries.task_ranges(rank // head_parallel)
        for part in (_split(queries, own) if own else [queries])
    ]
    home, away = ([list[Step]() for _ in owned] for _ in range(2))
    for step in placement.steps(parts):
        is_own = contains(owned[step.query_group], step.queries)
        (home if is_own else away)[step.query_group].append(step)
    return [SplitSteps((), *map(tuple, parts)) for parts in zip(home, away, strict=True)]


def span_of(steps: Sequence[Step]) -> range:
    """Return the queries from the first step to the last."""
    return range(steps[0].queries.start, steps[-1].queries.stop) if steps else range(0)


def keys_of(steps: Iterable[Step]) -> tuple[range, ...]:
    """Return the distinct keys of steps in ascending ranges."""
    return join_ranges(block.keys for step in steps for block in step.blocks())


def _keys_of_rows(step: Step, rows: range) -> tuple[list[range], range | None]:
    """Return the keys that every one of the rows sees, and the causal square of the rows."""
    if step.causal_keys is None:
        return list(step.keys), None
    first, last = (
        step.causal_keys.start + end - step.queries.start for end in (rows.start, rows.stop)
    )
    return [*step.keys, range(step.causal_keys.start, first)], range(first, last)


def see_only(keys: range, steps: Iterable[Step]) -> bool:
    """Return whether steps read no keys outside ``keys``."""
    return all(contains(keys, block.keys) for step in steps for block in step.blocks())


def _split(tokens: range, at: range) -> list[range]:
    """Split a range at both ends of ``at``."""
    marks = sorted({tokens.start, tokens.stop, *(e for e in (at.start, at.stop) if e in tokens)})
    return [range(a, b) for a, b in zip(marks, marks[1:], strict=False)]
