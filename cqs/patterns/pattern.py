"""What may attend to what: the interface of every pattern, and how patterns combine."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cqs.patterns.algebra import UnequalStepsError
from cqs.patterns.bound import BoundPattern, check_tokens, intersect, subtract, unite
from cqs.patterns.piece import FAR, Axis
from cqs.scheduler.arguments import as_integer, to_integer
from cqs.uncompiled import uncompiled


class Lengths(NamedTuple):
    """The score matrix that a pattern is bound to, and its axes by position.

    Query i sits at position ``i + seqlen_kv - seqlen_q``, key j at position j: sequences are
    aligned at their ends, as causal attention is elsewhere. Queries at negative positions lie
    before the first key.
    """

    seqlen_q: int
    seqlen_kv: int

    def queries(self, origin: int = 0, step: int = 1, width: int | None = None) -> Axis:
        """Return all queries in cells that begin at position ``origin``; ``None``: without gaps."""
        origin -= self.seqlen_kv - self.seqlen_q
        return Axis(range(self.seqlen_q), origin, step, step if width is None else width)

    def keys(self, origin: int = 0, step: int = 1, width: int | None = None) -> Axis:
        """Return all keys in cells that begin at position ``origin``; ``None``: without gaps."""
        return Axis(range(self.seqlen_kv), origin, step, step if width is None else width)


class Pattern(ABC):
    """Which queries may attend to which keys, for sequences of any length or of one.

    Immutable, hashable, picklable, compared by value; equal patterns print alike in every process,
    others differently: as the call that makes them or, if made from arrays, with a digest in angle
    brackets. Patterns combine: ``a | b`` (either), ``a & b`` (both), ``a - b`` (the first but not
    the second).

    Unless a pattern says otherwise it speaks of positions, and query i of ``seqlen_q`` is at
    position ``i + seqlen_kv - seqlen_q``.
    """

    depends_on_length: ClassVar[bool] = False
    """Whether a pair that attends at one length may not at another."""

    heads: tuple[int, int] = (1, 1)
    """Number of batch elements and of heads that have a pattern of their own; 1: all share it."""

    depth: int = 0
    """Levels of combinations."""

    default_lengths: tuple[int, int] | None = None
    """Of a pattern made from arrays: the lengths they are for. Such a pattern counts query indices
    instead of positions where no lengths are given."""

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Say whether the pattern can be bound to these lengths, ``(seqlen_q, seqlen_kv)``."""
        return True

    @property
    def has_positions(self) -> bool:
        """Whether the pattern speaks of the positions of queries, not of their indices."""
        return self.default_lengths is None

    def offsets(self) -> set[int]:
        """Return what documents of unequal lengths take for the position of query 0."""
        return set()

    def intersected(self, other: "Pattern") -> "Pattern | None":
        """Return ``self & other`` if it is a pattern of this kind, else ``None``."""
        return None

    @abstractmethod
    def _bind(self, lengths: Lengths) -> BoundPattern:
        """Return the pieces at these lengths."""

    def head(self, batch: int, head: int) -> "Pattern":
        """Return the pattern of one head of one batch element."""
        return self

    @uncompiled
    def bind(self, seqlen_q: int, seqlen_kv: int | None = None) -> BoundPattern:
        """Return the pattern of ``seqlen_q`` queries and ``seqlen_kv`` keys (``None``: as many).

        Raises:
            ValueError: if a length is negative or above 2**62, or not the one that the pattern is
                made for; or if the pattern has more than 65,536 pieces or lists more than
                16,777,216 blocks.
            NotImplementedError: if it combines patterns of which no exact result is known.

        Example:
            >>> from cqs.patterns import causal
            >>> causal().bind(10**9).num_pairs
            500000000500000000
        """
        seqlen_q = as_integer("seqlen_q", seqlen_q, 0, FAR)
        seqlen_kv = seqlen_q if seqlen_kv is None else as_integer("seqlen_kv", seqlen_kv, 0, FAR)
        bound: BoundPattern = _remembered(self, seqlen_q, seqlen_kv)
        return bound

    def count(self, queries: range, keys: range) -> int:
        """Return the number of pairs within a rectangle of positions, exactly.

        Raises:
            ValueError: if the pattern depends on the lengths: then count in what :meth:`bind`
                returns.
        """
        queries, keys = check_tokens("queries", queries), check_tokens("keys", keys)
        return self._at_positions(max(queries.stop, keys.stop, 0)).count(queries, keys)

    def allows(self, query: int, key: int) -> bool:
        """Say whether the query at position ``query`` sees the key at position ``key``.

        Raises:
            ValueError: if the pattern depends on the lengths.
        """
        query = to_integer(query, "query must be an integer")
        key = to_integer(key, "key must be an integer")
        return self._at_positions(max(query, key, -1) + 1).allows(query, key)

    def _at_positions(self, length: int) -> BoundPattern:
        if self.depends_on_length:
            raise ValueError(f"{self!r} depends on the lengths: bind it to them first")
        return self.bind(*(self.default_lengths or (length,)))

    def density(self, seqlen_q: int, seqlen_kv: int | None = None) -> float:
        """Return the share of all pairs that attend; 0 where there are none."""
        return self.bind(seqlen_q, seqlen_kv).density

    def to_mask(self, seqlen_q: int, seqlen_kv: int | None = None) -> Any:
        """Return a boolean array ``[seqlen_q, seqlen_kv]``, True where a query sees a key."""
        return self.bind(seqlen_q, seqlen_kv).to_mask()

    def draw(self, seqlen_q: int, seqlen_kv: int | None = None, axes: Any = None) -> Any:
        """Draw the mask, see :func:`cqs.plotting.plot_density`."""
        from cqs.plotting import plot_density

        return plot_density(self, seqlen_q, seqlen_kv, axes)

    def __or__(self, other: "Pattern") -> "Pattern":
        return _combine("|", self, other)

    def __and__(self, other: "Pattern") -> "Pattern":
        return _combine("&", self, other)

    def __sub__(self, other: "Pattern") -> "Pattern":
        return _combine("-", self, other)


_DEEPEST = 100
_OPERATIONS = {"|": unite, "&": intersect, "-": subtract}
_remembered = lru_cache(maxsize=32)(lambda pattern, *lengths: pattern._bind(Lengths(*lengths)))
"""The layers of a model and the tasks of a plan ask for the same again and again."""


@dataclass(frozen=True, repr=False)
class Combination(Pattern):
    """Two patterns combined by ``|``, ``&`` or ``-``."""

    operator: str
    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        """Refuse what Python cannot print, hash or bind within its recursion limit."""
        depth = 1 + max(self.left.depth, self.right.depth)
        if depth > _DEEPEST:
            raise ValueError(f"patterns must be combined at most {_DEEPEST} levels deep")
        object.__setattr__(self, "depth", depth)

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """Whether one of the two does."""
        return self.left.depends_on_length or self.right.depends_on_length

    @property
    def default_lengths(self) -> tuple[int, int] | None:  # type: ignore[override]
        """The lengths that one of the two is for, if possible such as suit both."""
        sides = self.left.default_lengths, self.right.default_lengths
        found = [lengths for lengths in sides if lengths]
        return next(filter(self.suits, found), found[0] if found else None)

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Say whether both can."""
        return self.left.suits(lengths) and self.right.suits(lengths)

    @property
    def has_positions(self) -> bool:
        """Whether one of the two does."""
        return self.left.has_positions or self.right.has_positions

    def offsets(self) -> set[int]:
        """Return those of both."""
        return self.left.offsets() | self.right.offsets()

    def _bind(self, lengths: Lengths) -> BoundPattern:
        left, right = self.left.bind(*lengths), self.right.bind(*lengths)
        if self.has_positions and self.offsets() - {lengths.seqlen_kv - lengths.seqlen_q}:
            raise ValueError(
                f"{self!r} must not mix positions: documents with cu_seqlens_kv count them from "
                "the end of each document, the other side from the end of the sequence; combine "
                "such documents with causal() or from_mask(mask)"
            )
        try:
            return _OPERATIONS[self.operator](left, right)
        except UnequalStepsError:
            raise NotImplementedError(
                f"{self!r}: both sides repeat, with different steps; no exact result is known"
            ) from None

    def __repr__(self) -> str:
        sides = (
            f"({side!r})" if isinstance(side, Combination) else repr(side)
            for side in (self.left, self.right)
        )
        return f" {self.operator} ".join(sides)


@dataclass(frozen=True, repr=False)
class PerHead(Pattern):
    """A pattern for every head of every batch element; :attr:`heads` says of how many."""

    patterns: tuple[tuple[Pattern, ...], ...]
    """One row for each batch element, or one for all; in it one for each head, or one for all."""

    @property
    def heads(self) -> tuple[int, int]:  # type: ignore[override]
        """Numbers of batch elements and of heads."""
        return len(self.patterns), len(self.patterns[0])

    def head(self, batch: int, head: int) -> Pattern:
        """Return the pattern of one head; indices count for nothing where all share one."""
        batches, heads = self.heads
        return self.patterns[batch if batches > 1 else 0][head if heads > 1 else 0]

    def bind(self, seqlen_q: int, seqlen_kv: int | None = None) -> BoundPattern:
        """Refuse: each head has a bound pattern of its own."""
        raise ValueError(f"{self!r} differs by head: bind what .head(batch, head) returns")

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return self.bind(*lengths)

    def count(self, queries: range, keys: range) -> int:
        """Return the number of pairs within a rectangle, over all of :attr:`heads`."""
        return sum(each.count(queries, keys) for row in self.patterns for each in row)

    def density(self, seqlen_q: int, seqlen_kv: int | None = None) -> float:
        """Return the share of all pairs of all heads that attend."""
        densities = [each.density(seqlen_q, seqlen_kv) for row in self.patterns for each in row]
        return sum(densities) / len(densities)

    def to_mask(self, seqlen_q: int, seqlen_kv: int | None = None) -> Any:
        """Return a boolean array ``[batch, heads, seqlen_q, seqlen_kv]`` with :attr:`heads`."""
        masks = [[each.to_mask(seqlen_q, seqlen_kv) for each in row] for row in self.patterns]
        return np.array(masks)

    def __repr__(self) -> str:
        batches, heads = self.heads
        digest = content_digest(repr(self.patterns).encode())
        return f"<{batches} x {heads} patterns, the first {self.patterns[0][0]!r}, {digest}>"


def per_head(patterns: Sequence[Sequence[Pattern]]) -> Pattern:
    """Return the pattern of ``patterns[batch][head]``; a single one stands for all heads.

    Raises:
        TypeError: if an element is no pattern, or one that differs by head itself.
        ValueError: if there is none, or rows are of unequal length.
    """
    rows = tuple(map(tuple, patterns))
    for each in chain(*rows):
        if not isinstance(each, Pattern) or isinstance(each, PerHead):
            raise TypeError(f"patterns must be rows of patterns of one head, got {each!r}")
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(f"patterns must be rows of one length, at least 1, got {patterns!r}")
    return rows[0][0] if (len(rows), len(rows[0])) == (1, 1) else PerHead(rows)


def content_digest(content: bytes) -> str:
    """Return what tells patterns of other content apart when they print."""
    return blake2b(content, digest_size=6).hexdigest()


def _combine(operator: str, left: Pattern, right: Pattern) -> Pattern:
    """Combine two patterns head by head; one that all heads share goes with each."""
    if not isinstance(right, Pattern):
        return NotImplemented
    numbers = [sorted({a, b} - {1}) or [1] for a, b in zip(left.heads, right.heads, strict=True)]
    if max(map(len, numbers)) > 1:
        raise ValueError(
            f"{left!r} {operator} {right!r}: heads must agree, got {left.heads} and {right.heads}"
        )
    (batches,), (heads,) = numbers
    return per_head(
        [
            [_combine_heads(operator, left.head(b, h), right.head(b, h)) for h in range(heads)]
            for b in range(batches)
        ]
    )


def _combine_heads(operator: str, left: Pattern, right: Pattern) -> Pattern:
    known = (left.intersected(right) or right.intersected(left)) if operator == "&" else None
    return known or Combination(operator, left, right)
