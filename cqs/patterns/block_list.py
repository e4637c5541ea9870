"""Irregular masks as lists of live blocks, with one bit per pair of partial blocks."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.views import View
from cqs.ranges import overlap

Integers = NDArray[np.int64]
"""An array of int64."""

BLOCK = 128
"""Queries and keys of a block: those of a kernel's tile."""
MAX_BLOCKS = 2**24
"""Largest number of blocks of a list: 0.1 GB for each array with an entry per block."""
_MAX_BYTES = 2**32
"""Largest number of bytes for the bits of all partial blocks."""
_BITS_SET = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)
"""Number of set bits of every byte, because ``np.bitwise_count`` requires NumPy 2."""


def check_num_blocks(number: int) -> None:
    """Raise ValueError if ``number`` exceeds ``MAX_BLOCKS``."""
    if number > MAX_BLOCKS:
        raise ValueError(
            f"a pattern must list at most {MAX_BLOCKS} blocks, got {number}: take larger blocks or "
            "a shorter sequence"
        )


@dataclass(frozen=True, eq=False)
class BlockList:
    """The live blocks of the score matrix, and one bit per pair of every partial block.

    Blocks have 128 queries and keys, fewer at the ends. The contents are those of FlexAttention's
    ``BlockMask`` without its mask function. Two lists compare equal if their lengths and live pairs
    are equal.
    """

    seqlen_q: int
    """Number of queries."""
    seqlen_kv: int
    """Number of keys."""
    ids: Integers
    """Ids of the live blocks, ``row * num_columns + column``, ascending, ``[num_blocks]``."""
    bit_index: Integers
    """Index of each block in ``bits``, -1 for a full block, ``[num_blocks]``."""
    bits: NDArray[np.uint8]
    """Masks of the partial blocks, ``[num_partial, 128, 16]``: one bit per key, high bits first as
    in ``np.packbits``, 0 outside the score matrix. No block is empty or full."""

    @classmethod
    def empty(cls, seqlen_q: int, seqlen_kv: int) -> "BlockList":
        """Return the list without blocks."""
        none = np.zeros(0, dtype=np.int64)
        return cls(seqlen_q, seqlen_kv, none, none, no_bits(0))

    @classmethod
    def from_strips(
        cls,
        seqlen_q: int,
        seqlen_kv: int,
        strip: Callable[[range], NDArray[np.bool_]],
        width: int = 1,
    ) -> "BlockList":
        """Return the list of a mask that is computed one row of blocks at a time.

        Args:
            seqlen_q: Number of queries.
            seqlen_kv: Number of keys.
            strip: Returns the mask of a range of queries, boolean ``[len(queries), columns]``.
            width: Adjacent keys that share a column of the mask.
        """
        whole = cls.empty(seqlen_q, seqlen_kv)
        check_num_blocks(max(whole.num_rows * whole.num_columns, 2 * seqlen_kv) // 16)
        columns = np.arange(whole.num_columns * BLOCK) // width
        columns[seqlen_kv:] = num_in_strip = -(-seqlen_kv // width)
        # First column, last + 1 of every block; np.ufunc.reduceat reduces between them.
        last = np.minimum(np.arange(BLOCK, BLOCK + len(columns), BLOCK), seqlen_kv) - 1
        edges = np.stack((columns[::BLOCK], last // width + 1), axis=1).ravel()
        tiles = columns.reshape(-1, BLOCK)
        ids, full, bits = [whole.ids], [whole.ids], [whole.bits]
        for row in range(whole.num_rows if seqlen_kv else 0):
            queries = whole.row_queries(row)
            mask = np.zeros((BLOCK, num_in_strip + 1), dtype=bool)
            mask[: len(queries), :-1] = strip(queries)
            some = np.logical_or.reduceat(mask.any(axis=0), edges)[::2]
            every = np.logical_and.reduceat(mask[: len(queries)].all(axis=0), edges)[::2]
            partial = np.flatnonzero(some & ~every)
            full.append(row * whole.num_columns + np.flatnonzero(every))
            ids.append(row * whole.num_columns + partial)
            live = np.take(mask, tiles[partial], axis=1)
            bits.append(np.packbits(live, axis=-1).swapaxes(0, 1))
        return whole.with_bits(np.concatenate(ids), np.concatenate(bits), np.concatenate(full))

    def with_bits(self, ids: Integers, bits: NDArray[np.uint8], full: Integers) -> "BlockList":
        """Return the list, for the same lengths, of blocks with given masks.

        Args:
            ids: Ids of the blocks, ascending, ``[num_blocks]``; empty blocks are removed.
            bits: Masks of the blocks, ``[num_blocks, 128, 16]``, as in :attr:`bits`.
            full: Ids of further blocks, which are full.
        """
        counts = _count_bits(bits)
        live, partial = counts > 0, (counts > 0) & (counts < self.areas(ids))
        index = np.where(partial, np.cumsum(partial) - 1, -1)[live]
        ids = np.append(ids[live], full)
        order = np.argsort(ids)
        index = np.append(index, np.full(len(full), -1))[order]
        return BlockList(self.seqlen_q, self.seqlen_kv, ids[order], index, bits[partial])

    def __post_init__(self) -> None:
        """Make the arrays read-only, because lists are shared and compared by value."""
        for name in ("ids", "bit_index", "bits"):
            array = getattr(self, name).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockList, (self.seqlen_q, self.seqlen_kv, self.ids, self.bit_index, self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockList) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the contents, equal for equal lists in every process, 64 bytes."""
        digest = blake2b(repr((self.seqlen_q, self.seqlen_kv)).encode())
        for array in (self.ids, self.bit_index, self.bits):
            digest.update(array.tobytes())
        return digest.digest()

    @property
    def num_rows(self) -> int:
        """Number of blocks of queries; the last may be ragged."""
        return -(-self.seqlen_q // BLOCK)

    @property
    def num_columns(self) -> int:
        """Number of blocks of keys; the last may be ragged."""
        return -(-self.seqlen_kv // BLOCK)

    def row_queries(self, row: int) -> range:
        """Return the queries of one row of blocks."""
        return range(row * BLOCK, min((row + 1) * BLOCK, self.seqlen_q))

    def spans(self, ids: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Return first query, last + 1, first key, last + 1 of blocks, ``[num_blocks]`` each."""
        rows, columns = np.divmod(ids, max(self.num_columns, 1))
        start, key_start = rows * BLOCK, columns * BLOCK
        stop = np.minimum(start + BLOCK, self.seqlen_q)
        return start, stop, key_start, np.minimum(key_start + BLOCK, self.seqlen_kv)

    def areas(self, ids: Integers) -> Integers:
        """Return the number of pairs of each block within the score matrix, ``[num_blocks]``."""
        start, stop, key_start, key_stop = self.spans(ids)
        area: Integers = (stop - start) * (key_stop - key_start)
        return area

    @cached_property
    def counts(self) -> Integers:
        """Number of live pairs of each block, ``[num_blocks]``."""
        counts = self.areas(self.ids)
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
        edges = np.array(self._rows(queries)) * self.num_columns
        rows = slice(*np.searchsorted(self.ids, edges).tolist())
        start, stop, key_start, key_stop = self.spans(self.ids[rows])
        height = np.minimum(stop, queries.stop) - np.maximum(start, queries.start)
        width = np.minimum(key_stop, keys.stop) - np.maximum(key_start, keys.start)
        areas = np.maximum(height, 0) * np.maximum(width, 0)
        whole = areas == (stop - start) * (key_stop - key_start)
        index = self.bit_index[rows]
        total = int(self.counts[rows][whole].sum()) + int(areas[~whole & (index < 0)].sum())
        cut = ~whole & (index >= 0) & (areas > 0)
        if not cut.any():
            return total
        query, key = (first[cut, None] + np.arange(BLOCK) for first in (start, key_start))
        live = np.unpackbits(self.bits[index[cut]], axis=-1).view(bool)
        live &= ((queries.start <= query) & (query < queries.stop))[:, :, None]
        live &= ((keys.start <= key) & (key < keys.stop))[:, None, :]
        return total + int(live.sum())

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield the live pairs of a rectangle as views: runs of full blocks, single partial blocks.

        Args:
            queries: Query indices, a range of step 1.
            keys: Key indices, a range of step 1.
        """
        for row in range(*self._rows(queries)):
            inside = overlap(queries, self.row_queries(row))
            for tokens, bits in self._key_runs(row) if inside else ():
                common = overlap(tokens, keys)
                if not common:
                    continue
                if bits is None:
                    yield View(inside, common)
                    continue
                first = inside.start % BLOCK
                bits = bits[first : first + len(inside)]
                if common != tokens:
                    first = common.start - tokens.start
                    live = np.unpackbits(bits, axis=-1)[:, first : first + len(common)]
                    bits = np.packbits(live, axis=-1)
                if bits.any():
                    yield View(inside, common, bits=bits)

    def _key_runs(self, row: int) -> Iterator[tuple[range, NDArray[np.uint8] | None]]:
        """Yield the keys of full blocks side by side in a row, and of each partial block.

        Partial blocks come with their bits, before the run of full blocks that precedes them.
        """
        first = row * self.num_columns
        row_blocks = slice(*np.searchsorted(self.ids, (first, first + self.num_columns)))
        columns = (self.ids[row_blocks] - first).tolist()
        run = range(0)
        for column, index in zip(columns, self.bit_index[row_blocks].tolist(), strict=True):
            keys = range(column * BLOCK, min((column + 1) * BLOCK, self.seqlen_kv))
            if index >= 0:
                yield keys, self.bits[index]
            elif keys.start == run.stop and run:
                run = range(run.start, keys.stop)
            else:
                yield run, None
                run = keys
        yield run, None

    def __or__(self, other: "BlockList") -> "BlockList":
        return self._combine(other, np.bitwise_or)

    def __and__(self, other: "BlockList") -> "BlockList":
        return self._combine(other, np.bitwise_and)

    def __sub__(self, other: "BlockList") -> "BlockList":
        return self._combine(other, np.bitwise_and, invert=True)

    def _combine(
        self, other: "BlockList", operation: np.ufunc, *, invert: bool = False
    ) -> "BlockList":
        """Return the list of the live pairs that a bitwise operation of two masks gives.

        Args:
            other: A list for the same lengths.
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
        return self.with_bits(ids[partial], bits, ids[whole])

    def _states(self, ids: Integers) -> tuple[NDArray[np.bool_], Integers]:
        """Return whether each block is live, and its index in ``bits``, -1 without a mask."""
        live, index = np.isin(ids, self.ids, assume_unique=True), np.full(len(ids), -1)
        # Both lists ascend, so their common ids are in one order.
        index[live] = self.bit_index[np.isin(self.ids, ids, assume_unique=True)]
        return live, index

    def _packed(self, ids: Integers) -> NDArray[np.uint8]:
        """Return the masks of blocks with given ids, including full and empty blocks.

        The result is laid out as :attr:`bits`: ``[len(ids), 128, 16]``.
        """
        live, index = self._states(ids)
        bits = no_bits(len(ids))
        start, stop, key_start, key_stop = self.spans(ids[live & (index < 0)])
        offsets = np.arange(BLOCK)
        rows, columns = (offsets < sizes[:, None] for sizes in (stop - start, key_stop - key_start))
        bits[live & (index < 0)] = np.packbits(rows[:, :, None] & columns[:, None], axis=-1)
        bits[index >= 0] = self.bits[index[index >= 0]]
        return bits

    def _rows(self, queries: range) -> tuple[int, int]:
        """Return the first row of blocks with some of ``queries``, and the last + 1."""
        last = min(queries.stop, self.seqlen_q) - 1
        return max(queries.start, 0) // BLOCK, last // BLOCK + 1


def no_bits(number: int) -> NDArray[np.uint8]:
    """Return the masks of empty blocks, ``[number, 128, 16]``; ValueError if there are too many."""
    shape = number, BLOCK, BLOCK // 8
    if (num_bytes := math.prod(shape)) > _MAX_BYTES:
        raise ValueError(
            f"a pattern must keep at most {_MAX_BYTES} bytes of partial blocks, got {num_bytes}: "
            "take a shorter sequence"
        )
    return np.zeros(shape, dtype=np.uint8)


def _count_bits(bits: NDArray[np.uint8]) -> Integers:
    counts: Integers = _BITS_SET[bits].sum(axis=(1, 2), dtype=np.int64)
    return counts
