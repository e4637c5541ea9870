"""The base class of patterns, and combinations of patterns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from cqs.arguments import as_integer, to_integer
from cqs.patterns.algebra import UnequalStepsError
from cqs.patterns.bound import BoundPattern, check_tokens, in_blocks, intersect, subtract, unite
from cqs.patterns.handle import new_handle
from cqs.patterns.piece import FAR, Axis
from cqs.uncompiled import replaced_in_graphs, uncompiled


class Lengths(NamedTuple):
    """Sequence lengths that a pattern is bound to, and the axes of its score matrix.

    Query i is at position ``i + seqlen_kv - seqlen_q`` and key j at position j: sequences are
    aligned at their ends. Queries at negative positions are before the first key.
    """

    seqlen_q: int
    seqlen_kv: int

    def queries(self, step: int = 1) -> Axis:
        """Return all queries, in cells of ``step`` positions."""
        return Axis(range(self.seqlen_q), self.seqlen_q - self.seqlen_kv, step, step)

    def keys(self, step: int = 1) -> Axis:
        """Return all keys, in cells of ``step`` positions."""
        return Axis(range(self.seqlen_kv), 0, step, step)


class Pattern(ABC):
    """The set of live query-key pairs, for any sequence length or for fixed lengths.

    Patterns are immutable, hashable, picklable and compared by value. The ``repr`` of equal
    patterns is equal in every process; patterns made from arrays include a digest. Patterns combine
    with ``a | b`` (either), ``a & b`` (both) and ``a - b`` (the first but not the second).

    Unless documented otherwise, a pattern refers to positions: query i is at position
    ``i + seqlen_kv - seqlen_q``.
    """

    depends_on_length: ClassVar[bool] = False
    """Whether a pair may be live at one length and masked out at another."""

    heads: tuple[int, int] = (1, 1)
    """Numbers of batch elements and of heads with patterns of their own; 1 means one for all."""

    depth: int = 0
    """Number of nested combinations."""

    default_lengths: tuple[int, int] | None = None
    """``(seqlen_q, seqlen_kv)`` of a pattern made from arrays, else ``None``. Without given
    lengths, such a pattern refers to query indices instead of positions."""

    advice: ClassVar[str] = "make the pattern for the lengths of query and key"
    """Advice of the error for lengths that the pattern does not support."""

    @property
    def made(self) -> "Pattern":
        """This pattern; of one that a graph makes, see :class:`InGraph`, the pattern it makes."""
        return self

    @cached_property
    def handle(self) -> Any:
        """A handle of this pattern, an input of compiled graphs; it may outlive this object."""
        import torch

        with torch.inference_mode(False):  # guards of graphs compare it in every mode
            # of a copy, because this object will refer to the handle
            return torch.from_numpy(new_handle(copy(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickles and copies, without the handle."""
        return {name: value for name, value in vars(self).items() if name != "handle"}

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the pattern supports these lengths, ``(seqlen_q, seqlen_kv)``."""
        return True

    def offsets(self, lengths: Lengths) -> set[int]:
        """Return differences of index and position of queries; none if indices are meant."""
        return {lengths.seqlen_kv - lengths.seqlen_q} if self.default_lengths is None else set()

    def intersected(self, other: "Pattern") -> "Pattern | None":
        """Return ``self & other`` if it is a pattern of this kind, else ``None``."""
        return None

    @abstractmethod
    def _bind(self, lengths: Lengths) -> BoundPattern:
        """Return the bound pattern at these lengths, which it suits."""

    def head(self, batch: int, head: int) -> "Pattern":
        """Return the pattern of one head of one batch element."""
        return self

    @uncompiled
    def bind(self, seqlen_q: int, seqlen_kv: int | None = None) -> BoundPattern:
        """Return the pattern at given sequence lengths.

        Args:
            seqlen_q: Number of queries, from 0 to 2**62.
            seqlen_kv: Number of keys, from 0 to 2**62; ``None`` means ``seqlen_q``.

        Raises:
            ValueError: A length is out of range or not supported by the pattern, or the pattern
                has more than 65,536 pieces or 16,777,216 blocks at these lengths.

        Example:
            >>> from cqs.patterns import causal
            >>> causal().bind(10**9).num_pairs
            500000000500000000
        """
        seqlen_q = as_integer("seqlen_q", seqlen_q, 0, FAR)
        seqlen_kv = seqlen_q if seqlen_kv is None else as_integer("seqlen_kv", seqlen_kv, 0, FAR)
        return _bind_once(self, Lengths(seqlen_q, seqlen_kv))

    def count(self, queries: range, keys: range) -> int:
        """Return the exact number of live pairs within a rectangle.

        Args:
            queries: Query positions, a range of step 1.
            keys: Key positions, a range of step 1.

        Raises:
            TypeError: An argument is not a range.
            ValueError: A range has another step, or the pattern depends on the lengths: use
                ``bind(...).count`` instead.
        """
        queries, keys = check_tokens("queries", queries), check_tokens("keys", keys)
        return self._at_positions(max(queries.stop, keys.stop, 0)).count(queries, keys)

    def allows(self, query: int, key: int) -> bool:
        """Return whether the query at position ``query`` sees the key at position ``key``.

        Raises:
            ValueError: The pattern depends on the lengths: use ``bind(...).allows`` instead.
        """
        query = to_integer(query, "query must be an integer")
        key = to_integer(key, "key must be an integer")
        return self._at_positions(max(query, key, -1) + 1).allows(query, key)

    def _at_positions(self, length: int) -> BoundPattern:
        if self.depends_on_length:
            raise ValueError(f"{self!r} depends on the lengths: bind it to them first")
        return self.bind(*(self.default_lengths or (length,)))

    def density(self, seqlen_q: int, seqlen_kv: int | None = None) -> float:
        """Return the fraction of live pairs, from 0 to 1; 0 if there are no pairs."""
        return self.bind(seqlen_q, seqlen_kv).density

    def to_mask(self, seqlen_q: int, seqlen_kv: int | None = None) -> Any:
        """Return a boolean array ``[seqlen_q, seqlen_kv]``, True where a query sees a key."""
        return self.bind(seqlen_q, seqlen_kv).to_mask()

    def __or__(self, other: "Pattern") -> "Pattern":
        return combine("|", self, other) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: "Pattern") -> "Pattern":
        return combine("&", self, other) if isinstance(other, Pattern) else NotImplemented

    def __sub__(self, other: "Pattern") -> "Pattern":
        return combine("-", self, other) if isinstance(other, Pattern) else NotImplemented


_Maker = TypeVar("_Maker", bound=Callable[..., Pattern])
_DEEPEST = 100
_OPERATIONS = {"|": unite, "&": intersect, "-": subtract}


@lru_cache(maxsize=256)
def _bind_once(pattern: Pattern, lengths: Lengths) -> BoundPattern:
    """Return a bound pattern, which layers and tasks request repeatedly; heads may differ."""
    if not pattern.depth and not pattern.suits(lengths):  # each side of a combination is checked
        raise ValueError(
            f"{pattern!r:.200} requires lengths {pattern.default_lengths}, got {tuple(lengths)}: "
            f"{pattern.advice}"
        )
    return pattern._bind(lengths)


@dataclass(frozen=True, repr=False)
class Combination(Pattern):
    """Two patterns combined by ``|``, ``&`` or ``-``."""

    operator: str
    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        """Raise ValueError at nesting depths that would exceed Python's recursion limit."""
        depth = 1 + max(self.left.depth, self.right.depth)
        if depth > _DEEPEST:
            raise ValueError(
                f"patterns must be combined at most {_DEEPEST} levels deep, got {depth}: build one "
                "from_mask"
            )
        object.__setattr__(self, "depth", depth)

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """Whether either pattern depends on the lengths."""
        return self.left.depends_on_length or self.right.depends_on_length

    @property
    def default_lengths(self) -> tuple[int, int] | None:  # type: ignore[override]
        """Default lengths of either pattern, preferably ones that both support."""
        sides = self.left.default_lengths, self.right.default_lengths
        candidates = [lengths for lengths in sides if lengths]
        return next(filter(self.suits, candidates), candidates[0] if candidates else None)

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether both patterns support these lengths."""
        return self.left.suits(lengths) and self.right.suits(lengths)

    def offsets(self, lengths: Lengths) -> set[int]:
        """Return the offsets of both patterns."""
        return self.left.offsets(lengths) | self.right.offsets(lengths)

    def _bind(self, lengths: Lengths) -> BoundPattern:
        """Combine both sides for these lengths: as pieces, or as blocks if their steps differ."""
        left, right = self.left.bind(*lengths), self.right.bind(*lengths)
        one, other = self.left.offsets(lengths), self.right.offsets(lengths)
        if one and other and one != other:
            raise ValueError(
                f"{self!r} must not mix positions: documents with cu_seqlens_kv count them from "
                "the end of each document, the other side from the end of the sequence; combine "
                "such documents with causal() or from_mask(mask)"
            )
        combined = _OPERATIONS[self.operator]
        try:
            return combined(left, right)
        except UnequalStepsError:  # no pieces of one step represent the result
            return combined(left, in_blocks(right))

    def __repr__(self) -> str:
        sides = (
            f"({side!r})" if isinstance(side, Combination) else repr(side)
            for side in (self.left, self.right)
        )
        return f" {self.operator} ".join(sides)


@dataclass(frozen=True, repr=False)
class PerHead(Pattern):
    """One pattern per batch element and head; :attr:`heads` gives the numbers of both."""

    patterns: tuple[tuple[Pattern, ...], ...]
    """``patterns[batch][head]``; a single row or column applies to all."""

    @property
    def heads(self) -> tuple[int, int]:  # type: ignore[override]
        """Numbers of batch elements and of heads."""
        return len(self.patterns), len(self.patterns[0]) if self.patterns else 1

    def head(self, batch: int, head: int) -> Pattern:
        """Return the pattern of one head; an index is ignored where all share one pattern."""
        batches, heads = self.heads
        return self.patterns[batch if batches > 1 else 0][head if heads > 1 else 0]

    def _bind(self, lengths: Lengths) -> BoundPattern:
        raise ValueError(
            f"{self!r} differs by head: bind the pattern of one head, .head(batch, head)"
        )

    def to_mask(self, seqlen_q: int, seqlen_kv: int | None = None) -> Any:
        """Return a boolean array ``[batch, heads, seqlen_q, seqlen_kv]`` with :attr:`heads`."""
        masks = [[pattern.to_mask(seqlen_q, seqlen_kv) for pattern in row] for row in self.patterns]
        return np.array(masks)

    def __repr__(self) -> str:
        batches, heads = self.heads
        digest = content_digest(repr(self.patterns).encode())
        first = f"the first {self.patterns[0][0]!r}" if self.patterns else "of an empty batch"
        return f"<{batches} x {heads} patterns, {first}, {digest}>"


@uncompiled
def per_head(patterns: Sequence[Sequence[Pattern]]) -> Pattern:
    """Return a pattern that differs between heads.

    Args:
        patterns: ``patterns[batch][head]``; a single row or column applies to all. No rows are
            those of an empty batch.

    Raises:
        TypeError: An element is not a pattern, or differs between heads itself.
        ValueError: A row has no pattern, or the rows differ in length.
    """
    patterns = tuple(patterns)
    if any(isinstance(row, Pattern) for row in patterns):
        raise TypeError(f"patterns must be rows of patterns of one head, got {patterns!r}")
    rows = tuple(map(tuple, patterns))
    for element in chain(*rows):
        if not isinstance(element, Pattern) or isinstance(element, PerHead):
            raise TypeError(f"patterns must be rows of patterns of one head, got {element!r}")
    if len(lengths := {*map(len, rows)}) > 1 or 0 in lengths:
        raise ValueError(f"patterns must be rows of one length, at least 1, got {patterns!r}")
    return rows[0][0] if len(rows) == 1 and lengths == {1} else PerHead(rows)


def content_digest(content: bytes) -> str:
    """Return a short hexadecimal digest that identifies array contents in a ``repr``."""
    return blake2b(content, digest_size=6).hexdigest()


@dataclass(frozen=True, eq=False, repr=False)
class InGraph(Pattern):
    """A pattern that is made for a graph of ``torch.compile``: once, or by an operator in each run.

    After a graph break it may be used like the pattern that is made.
    """

    make: Callable[..., Pattern]
    """Function that makes the pattern outside of graphs."""
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Keyword arguments."""

    @cached_property
    @uncompiled
    def made(self) -> Pattern:
        """The pattern that is made."""
        make = getattr(self.make, "__wrapped__", self.make)  # what would be replaced in a graph
        pattern: Pattern = make(*self.arguments, **self.options)
        return pattern.made

    @property
    def heads(self) -> tuple[int, int]:  # type: ignore[override]
        """Numbers of batch elements and of heads."""
        return self.made.heads

    def head(self, batch: int, head: int) -> Pattern:
        """Return the pattern of one head."""
        return self.made.head(batch, head)

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return self.made.bind(*lengths)

    def _at_positions(self, length: int) -> BoundPattern:
        return self.made._at_positions(length)

    def __eq__(self, other: object) -> bool:
        return self.made == other

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return repr(self.made)


MAKERS: dict[str, Callable[..., Pattern]] = {}
"""The functions that an operator of a graph may call to make a pattern, by module and name."""


def named_in_graphs(make: _Maker) -> _Maker:
    """Let the operator of a graph call a function; graphs in files can name no other."""
    MAKERS[f"{make.__module__}:{make.__name__}"] = make
    return make


def made_in_graphs(make: _Maker) -> _Maker:
    """Make calls of a function in compiled functions return an :class:`InGraph`."""

    def in_graph(*args: Any, **kwargs: Any) -> Pattern:
        return InGraph(decorated, args, kwargs)

    decorated: Any = replaced_in_graphs(in_graph, lambda: 0)(make)
    made: _Maker = named_in_graphs(decorated)
    return made


@made_in_graphs
def combine(operator: str, left: Pattern, right: Pattern) -> Pattern:
    """Combine two patterns head by head; a pattern shared by all heads is repeated."""
    left, right = left.made, right.made
    numbers = [sorted({a, b} - {1}) or [1] for a, b in zip(left.heads, right.heads, strict=True)]
    if max(map(len, numbers)) > 1:
        raise ValueError(
            f"heads of {left!r} {operator} {right!r} must be equal or 1, got {left.heads} and "
            f"{right.heads}"
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
