"""BigBird: a window, global tokens and random keys, all in blocks."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cqs.patterns import algebra
from cqs.patterns.block_list import BlockList
from cqs.patterns.bound import BoundPattern
from cqs.patterns.grid import Grid, Integers, check_num_blocks
from cqs.patterns.pattern import Lengths, Pattern
from cqs.patterns.piece import FAR, Piece
from cqs.scheduler.arguments import as_integer

Words = NDArray[np.uint64]


def bigbird(
    *,
    block: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> Pattern:
    """Blocks near the diagonal, blocks that see and are seen by all, and random ones.

    The pattern of BigBird (Zaheer et al., arXiv 2007.14062). A block of queries sees the
    ``window_blocks // 2`` blocks on either side of its own and the first ``global_blocks``, whose
    queries see everything, and ``random_blocks`` others, all different, or as many as are left.
    Not causal.

    Random blocks are drawn by counting: number n of row r is a function of ``seed``, r and n and of
    how many blocks there are to draw from. So they are the same on every machine, and depend on the
    length. They are listed, one entry each; all else is four pieces.

    Args:
        block: Tokens of a block; blocks are counted from the first key.
        window_blocks: Blocks of the window, the query's own among them.
        global_blocks: Global blocks, at the beginning.
        random_blocks: Random blocks of each row of blocks.
        seed: From 0 to 2**63 - 1.
    """
    return _BigBird(
        as_integer("block", block, 1),
        as_integer("window_blocks", window_blocks, 0),
        as_integer("global_blocks", global_blocks, 0),
        as_integer("random_blocks", random_blocks, 0),
        as_integer("seed", seed, 0),
    )


@dataclass(frozen=True, repr=False)
class _BigBird(Pattern):
    block: int
    window_blocks: int
    global_blocks: int
    random_blocks: int
    seed: int

    depends_on_length: ClassVar[bool] = True

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(step=self.block), lengths.keys(step=self.block)
        side = self.window_blocks // 2 if self.window_blocks else -1
        first_columns = keys.within_cells(0, self.global_blocks - 1)
        first_rows = queries.within_cells(0, self.global_blocks - 1)
        wholly = algebra.unite(
            algebra.tidy_all([Piece(queries, keys, -side, side)]),
            algebra.tidy_all([Piece(queries, first_columns)]),
        )
        pieces = algebra.unite(wholly, algebra.tidy_all([Piece(first_rows, keys, -FAR, FAR)]))
        return BoundPattern(*lengths, tuple(pieces), self._random_blocks(lengths, side))

    def _random_blocks(self, lengths: Lengths, side: int) -> BlockList:
        """Draw from the columns that are neither global nor in the window of their row."""
        shift = lengths.seqlen_kv - lengths.seqlen_q
        grid = Grid(*lengths, self.block, -(shift % self.block))
        first_row = (grid.origin + shift) // self.block
        most = min(self.random_blocks, grid.num_columns)
        # Drawing compares each number with those drawn before it in its row.
        check_num_blocks(grid.num_rows * max(most, 1, most * most // 256))
        rows = np.arange(max(first_row, self.global_blocks), first_row + grid.num_rows)
        start = np.maximum(rows - side, self.global_blocks)
        stop = np.maximum(np.minimum(rows + side + 1, grid.num_columns), start)
        choices = np.maximum(grid.num_columns - self.global_blocks - (stop - start), 0)
        drawn = _draw(rows, choices, self.random_blocks, self.seed)
        columns = self.global_blocks + drawn
        columns += np.where(columns >= start, stop - start, 0)
        ids = (rows - first_row) * grid.num_columns + columns
        return BlockList.full(grid, np.sort(ids[drawn >= 0]))

    def __repr__(self) -> str:
        return (
            f"bigbird(block={self.block}, window_blocks={self.window_blocks}, "
            f"global_blocks={self.global_blocks}, random_blocks={self.random_blocks}, "
            f"seed={self.seed})"
        )


def _draw(rows: Integers, choices: Integers, number: int, seed: int) -> Integers:
    """Draw ``number`` different integers below ``choices`` for every row, -1 where none are left.

    Floyd's method: the n-th is uniform up to a bound that grows by one, and becomes the bound if it
    was drawn before (Bentley and Floyd, Communications of the ACM 30, 1987).

    Returns:
        ``[min(number, largest of choices), len(rows)]``
    """
    most = min(number, int(choices.max(initial=0)))
    drawn = np.full((most, len(rows)), -1)
    key = _mix(np.full(1, seed, np.uint64))
    for place, n in enumerate(range(number - most, number)):
        bound = choices - number + n
        counter = rows.astype(np.uint64) * np.uint64(number) + np.uint64(n)
        word = _mix(key + counter)
        value = (word % np.maximum(bound + 1, 1).astype(np.uint64)).astype(np.int64)
        value = np.where((drawn[:place] == value).any(axis=0), bound, value)
        drawn[place] = np.where(bound >= 0, value, -1)
    return drawn


def _mix(state: Words) -> Words:
    """Return word ``state`` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
