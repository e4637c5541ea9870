"""Pieces of rows that are arithmetic progressions of keys."""

from collections.abc import Iterator
from operator import and_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.piece import FAR, Axis, Piece


class Rows(NamedTuple):
    """First key, step, number of keys and last key of every row, as Python integers."""

    start: NDArray[np.object_]
    step: NDArray[np.object_]
    num_keys: NDArray[np.object_]
    last: NDArray[np.object_]


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
    """Return the piece of a run of rows.

    Args:
        rows: All rows.
        queries: Indices of the rows of the run, each with keys.
        rules: Whether all rows are equal; whether first keys advance by one per row, or stay in one
            cell of ``rows.step`` keys; and both for last keys.
    """
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
    # A row sees the key at its own place in each of the cells ``low`` to ``high`` after its own.
    cells = Axis(queries, -((first - queries[0]) % step), step, step)
    return Piece(cells, Axis(range(start, stop), 0, step, step), low, high, 0, 0)
