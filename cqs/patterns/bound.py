"""A pattern at given lengths: what the scheduler counts and the kernels visit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cqs.patterns import algebra
from cqs.patterns.piece import Piece
from cqs.patterns.runs import KeyRun, key_runs
from cqs.scheduler.arguments import to_integer


@dataclass(frozen=True)
class BoundPattern:
    """The pairs of ``seqlen_q`` queries and ``seqlen_kv`` keys that attend, each named once."""

    seqlen_q: int
    seqlen_kv: int
    pieces: tuple[Piece, ...]
    """Tidy, and no two have a pair in common."""

    def count(self, queries: range, keys: range) -> int:
        """Return the number of pairs within a rectangle, exactly.

        Constant time for each piece, whatever its size.

        Args:
            queries: Query indices, of step 1; those outside the sequence count nothing.
            keys: Key indices, likewise.
        """
        queries, keys = check_tokens("queries", queries), check_tokens("keys", keys)
        return sum(piece.count_pairs(queries, keys) for piece in self.pieces)

    @property
    def num_pairs(self) -> int:
        """Number of pairs in all."""
        return self.count(range(self.seqlen_q), range(self.seqlen_kv))

    @property
    def density(self) -> float:
        """Share of all pairs that attend; 0 where there are none."""
        return self.num_pairs / max(self.seqlen_q * self.seqlen_kv, 1)

    def allows(self, query: int, key: int) -> bool:
        """Say whether query ``query`` sees key ``key``; False outside the sequence."""
        query = to_integer(query, "query must be an integer")
        key = to_integer(key, "key must be an integer")
        return any(piece.allows(query, key) for piece in self.pieces)

    def key_runs(self, queries: range) -> Iterator[KeyRun]:
        """List what a tile of queries visits, in runs that have no pair in common.

        Args:
            queries: The tile. A tile of step s visits pieces of step s as one run each; see
                :attr:`pieces` for the steps.
        """
        if queries.step < 1:
            raise ValueError(f"queries must ascend, got {queries}")
        for piece in self.pieces:
            yield from key_runs(piece, queries)

    def to_mask(self, queries: range | None = None) -> Any:
        """Return a boolean array ``[len(queries), seqlen_kv]``, True where a query sees a key."""
        import numpy as np

        queries = range(self.seqlen_q) if queries is None else queries
        rows, columns = np.arange(queries.start, queries.stop)[:, None], np.arange(self.seqlen_kv)
        mask = np.zeros((len(queries), self.seqlen_kv), dtype=bool)
        for piece in self.pieces:
            mask |= piece.allows(rows, columns)
        return mask


def check_tokens(name: str, tokens: Any) -> range:
    """Return a range of step 1 that is not negative in length, or raise TypeError or ValueError."""
    if not isinstance(tokens, range):
        raise TypeError(f"{name} must be a range, got {tokens!r}")
    if tokens.step != 1:
        raise ValueError(f"{name} must be a range of step 1, got {tokens}")
    return tokens


def unite(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs in either pattern."""
    return _with_pieces(one, algebra.unite(one.pieces, other.pieces))


def intersect(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs in both patterns."""
    return _with_pieces(one, algebra.intersect(one.pieces, other.pieces))


def subtract(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs of the first pattern that are not in the second."""
    return _with_pieces(one, algebra.subtract(one.pieces, other.pieces))


def _with_pieces(lengths: BoundPattern, pieces: list[Piece]) -> BoundPattern:
    return BoundPattern(lengths.seqlen_q, lengths.seqlen_kv, tuple(pieces))
