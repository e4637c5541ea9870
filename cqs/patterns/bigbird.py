"""BigBird: a window, global and random blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cqs.arguments import as_integer
from cqs.patterns import algebra
from cqs.patterns.arrays import adjacent_runs
from cqs.patterns.block_list import Integers, check_num_blocks
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern, made_in_graphs
from cqs.patterns.piece import Axis, Piece

Words = NDArray[np.uint64]


@made_in_graphs
def bigbird(
    *,
    block: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> Pattern:
    """Return the BigBird pattern: a window, global blocks and random blocks.

    The pattern (Zaheer et al., arXiv 2007.14062) is non-causal. A block of queries sees its own
    block, ``window_blocks // 2`` blocks on either side, the global blocks, and up to
    ``random_blocks`` distinct others. Queries of global blocks see every key.

    Random blocks come from a counter-based generator: they are the same on every machine, and
    depend on ``seed`` and the sequence lengths.

    Args:
        block: Tokens per block, at least 1; blocks are counted from the first key.
        window_blocks: Number of blocks in the window, including the query's own.
        global_blocks: Number of global blocks, at the start of the sequence.
        random_blocks: Number of random blocks for each block of queries.
        seed: Random seed, from 0 to 2**63 - 1.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is out of range.
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
        queries, keys = lengths.queries(self.block), lengths.keys(self.block)
        side = self.window_blocks // 2 if self.window_blocks else -1
        columns = Piece(queries, keys.within_cells(0, self.global_blocks))
        rows = Piece(queries.within_cells(0, self.global_blocks), keys)
        pieces: list[Piece] = []
        for piece in (Piece(queries, keys, -side, side), columns, rows):
            pieces = algebra.unite(pieces, algebra.tidy_all([piece]))
        runs = self._random_runs(queries, keys, side)
        return BoundPattern(*lengths, (*pieces, *algebra.tidy_all(runs)))

    def _random_runs(self, queries: Axis, keys: Axis, side: int) -> Iterator[Piece]:
        """Yield runs of random blocks outside the global columns and the window of each row."""
        if not (queries.tokens and keys.tokens):
            return
        first_row, last_row = queries.cells()
        num_columns = keys.cells()[1] + 1
        most = min(self.random_blocks, num_columns)
        # Each draw is compared with all earlier draws of its row, hence the quadratic term.
        check_num_blocks((last_row + 1 - first_row) * max(most, 1, most * most // 256))
        rows = np.arange(max(first_row, self.global_blocks), last_row + 1)
        start = np.maximum(rows - side, self.global_blocks)
        stop = np.maximum(np.minimum(rows + side + 1, num_columns), start)
        choices = np.maximum(num_columns - self.global_blocks - (stop - start), 0)
        drawn = _draw(rows, choices, self.random_blocks, self.seed)
        columns = self.global_blocks + drawn
        columns += np.where(columns >= start, stop - start, 0)
        width = num_columns + 1  # the ids of two rows are not adjacent
        for first, last in adjacent_runs(np.sort((rows * width + columns)[drawn >= 0])):
            row, column = divmod(first, width)
            cells = keys.within_cells(column, last - row * width + 1)
            yield Piece(queries.within_cells(row, row + 1), cells)

    def __repr__(self) -> str:
        return f"bigbird({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


def _draw(rows: Integers, choices: Integers, number: int, seed: int) -> Integers:
    """Draw ``number`` distinct integers below ``choices`` for every row.

    Floyd's algorithm: the n-th draw is uniform up to a bound that grows by one, and is replaced by
    the bound if it was drawn before (Bentley and Floyd, Communications of the ACM 30, 1987).

    Returns:
        int64 array ``[min(number, max(choices)), len(rows)]``; -1 where no integer is left.
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
    """Return the output of SplitMix64 for a state (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
