"""Patterns whose rows are arithmetic progressions of keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import and_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.algebra import tidy_all
from cqs.patterns.arrays import as_array
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern, content_digest, made_in_graphs
from cqs.patterns.piece import FAR, Axis, Piece


@made_in_graphs
def acsr(start: Any, step: Any, count: Any) -> Pattern:
    """Return the pattern in which query i sees keys ``start[i] + step[i] * c``, c < ``count[i]``.

    This is the affine-compressed-sparse-row format of SPLAT (Gupta et al., arXiv 2407.16847), for
    sequences of ``len(start)`` queries. Adjacent rows with the same step are joined into one piece
    if their first and last keys are constant or advance by one per row. A window takes at most
    three pieces and a block takes one; an irregular row takes one each. Takes O(rows).

    Args:
        start: First key of every row, ``[seqlen_q]``, integers of at least 0.
        step: Distance between the keys of every row, ``[seqlen_q]``, integers of at least 1.
        count: Number of keys of every row, ``[seqlen_q]``, integers of at least 0.

    Raises:
        TypeError: An argument is not a one-dimensional array of integers.
        ValueError: A value is out of range, or the arguments differ in length.

    Example:
        >>> acsr([0, 1, 0], [1, 1, 2], [1, 1, 2]).to_mask(3).astype(int).tolist()
        [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    columns = []
    for name, values, least in (("start", start, 0), ("step", step, 1), ("count", count, 0)):
        array = as_array(values)
        if array.ndim != 1 or array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name} must be a row of integers, got {values!r}")
        if array.size and array.min() < least:
            raise ValueError(f"{name} must be at least {least}, got {array.min()}")
        columns.append(np.array(array.tolist(), dtype=object))  # ends may exceed int64
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"start, step and count must be of one length, got {list(map(len, columns))}"
        )
    first, steps, counts = columns
    rows = Rows(first, steps, counts, first + steps * (counts - 1))
    seqlen_kv = max((rows.last + 1)[rows.num_keys > 0], default=0)
    if seqlen_kv > FAR:
        raise ValueError(f"keys must lie below {FAR}, got {seqlen_kv - 1}")
    return _Progressions(len(rows.start), seqlen_kv, tuple(tidy_all(as_pieces(rows))))


class Rows(NamedTuple):
    """First key, step, number of keys and last key of every row, as Python integers."""

    start: NDArray[np.object_]
    step: NDArray[np.object_]
    num_keys: NDArray[np.object_]
    last: NDArray[np.object_]


@dataclass(frozen=True, repr=False)
class _Progressions(Pattern):
    num_rows: int
    num_keys: int
    """Largest key index of any row, plus 1."""
    pieces: tuple[Piece, ...]

    @property
    def default_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.num_rows, max(self.num_rows, self.num_keys)

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the lengths have one query per row and every key of the rows."""
        return lengths[0] == self.num_rows and lengths[1] >= self.num_keys

    def _bind(self, lengths: Lengths) -> BoundPattern:
        if not self.suits(lengths):
            raise ValueError(
                f"{self!r} requires {self.num_rows} queries and at least {self.num_keys} keys, "
                f"got {tuple(lengths)}"
            )
        return BoundPattern(*lengths, self.pieces)

    def __repr__(self) -> str:
        digest = content_digest(repr(self.pieces).encode())
        return f"acsr(<{self.num_rows} rows, {len(self.pieces)} pieces, {digest}>)"


def as_pieces(rows: Rows) -> Iterator[Piece]:
    """Yield one piece for each longest run of rows that a single piece can represent.

    In a run, rows are equal, or their first and last keys each advance by one per row or stay in
    one cell.
    """
    start, step, count, last = rows
    ahead, has_keys = np.diff(start), count > 0
    is_alike = (np.diff(step) == 0) & has_keys[1:] & has_keys[:-1]
    is_diagonal = is_alike & ((ahead - 1) % step[1:] == 0)
    rules = [is_alike & (ahead == 0) & (np.diff(count) == 0)]
    for edge in (start, last):
        rules += [is_diagonal & (np.diff(edge) == 1), is_diagonal & (np.diff(edge // step) == 0)]
    first, held = 0, (True,) * 5
    for row, pair in enumerate(zip(*(rule.tolist() for rule in rules), strict=True), 1):
        fewer = tuple(map(and_, held, pair))
        if fewer[0] or (fewer[1] or fewer[2]) and (fewer[3] or fewer[4]):
            held = fewer
            continue
        if has_keys[first]:
            yield _as_piece(rows, range(first, row), held)
        first, held = row, (True,) * 5
    if len(start) and has_keys[first]:
        yield _as_piece(rows, range(first, len(start)), held)


def _as_piece(rows: Rows, queries: range, rules: tuple[bool, ...]) -> Piece:
    first, step = rows.start[queries[0]], rows.step[queries[0]]
    last, final = rows.last[queries[0]], rows.last[queries[-1]]
    is_constant, start_advances, _, last_advances, _ = rules
    if is_constant:
        return Piece(Axis(queries), Axis(range(first, last + 1), first, step))
    start, stop = first // step * step, (last // step + 1) * step
    low, high = -FAR, FAR
    if start_advances:
        start, low = 0, (first - queries[0]) // step
    if last_advances:
        stop, high = max(last, final) + 1, (last - queries[0]) // step
    cells = Axis(queries, -((first - queries[0]) % step), step, step)
    return Piece(cells, Axis(range(start, stop), 0, step, step), low, high, 0, 0)
