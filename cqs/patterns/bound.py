"""Patterns at given lengths, which the scheduler counts and the kernels compute."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.arguments import to_integer
from cqs.patterns import algebra
from cqs.patterns.block_list import BLOCK, BlockList, Integers, check_num_blocks, no_bits
from cqs.patterns.piece import Piece, tidy
from cqs.patterns.views import View, union_mask, views
from cqs.uncompiled import uncompiled

_FEW_PIECES = 16
"""Up to this number all pieces are counted; beyond, those near a rectangle are selected first."""


@dataclass(frozen=True)
class BoundPattern:
    """The live pairs of ``seqlen_q`` queries and ``seqlen_kv`` keys, as disjoint parts."""

    seqlen_q: int
    seqlen_kv: int
    pieces: tuple[Piece, ...]
    """Tidy pieces without a common pair."""
    blocks: BlockList | None = None
    """Irregular pairs that are in no piece, or ``None``."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, kept because there may be thousands of pieces; equal in every process."""
        return hash((self.seqlen_q, self.seqlen_kv, self.pieces))

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.seqlen_q, self.seqlen_kv

    @uncompiled
    def count(self, queries: range, keys: range) -> int:
        """Return the exact number of live pairs within a rectangle.

        Takes constant time per piece and, for a block list, time linear in its blocks in these
        rows.

        Args:
            queries: Query indices, a range of step 1; indices outside the sequence add nothing.
            keys: Key indices, a range of step 1; indices outside the sequence add nothing.
        """
        queries, keys = check_tokens("queries", queries), check_tokens("keys", keys)
        total = sum(piece.count_pairs(queries, keys) for piece in self._near(queries, keys))
        return total if self.blocks is None else total + self.blocks.count_pairs(queries, keys)

    def _near(self, queries: range, keys: range) -> Iterable[Piece]:
        """Return the pieces that may have pairs in a rectangle."""
        if len(self.pieces) <= _FEW_PIECES:
            return self.pieces
        start, stop, key_start, key_stop = self._edges
        near = (start < queries.stop) & (queries.start < stop)
        near &= (key_start < keys.stop) & (keys.start < key_stop)
        return (self.pieces[index] for index in np.flatnonzero(near).tolist())

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """First query, last + 1, first key, last + 1 of every piece ``[4, num_pieces]``."""
        axes = [(piece.queries.tokens, piece.keys.tokens) for piece in self.pieces]
        edges = np.array([(q.start, q.stop, k.start, k.stop) for q, k in axes])
        return np.ascontiguousarray(edges.T)

    @property
    def num_pairs(self) -> int:
        """Number of live pairs."""
        return self.count(range(self.seqlen_q), range(self.seqlen_kv))

    @property
    def density(self) -> float:
        """Fraction of live pairs, from 0 to 1; 0 if there are no pairs."""
        return self.num_pairs / max(self.seqlen_q * self.seqlen_kv, 1)

    def allows(self, query: int, key: int) -> bool:
        """Return whether query ``query`` sees key ``key``; False outside the sequence."""
        query = to_integer(query, "query must be an integer")
        key = to_integer(key, "key must be an integer")
        return self.count(range(query, query + 1), range(key, key + 1)) == 1

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield the live pairs within a rectangle as affine views without a common pair.

        Args:
            queries: Query indices within the sequence, a range of step 1.
            keys: Key indices within the sequence, a range of step 1.
        """
        for piece in self._near(queries, keys):
            clipped = tidy(piece.within(queries, keys)) if piece.meets(queries, keys) else None
            if clipped is not None:
                yield from views(clipped)
        if self.blocks is not None:
            yield from self.blocks.views(queries, keys)

    @uncompiled
    def to_mask(self, queries: range | None = None, keys: range | None = None) -> NDArray[np.bool_]:
        """Return a boolean array ``[len(queries), len(keys)]``, True where a query sees a key.

        Args:
            queries: Query indices within the sequence, a range of step 1; ``None`` means all.
            keys: Key indices within the sequence, a range of step 1; ``None`` means all.
        """
        queries = range(self.seqlen_q) if queries is None else queries
        keys = range(self.seqlen_kv) if keys is None else keys
        return union_mask(self.views(queries, keys), queries, keys)


def check_tokens(name: str, tokens: Any) -> range:
    """Return ``tokens``, or raise TypeError or ValueError unless it is a range of step 1."""
    if not isinstance(tokens, range):
        raise TypeError(f"{name} must be a range, got {tokens!r}")
    if tokens.step != 1:
        raise ValueError(f"{name} must be a range of step 1, got {tokens}")
    return tokens


def unite(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs in either pattern."""
    pieces = tuple(algebra.unite(one.pieces, other.pieces))
    if one.blocks is None and other.blocks is None:
        return BoundPattern(*one.lengths, pieces)
    either = _list(one) | _list(other)
    united = BoundPattern(*one.lengths, pieces)
    return replace(united, blocks=either - _as_blocks(united, either.ids))


def intersect(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs in both patterns."""
    pieces = tuple(algebra.intersect(one.pieces, other.pieces))
    if one.blocks is None and other.blocks is None:
        return BoundPattern(*one.lengths, pieces)
    first, second = _list(one), _list(other)
    both = first & second
    both |= first & _as_blocks(other, first.ids)
    both |= second & _as_blocks(one, second.ids)
    return BoundPattern(*one.lengths, pieces, both)


def subtract(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs of the first pattern that are not in the second.

    If the second has blocks, the remaining pieces of the first are converted to blocks.
    """
    pieces = tuple(algebra.subtract(one.pieces, other.pieces))
    if one.blocks is None and other.blocks is None:
        return BoundPattern(*one.lengths, pieces)
    first, second = _list(one), _list(other)
    kept = BoundPattern(*one.lengths, pieces, first - _as_blocks(other, first.ids))
    if not len(second.ids):
        return kept
    listed = in_blocks(kept)
    return replace(listed, blocks=_list(listed) - second)


def in_blocks(bound: BoundPattern) -> BoundPattern:
    """Return the pattern without pieces: all of its pairs in the list of blocks.

    Raises:
        ValueError: There are more than 4,194,304 blocks.
    """
    blocks = _list(bound)
    ids = np.arange(blocks.num_rows * blocks.num_columns)
    return BoundPattern(*bound.lengths, (), blocks | _as_blocks(bound, ids))


def _list(bound: BoundPattern) -> BlockList:
    """Return the blocks of a pattern, none if it consists of pieces alone."""
    return bound.blocks or BlockList.empty(*bound.lengths)


def _as_blocks(bound: BoundPattern, ids: Integers) -> BlockList:
    """Return the pairs that the pieces of a pattern have in given blocks.

    Takes one count for every block, and a mask for every partial block.

    Args:
        bound: The pattern, whose own blocks are ignored.
        ids: Ids of the blocks, ascending.
    """
    check_num_blocks(4 * len(ids))  # counted one by one: slower
    listed, pieces = BlockList.empty(*bound.lengths), BoundPattern(*bound.lengths, bound.pieces)
    edges = np.stack(listed.spans(ids), axis=1)
    counts, num_counts = np.zeros(len(ids), dtype=np.int64), 0
    for i, (q, q_stop, k, k_stop) in enumerate(edges.tolist()):
        box = range(q, q_stop), range(k, k_stop)
        near = list(pieces._near(*box))
        check_num_blocks(4 * (num_counts := num_counts + len(near)))
        counts[i] = sum(piece.count_pairs(*box) for piece in near)
    is_full = counts == listed.areas(ids)
    partial = np.flatnonzero((counts > 0) & ~is_full)
    bits = no_bits(len(partial))
    for i, (q, q_stop, k, k_stop) in enumerate(edges[partial].tolist()):
        mask = np.zeros((BLOCK, BLOCK), dtype=bool)
        mask[: q_stop - q, : k_stop - k] = pieces.to_mask(range(q, q_stop), range(k, k_stop))
        bits[i] = np.packbits(mask, axis=-1)
    return listed.with_bits(ids[partial], bits, ids[is_full])
