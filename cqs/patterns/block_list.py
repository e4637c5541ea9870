"""Irregular masks as lists of live blocks, with one bit per pair of partial blocks."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.grid import Grid, Integers, check_num_blocks
from cqs.patterns.piece import Piece, tidy
from cqs.patterns.views import View
from cqs.ranges import overlap

_BITS_SET = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)
"""Number of set bits of every byte, because ``np.bitwise_count`` requires NumPy 2."""

_MAX_BYTES = 2**32
"""Largest number of bytes for the bits of all partial blocks."""


@dataclass(frozen=True, eq=False)
class BlockList:
    """The live blocks of a grid, and one bit per pair of every partial block.

    The contents are those of FlexAttention's ``BlockMask`` without its mask function. Two lists
    compare equal if their grids and live pairs are equal.
    """

    grid: Grid
    ids: Integers
    """Ids of the live blocks, ``row * num_columns + column``, ascending, ``[num_blocks]``."""
    bit_index: Integers
    """Index of each block in ``bits``, -1 for a full block, ``[num_blocks]``."""
    bits: NDArray[np.uint8]
    """Masks of the partial blocks, ``[num_partial, block, ceil(block / 8)]``: one bit per key, high
    bits first as in ``np.packbits``, 0 outside the score matrix. No block is empty or full."""

    @classmethod
    def full(cls, grid: Grid, ids: Integers) -> "BlockList":
        """Return the list of full blocks with the ascending ids ``ids``."""
        return cls(grid, ids, np.full(len(ids), -1), _no_bits(grid))

    @classmethod
    def from_bits(
        cls, grid: Grid, ids: Integers, bits: NDArray[np.uint8], full: Integers | None = None
    ) -> "BlockList":
        """Return the list of blocks with given masks; empty blocks are removed.

        Args:
            grid: The grid of the list.
            ids: Ids of the blocks, ascending, ``[num_blocks]``.
            bits: Masks of the blocks, ``[num_blocks, block, ceil(block / 8)]``, as in :attr:`bits`.
            full: Ids of further blocks, which are full.
        """
        counts = _count_bits(bits)
        live, partial = counts > 0, (counts > 0) & (counts < grid.areas(ids))
        index = np.where(partial, np.cumsum(partial) - 1, -1)[live]
        ids = ids[live]
        if full is not None:
            ids, index = np.append(ids, full), np.append(index, np.full(len(full), -1))
        order = np.argsort(ids)
        return cls(grid, ids[order], index[order], bits[partial])

    @classmethod
    def from_strips(cls, grid: Grid, strip: Callable[[range], NDArray[np.bool_]]) -> "BlockList":
        """Return the list of a mask that is computed one row of blocks at a time.

        Args:
            grid: The grid of the list.
            strip: Returns the mask of a range of queries, boolean ``[len(queries), seqlen_kv]``.
        """
        ids, bits = [np.zeros(0, dtype=np.int64)], [_no_bits(grid)]
        block, columns = grid.block, grid.num_columns
        for row in range(grid.num_rows):
            queries = grid.row_queries(row)
            mask = np.zeros((block, columns * block), dtype=bool)
            first = queries.start - (grid.origin + row * block)
            mask[first : first + len(queries), : grid.seqlen_kv] = strip(queries)
            tiles = mask.reshape(block, columns, block)
            live = np.flatnonzero(tiles.any(axis=(0, 2)))
            ids.append(row * columns + live)
            bits.append(np.packbits(tiles[:, live].transpose(1, 0, 2), axis=-1))
        return cls.from_bits(grid, np.concatenate(ids), np.concatenate(bits))

    @classmethod
    def from_pieces(
        cls, grid: Grid, pieces: Iterable[Piece], ids: Integers | None = None
    ) -> "BlockList":
        """Return the block list of disjoint pieces.

        Takes one count for every block that a piece may touch, and a mask for every partial block.

        Args:
            grid: The grid of the list.
            pieces: Pieces without a common pair.
            ids: Ids of the blocks to which the list is restricted, ascending; ``None`` means all.
        """
        pieces = tuple(pieces)
        ids = _touched_blocks(grid, pieces) if ids is None else ids
        check_num_blocks(4 * len(ids) * max(len(pieces), 1))  # counted one by one: slower
        edges = np.stack(grid.spans(ids), axis=1).tolist()
        boxes = [(range(q, q_stop), range(k, k_stop)) for q, q_stop, k, k_stop in edges]
        counts = np.array(
            [sum(piece.count_pairs(*box) for piece in pieces) for box in boxes], dtype=np.int64
        )
        partial = np.flatnonzero((counts > 0) & (counts < grid.areas(ids)))
        bits = _no_bits(grid, len(partial))
        for i, number in enumerate(partial):
            queries, keys = boxes[number]
            mask = np.zeros((grid.block, grid.block), dtype=bool)
            first = queries.start - grid.origin - int(ids[number]) // grid.num_columns * grid.block
            rows, columns = np.arange(queries.start, queries.stop), np.arange(keys.start, keys.stop)
            for piece in pieces:
                live = piece.allows(rows[:, None], columns)
                mask[first : first + len(queries), : len(keys)] |= live
            bits[i] = np.packbits(mask, axis=-1)
        return cls.from_bits(grid, ids[partial], bits, ids[counts == grid.areas(ids)])

    def __post_init__(self) -> None:
        """Make the arrays read-only, because lists are shared and compared by value."""
        for name in ("ids", "bit_index", "bits"):
            array = getattr(self, name).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockList, (self.grid, self.ids, self.bit_index, self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockList) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the contents, equal for equal lists in every process, 64 bytes."""
        digest = blake2b(repr(self.grid).encode())
        for array in (self.ids, self.bit_index, self.bits):
            digest.update(array.tobytes())
        return digest.digest()

    @cached_property
    def counts(self) -> Integers:
        """Number of live pairs of each block, ``[num_blocks]``."""
        counts = self.grid.areas(self.ids)
        partial = self.bit_index >= 0
        counts[partial] = _count_bits(self.bits)[self.bit_index[partial]]
        counts.flags.writeable = False
        return counts

    def count_pairs(self, queries: range, keys: range) -> int:
        """Return the number of live pairs within a rectangle, in time linear in its rows' blocks.

        Args:
            queries: Query indices, a range of step 1.
            keys: Key indices, a range of step 1.
        """
        rows = self._rows(queries)
        start, stop, key_start, key_stop = self.grid.spans(self.ids[rows])
        height = np.minimum(stop, queries.stop) - np.maximum(start, queries.start)
        width = np.minimum(key_stop, keys.stop) - np.maximum(key_start, keys.start)
        areas = np.maximum(height, 0) * np.maximum(width, 0)
        whole = areas == (stop - start) * (key_stop - key_start)
        index = self.bit_index[rows]
        total = int(self.counts[rows][whole].sum()) + int(areas[~whole & (index < 0)].sum())
        cut = ~whole & (index >= 0) & (areas > 0)
        if not cut.any():
            return total
        offsets = np.arange(self.grid.block)
        row_start = (self.ids[rows] // self.grid.num_columns) * self.grid.block + self.grid.origin
        query = row_start[cut, None] + offsets
        key = key_start[cut, None] + offsets
        live = self.unpack(index[cut])
        live &= ((queries.start <= query) & (query < queries.stop))[:, :, None]
        live &= ((keys.start <= key) & (key < keys.stop))[:, None, :]
        return total + int(live.sum())

    def allows(self, query: int, key: int) -> bool:
        """Return whether a query sees a key."""
        queries, keys = range(query, query + 1), range(key, key + 1)
        return self.count_pairs(queries, keys) == 1

    def unpack(self, index: Any) -> NDArray[np.bool_]:
        """Return the masks of partial blocks, boolean ``[..., block, block]``.

        Args:
            index: An index into ``bits``, an array of indices, or a slice.
        """
        unpacked = np.unpackbits(self.bits[index], axis=-1, count=self.grid.block)
        return unpacked.view(bool)

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield the live pairs of a rectangle as views: runs of full blocks, single partial blocks.

        Args:
            queries: Query indices, a range of step 1.
            keys: Key indices, a range of step 1.
        """
        for row in range(*self._row_range(queries)):
            inside = overlap(queries, self.grid.row_queries(row))
            for tokens, bits in self._key_runs(row) if inside else ():
                found = overlap(tokens, keys)
                if not found:
                    continue
                if bits is None:
                    yield View(inside, found)
                    continue
                first = (inside.start - self.grid.origin) % self.grid.block
                bits = bits[first : first + len(inside)]
                if found != tokens:
                    first = found.start - tokens.start
                    live = np.unpackbits(bits, axis=-1)[:, first : first + len(found)]
                    bits = np.packbits(live, axis=-1)
                if bits.any():
                    yield View(inside, found, bits=bits)

    def _key_runs(self, row: int) -> Iterator[tuple[range, NDArray[np.uint8] | None]]:
        """Yield the keys of full blocks side by side in a row, and of each partial block.

        Partial blocks come with their bits, before the run of full blocks that precedes them.
        """
        first = row * self.grid.num_columns
        found = slice(*np.searchsorted(self.ids, (first, first + self.grid.num_columns)))
        columns = (self.ids[found] - first).tolist()
        run = range(0)
        for column, index in zip(columns, self.bit_index[found].tolist(), strict=True):
            keys = self.grid.column_keys(column)
            if index >= 0:
                yield keys, self.bits[index]
            elif keys.start == run.stop and run:
                run = range(run.start, keys.stop)
            else:
                yield run, None
                run = keys
        yield run, None

    def to_mask(self, queries: range) -> NDArray[np.bool_]:
        """Return the mask of a range of queries, boolean ``[len(queries), seqlen_kv]``."""
        mask = np.zeros((len(queries), self.grid.seqlen_kv), dtype=bool)
        for view in self.views(queries, range(self.grid.seqlen_kv)):
            rows = slice(view.queries.start - queries.start, view.queries.stop - queries.start)
            mask[rows, view.keys.start : view.keys.stop] = view.to_mask()
        return mask

    def on(self, grid: Grid) -> "BlockList":
        """Return the same live pairs on another grid of the same score matrix."""
        if grid == self.grid:
            return self
        blocks, tiles, *box = self._overlaps(grid)
        ids, place = np.unique(tiles, return_inverse=True)
        areas = np.where(self.bit_index[blocks] < 0, (box[1] - box[0]) * (box[3] - box[2]), 0)
        is_full = np.bincount(place, areas, len(ids)) == grid.areas(ids)
        bits, index = _no_bits(grid, int((~is_full).sum())), np.cumsum(~is_full) - 1
        for part in np.flatnonzero(~is_full[place]).tolist():
            row, column = grid.corner(int(tiles[part]))
            first, last, key_first, key_last = (int(edge[part]) for edge in box)
            packed = bits[index[place[part]]]
            live = np.unpackbits(packed, axis=-1, count=grid.block)
            live[first - row : last - row, key_first - column : key_last - column] = self._block(
                int(blocks[part]), range(first, last), range(key_first, key_last)
            )
            packed[:] = np.packbits(live, axis=-1)
        return BlockList.from_bits(grid, ids[~is_full], bits, ids[is_full])

    def _overlaps(self, grid: Grid) -> tuple[Integers, ...]:
        """List the overlaps of these blocks with the blocks of another grid.

        Returns:
            Six arrays ``[num_overlaps]``: index of the block in this list, id of the block in
            ``grid``, and first query, last query + 1, first key, last key + 1 of the overlap.
        """
        start, stop, key_start, key_stop = self.grid.spans(self.ids)
        row, row_stop = (start - grid.origin) // grid.block, -((grid.origin - stop) // grid.block)
        column, column_stop = key_start // grid.block, -(-key_stop // grid.block)
        width = column_stop - column
        number = (row_stop - row) * width
        check_num_blocks(sum(number.tolist()))
        found = np.repeat(np.arange(len(self.ids)), number)
        nth = np.arange(len(found)) - np.repeat(np.cumsum(number) - number, number)
        ids = (row[found] + nth // width[found]) * grid.num_columns
        ids += column[found] + nth % width[found]
        first, last, key_first, key_last = grid.spans(ids)
        return (
            found,
            ids,
            np.maximum(first, start[found]),
            np.minimum(last, stop[found]),
            np.maximum(key_first, key_start[found]),
            np.minimum(key_last, key_stop[found]),
        )

    def _block(self, block: int, queries: range, keys: range) -> Any:
        """Return the mask of a rectangle within the block at an index; True for a full block."""
        if self.bit_index[block] < 0:
            return True
        row, column = self.grid.corner(int(self.ids[block]))
        rows, columns = (
            slice(each.start - corner, each.stop - corner)
            for each, corner in ((queries, row), (keys, column))
        )
        return self.unpack(self.bit_index[block])[rows, columns]

    def transposed(self) -> "BlockList":
        """Return the list with queries and keys exchanged, on a grid with origin 0."""
        grid = Grid(self.grid.seqlen_q, self.grid.seqlen_kv, self.grid.block)
        blocks = self.on(grid)
        ids = blocks.ids % max(grid.num_columns, 1) * grid.num_rows
        ids += blocks.ids // max(grid.num_columns, 1)
        bits = np.packbits(blocks.unpack(slice(None)).swapaxes(1, 2), axis=-1)
        turned, order = Grid(grid.seqlen_kv, grid.seqlen_q, grid.block), np.argsort(ids)
        return BlockList(turned, ids[order], blocks.bit_index[order], bits)

    def combine(
        self, other: "BlockList", operation: np.ufunc, *, invert: bool = False
    ) -> "BlockList":
        """Return the list of the live pairs that a bitwise operation of two masks gives.

        Args:
            other: A list on the same grid.
            operation: ``np.bitwise_and`` or ``np.bitwise_or``.
            invert: Use the complement of ``other``.
        """
        ids = np.union1d(self.ids, other.ids)
        live, index = self._states(ids)
        other_live, other_index = other._states(ids)
        partial = (index >= 0) | (other_index >= 0)
        whole = operation(live, other_live ^ invert) & ~partial
        left, right = self._packed(ids[partial]), other._packed(ids[partial])
        bits = operation(left, ~right if invert else right)
        return BlockList.from_bits(self.grid, ids[partial], bits, ids[whole])

    def _states(self, ids: Integers) -> tuple[NDArray[np.bool_], Integers]:
        """Return whether each block is live, and its index in ``bits``, -1 without a mask."""
        live, index = np.isin(ids, self.ids, assume_unique=True), np.full(len(ids), -1)
        # Both lists ascend, so their common ids are in one order.
        index[live] = self.bit_index[np.isin(self.ids, ids, assume_unique=True)]
        return live, index

    def _packed(self, ids: Integers) -> NDArray[np.uint8]:
        """Return the masks of blocks with given ids, including full and empty blocks.

        The result is laid out as :attr:`bits`: ``[len(ids), block, ceil(block / 8)]``.
        """
        live, index = self._states(ids)
        bits = _no_bits(self.grid, len(ids))
        bits[live & (index < 0)] = self.grid.full_bits(ids[live & (index < 0)])
        bits[index >= 0] = self.bits[index[index >= 0]]
        return bits

    def _row_range(self, queries: range) -> tuple[int, int]:
        grid = self.grid
        first = (max(queries.start, 0) - grid.origin) // grid.block
        last = (min(queries.stop, grid.seqlen_q) - 1 - grid.origin) // grid.block
        return first, last + 1

    def _rows(self, queries: range) -> slice:
        """Return the slice of this list with the blocks in the rows of ``queries``."""
        edges = np.array(self._row_range(queries)) * self.grid.num_columns
        first, last = np.searchsorted(self.ids, edges)
        return slice(int(first), int(last))


def empty_list(grid: Grid) -> BlockList:
    """Return the empty list on a grid."""
    return BlockList.full(grid, np.zeros(0, dtype=np.int64))


def _touched_blocks(grid: Grid, pieces: tuple[Piece, ...]) -> Integers:
    """Return the ids of the blocks from the first to the last key of any piece, ascending."""
    ids: set[int] = set()
    check_num_blocks(16 * grid.num_rows * len(pieces))
    num_touched = 0
    for row in range(grid.num_rows):
        for piece in pieces:
            inside = tidy(piece.within(grid.row_queries(row), piece.keys.tokens))
            if inside is not None:
                keys = inside.keys.tokens
                first = row * grid.num_columns + keys.start // grid.block
                last = row * grid.num_columns + (keys.stop - 1) // grid.block
                num_touched += last + 1 - first
                check_num_blocks(16 * num_touched)  # listed one by one: slower
                ids.update(range(first, last + 1))
    return np.array(sorted(ids), dtype=np.int64)


def _no_bits(grid: Grid, number: int = 0) -> NDArray[np.uint8]:
    shape = number, grid.block, -(-grid.block // 8)
    if (num_bytes := math.prod(shape)) > _MAX_BYTES:
        raise ValueError(
            f"a pattern must keep at most {_MAX_BYTES} bytes of partial blocks, got {num_bytes}: "
            "take a shorter sequence"
        )
    return np.zeros(shape, dtype=np.uint8)


def _count_bits(bits: NDArray[np.uint8]) -> Integers:
    counts: Integers = _BITS_SET[bits].sum(axis=(1, 2), dtype=np.int64)
    return counts
