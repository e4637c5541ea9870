"""A task: what one task holds and computes, as ranges of tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Block(NamedTuple):
    """A rectangle of the score matrix, of which a causal square or a pattern leaves out pairs."""

    queries: range
    keys: range
    is_causal: bool
    """True: as many keys as queries, query i sees the keys 0..i of the block."""

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs, before a pattern leaves out any."""
        if self.is_causal:
            return len(self.queries) * (len(self.queries) + 1) // 2
        return len(self.queries) * len(self.keys)


class Step(NamedTuple):
    """Some query rows of one group and all the keys that a task matches them with.

    A step has one result per query row: a softmax over ``keys`` and ``causal_keys`` together. In a
    plan with a pattern, over those of ``keys`` that the row sees.
    """

    query_group: int
    queries: range
    keys: tuple[range, ...]
    """Ascending, disjoint, not adjacent; each is seen by every query of the step, or with a pattern
    by some."""
    causal_keys: range | None
    """As many keys as queries; query i sees the first i + 1 of them. None with a pattern."""
    live_pairs: int
    """Number of (query, key) pairs that attention computes."""

    @property
    def is_split(self) -> bool:
        """Whether a rectangle and a causal square, two calls, make up the result."""
        return bool(self.keys) and self.causal_keys is not None

    def blocks(self) -> tuple[Block, ...]:
        """The rectangles of this step."""
        full = tuple(Block(self.queries, keys, False) for keys in self.keys)
        if self.causal_keys is None:
            return full
        return (*full, Block(self.queries, self.causal_keys, True))


@dataclass(frozen=True)
class Task:
    """One task's share of a plan: a pure function of the groups it holds."""

    index: int
    held_groups: tuple[int, ...]
    """Token groups of which this task needs queries, keys or both; ascending."""
    held_queries: tuple[range, ...]
    """Query ranges to send, each a whole group as the plan cuts them; ascending."""
    held_keys: tuple[range, ...]
    """Key and value ranges to send, likewise."""
    steps: tuple[Step, ...]
    """What to compute; one partial result each."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rectangles this task owns, all with at least one live pair."""
        return tuple(block for step in self.steps for block in step.blocks())

    @cached_property
    def live_pairs(self) -> int:
        """Number of (query, key) pairs this task computes."""
        return sum(step.live_pairs for step in self.steps)

    @property
    def held_tokens(self) -> int:
        """Number of tokens whose query, key and value this task needs, the larger side."""
        return max(sum(map(len, self.held_queries)), sum(map(len, self.held_keys)))


def join_ranges(ranges: Iterable[range]) -> tuple[range, ...]:
    """Sort disjoint ranges, join those that touch and drop the empty.

    Example:
        >>> join_ranges([range(6, 9), range(0, 2), range(2, 4), range(5, 5)])
        (range(0, 4), range(6, 9))
    """
    runs: list[range] = []
    for piece in sorted(filter(len, ranges), key=lambda piece: piece.start):
        if runs and runs[-1].stop == piece.start:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(piece)
    return tuple(runs)
