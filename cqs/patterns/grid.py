"""Grids that cut the score matrix into square blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
"""An array of int64."""

MAX_BLOCKS = 2**24
"""Largest number of blocks of a list: 0.1 GB for each array with an entry per block."""


def check_num_blocks(number: int) -> None:
    """Raise ValueError if ``number`` exceeds ``MAX_BLOCKS``."""
    if number > MAX_BLOCKS:
        raise ValueError(
            f"a pattern must list at most {MAX_BLOCKS} blocks, got {number}: take larger blocks or "
            "a shorter sequence"
        )


@dataclass(frozen=True)
class Grid:
    """The score matrix cut into square blocks."""

    seqlen_q: int
    """Number of queries."""
    seqlen_kv: int
    """Number of keys."""
    block: int = 128
    """Queries and keys of a block."""
    origin: int = 0
    """First query of the first row of blocks, more than ``-block`` and at most 0."""

    @property
    def num_rows(self) -> int:
        """Number of blocks of queries; the first and the last may be ragged."""
        return -(-(self.seqlen_q - self.origin) // self.block) if self.seqlen_q else 0

    @property
    def num_columns(self) -> int:
        """Number of blocks of keys; the last may be ragged."""
        return -(-self.seqlen_kv // self.block)

    def row_queries(self, row: int) -> range:
        """Return the queries of one row of blocks."""
        start = self.origin + row * self.block
        return range(max(start, 0), min(start + self.block, self.seqlen_q))

    def column_keys(self, column: int) -> range:
        """Return the keys of one column of blocks."""
        return range(column * self.block, min((column + 1) * self.block, self.seqlen_kv))

    def corner(self, block: int) -> tuple[int, int]:
        """Return the first query, which may be negative, and the first key of a block."""
        row, column = divmod(block, self.num_columns)
        return self.origin + row * self.block, column * self.block

    def spans(self, ids: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Return first query, last + 1, first key, last + 1 of blocks, ``[num_blocks]`` each."""
        rows, columns = ids // self.num_columns, ids % self.num_columns
        start, key_start = self.origin + rows * self.block, columns * self.block
        return (
            np.maximum(start, 0),
            np.minimum(start + self.block, self.seqlen_q),
            key_start,
            np.minimum(key_start + self.block, self.seqlen_kv),
        )

    def areas(self, ids: Integers) -> Integers:
        """Return the number of pairs of each block within the score matrix, ``[num_blocks]``."""
        start, stop, key_start, key_stop = self.spans(ids)
        area: Integers = (stop - start) * (key_stop - key_start)
        return area

    def full_bits(self, ids: Integers) -> NDArray[np.uint8]:
        """Return the bits of full blocks: set inside the score matrix."""
        start, stop, key_start, key_stop = (edge[:, None] for edge in self.spans(ids))
        offsets = np.arange(self.block)
        queries = (ids // max(self.num_columns, 1))[:, None] * self.block + self.origin + offsets
        keys = key_start + offsets
        live_q, live_k = (start <= queries) & (queries < stop), keys < key_stop
        return np.packbits(live_q[:, :, None] & live_k[:, None, :], axis=-1)
