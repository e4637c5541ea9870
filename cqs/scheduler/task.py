"""Tasks: the token ranges that one task reads and computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Block(NamedTuple):
    """A rectangle of the score matrix. A causal mask or a pattern may mask out some pairs."""

    queries: range
    keys: range
    is_causal: bool
    """Whether the block is a causal square: query i of the block sees its keys 0..i."""

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs, before a pattern masks out any."""
        if self.is_causal:
            return len(self.queries) * (len(self.queries) + 1) // 2
        return len(self.queries) * len(self.keys)


class Step(NamedTuple):
    """Query rows of one token group together with all keys that a task pairs them with.

    A step has one partial output per query row: a softmax over ``keys`` and ``causal_keys``
    together. With a pattern, the softmax covers only keys that the pattern allows for the row.
    """

    query_group: int
    """Token group of the queries."""
    queries: range
    """The query rows."""
    keys: tuple[range, ...]
    """Key ranges, ascending, disjoint and not adjacent. Every query of the step sees all of these
    keys; with a pattern, every range has at least one live pair."""
    causal_keys: range | None
    """As many keys as queries, or ``None``: query i sees the first i + 1 keys. Always ``None`` with
    a pattern."""
    live_pairs: int
    """Number of live (query, key) pairs of the step."""

    @classmethod
    def of(
        cls, query_group: int, queries: range, keys: Iterable[range], causal_keys: range | None
    ) -> "Step":
        """Return a step of a plan without a pattern; disjoint key ranges are sorted and joined."""
        joined = join_ranges(keys)
        pairs = len(queries) * sum(map(len, joined))
        if causal_keys is not None:
            pairs += len(queries) * (len(queries) + 1) // 2
        return cls(query_group, queries, joined, causal_keys, pairs)

    def blocks(self) -> tuple[Block, ...]:
        """Return the rectangles of this step; the causal square comes last."""
        full = tuple(Block(self.queries, keys, False) for keys in self.keys)
        if self.causal_keys is None:
            return full
        return (*full, Block(self.queries, self.causal_keys, True))


@dataclass(frozen=True)
class Task:
    """One task of a plan. Its partial outputs depend only on the token groups that it holds."""

    index: int
    """Index of the task, in ``range(num_tasks)``."""
    held_groups: tuple[int, ...]
    """Token groups of which this task reads queries, keys or both; ascending."""
    held_queries: tuple[range, ...]
    """Query ranges that the task reads, each the live queries of a whole group; ascending."""
    held_keys: tuple[range, ...]
    """Key and value ranges that the task reads, each a whole key group; ascending."""
    steps: tuple[Step, ...]
    """Steps that the task computes; each has one partial output."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rectangles that this task computes, each with at least one live pair."""
        return tuple(block for step in self.steps for block in step.blocks())

    @cached_property
    def live_pairs(self) -> int:
        """Number of live (query, key) pairs that this task computes."""
        return sum(step.live_pairs for step in self.steps)

    @property
    def held_tokens(self) -> int:
        """Number of queries that this task reads, or of keys if it reads more keys."""
        return max(sum(map(len, self.held_queries)), sum(map(len, self.held_keys)))


def join_ranges(ranges: Iterable[range]) -> tuple[range, ...]:
    """Sort ranges, join adjacent and overlapping ones and drop empty ones.

    Example:
        >>> join_ranges([range(6, 9), range(0, 2), range(2, 4), range(5, 5)])
        (range(0, 4), range(6, 9))
    """
    runs: list[range] = []
    for piece in sorted(filter(len, ranges), key=lambda piece: piece.start):
        if runs and piece.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, piece.stop))
        else:
            runs.append(piece)
    return tuple(runs)


def keys_of(steps: Iterable[Step]) -> tuple[range, ...]:
    """Return the distinct keys of steps in ascending ranges."""
    return join_ranges(block.keys for step in steps for block in step.blocks())
