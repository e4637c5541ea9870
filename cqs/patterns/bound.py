"""Patterns at given lengths, which the scheduler counts and the kernels compute."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.arguments import to_integer
from cqs.patterns import algebra
from cqs.patterns.block_list import BlockList, empty_list
from cqs.patterns.grid import Grid
from cqs.patterns.piece import Piece, tidy
from cqs.patterns.views import View, views
from cqs.ranges import meets
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
        return np.array([(q.start, q.stop, k.start, k.stop) for q, k in axes]).T

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
        blocks = () if self.blocks is None else (self.blocks,)
        return any(part.allows(query, key) for part in (*self.pieces, *blocks))

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield the live pairs within a rectangle as affine views without a common pair.

        Args:
            queries: Query indices within the sequence, a range of step 1.
            keys: Key indices within the sequence, a range of step 1.
        """
        for piece in self.pieces:
            clipped = tidy(piece.within(queries, keys)) if piece.meets(queries, keys) else None
            if clipped is not None:
                yield from views(clipped)
        if self.blocks is not None:
            yield from self.blocks.views(queries, keys)

    def transposed(self) -> "BoundPattern":
        """Return the pattern with queries and keys exchanged, for key and value gradients."""
        pieces = tuple(piece.transposed() for piece in self.pieces)
        blocks = None if self.blocks is None else self.blocks.transposed()
        return BoundPattern(self.seqlen_kv, self.seqlen_q, pieces, blocks)

    @uncompiled
    def to_mask(self, queries: range | None = None) -> NDArray[np.bool_]:
        """Return a boolean array ``[len(queries), seqlen_kv]``, True where a query sees a key."""
        queries = range(self.seqlen_q) if queries is None else queries
        rows, columns = np.arange(queries.start, queries.stop)[:, None], np.arange(self.seqlen_kv)
        mask = np.zeros((len(queries), self.seqlen_kv), dtype=bool)
        for piece in self.pieces:
            if meets(queries, piece.queries.tokens):
                mask |= piece.allows(rows, columns)
        if self.blocks is not None:
            mask |= self.blocks.to_mask(queries)
        return mask


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
    lists = _on_one_grid(one, other)
    if lists is None:
        return replace(one, pieces=pieces)
    either = lists[0].combine(lists[1], np.bitwise_or)
    return replace(one, pieces=pieces, blocks=_without(either, pieces))


def intersect(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs in both patterns."""
    pieces = tuple(algebra.intersect(one.pieces, other.pieces))
    lists = _on_one_grid(one, other)
    if lists is None:
        return replace(one, pieces=pieces)
    first, second = lists
    both = first.combine(second, np.bitwise_and)
    for blocks, others in ((first, other), (second, one)):
        inside = blocks.combine(_as_blocks(others.pieces, blocks), np.bitwise_and)
        both = both.combine(inside, np.bitwise_or)
    return replace(one, pieces=pieces, blocks=both)


def subtract(one: BoundPattern, other: BoundPattern) -> BoundPattern:
    """Return the pairs of the first pattern that are not in the second.

    If the second has blocks, the remaining pieces of the first are converted to blocks.
    """
    pieces = tuple(algebra.subtract(one.pieces, other.pieces))
    lists = _on_one_grid(one, other)
    if lists is None:
        return replace(one, pieces=pieces)
    kept, removed = _without(lists[0], other.pieces), lists[1]
    if len(removed.ids):
        kept = kept.combine(BlockList.from_pieces(kept.grid, pieces), np.bitwise_or)
        kept = kept.combine(removed, np.bitwise_and, invert=True)
        pieces = ()
    return replace(one, pieces=pieces, blocks=kept)


def _on_one_grid(one: BoundPattern, other: BoundPattern) -> tuple[BlockList, BlockList] | None:
    """Return the block lists of two patterns on a common grid, or ``None`` if neither has one.

    Lists of different grids, or of blocks above the default size, are converted to the default
    grid.
    """
    grids = {each.blocks.grid for each in (one, other) if each.blocks is not None}
    if not grids:
        return None
    usual = Grid(one.seqlen_q, one.seqlen_kv)
    grid = grids.pop() if len(grids) == 1 else usual
    grid = usual if grid.block > usual.block else grid
    first, second = (
        empty_list(grid) if each.blocks is None else each.blocks.on(grid) for each in (one, other)
    )
    return first, second


def _as_blocks(pieces: tuple[Piece, ...], where: BlockList) -> BlockList:
    """Return the pairs of pieces within the blocks of a list."""
    return BlockList.from_pieces(where.grid, pieces, where.ids)


def _without(blocks: BlockList, pieces: tuple[Piece, ...]) -> BlockList:
    return blocks.combine(_as_blocks(pieces, blocks), np.bitwise_and, invert=True)
