"""What may attend to what: the interface of every pattern, and how patterns combine."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from cqs.patterns.algebra import UnequalStepsError
from cqs.patterns.bound import BoundPattern, check_tokens, intersect, subtract, unite
from cqs.patterns.piece import Axis
from cqs.scheduler.arguments import as_integer, to_integer


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

    Immutable, hashable, picklable, compared by value; prints as the call that makes it. Patterns
    combine: ``a | b`` (either), ``a & b`` (both), ``a - b`` (the first but not the second).

    Unless a pattern says otherwise it speaks of positions, and query i of ``seqlen_q`` is at
    position ``i + seqlen_kv - seqlen_q``.
    """

    depends_on_length: ClassVar[bool] = False
    """Whether a pair that attends at one length may not at another."""

    @abstractmethod
    def _bind(self, lengths: Lengths) -> BoundPattern:
        """Return the pieces at these lengths."""

    def bind(self, seqlen_q: int, seqlen_kv: int | None = None) -> BoundPattern:
        """Return the pattern of ``seqlen_q`` queries and ``seqlen_kv`` keys (``None``: as many).

        Raises:
            ValueError: if a length is negative, or not the one that the pattern is made for.
            NotImplementedError: if it combines patterns of which no exact result is known.

        Example:
            >>> from cqs.patterns import causal
            >>> causal().bind(10**9).num_pairs
            500000000500000000
        """
        seqlen_q = as_integer("seqlen_q", seqlen_q, 0)
        seqlen_kv = seqlen_q if seqlen_kv is None else as_integer("seqlen_kv", seqlen_kv, 0)
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
        return self.bind(length)

    def density(self, seqlen_q: int, seqlen_kv: int | None = None) -> float:
        """Return the share of all pairs that attend; 0 where there are none."""
        return self.bind(seqlen_q, seqlen_kv).density

    def to_mask(self, seqlen_q: int, seqlen_kv: int | None = None) -> Any:
        """Return a boolean array ``[seqlen_q, seqlen_kv]``, True where a query sees a key."""
        return self.bind(seqlen_q, seqlen_kv).to_mask()

    def __or__(self, other: "Pattern") -> "Pattern":
        return Combination("|", self, other) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: "Pattern") -> "Pattern":
        return Combination("&", self, other) if isinstance(other, Pattern) else NotImplemented

    def __sub__(self, other: "Pattern") -> "Pattern":
        return Combination("-", self, other) if isinstance(other, Pattern) else NotImplemented


_COMBINE = {"|": unite, "&": intersect, "-": subtract}
_remembered = lru_cache(maxsize=64)(lambda pattern, *lengths: pattern._bind(Lengths(*lengths)))
"""The layers of a model and the tasks of a plan ask for the same again and again."""


@dataclass(frozen=True, repr=False)
class Combination(Pattern):
    """Two patterns combined by ``|``, ``&`` or ``-``."""

    operator: str
    left: Pattern
    right: Pattern

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """Whether one of the two does."""
        return self.left.depends_on_length or self.right.depends_on_length

    def _bind(self, lengths: Lengths) -> BoundPattern:
        left, right = self.left.bind(*lengths), self.right.bind(*lengths)
        try:
            return _COMBINE[self.operator](left, right)
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
