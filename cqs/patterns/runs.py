"""Key runs: the keys that a tile of queries sees."""

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

from cqs.patterns.piece import FAR, Axis, Piece


class KeyRun(NamedTuple):
    """Some queries of a tile, and keys that they see.

    Query i sees key j if j lies in a cell of ``keys`` and ``low <= j - i <= high``. Runs over
    contiguous keys have cells of one token, side by side; others visit ``keys.width`` adjacent
    keys, ``keys.step`` apart.
    """

    queries: range
    keys: Axis
    low: int = -FAR
    high: int = FAR
    """``-FAR`` and ``FAR`` mean no bound; a run without bounds is full."""
    bits: int | None = None
    """Index of a partial block in the bits of its block list, or ``None``; ``keys`` are in it."""

    def allows(self, query: Any, key: Any) -> Any:
        """Return whether a query sees a key, ignoring ``bits``; integers or integer arrays."""
        tokens, origin, step, width = self.keys
        return (
            ((tokens.start <= key) & (key < tokens.stop) & ((key - origin) % step < width))
            & (self.low <= key - query)
            & (key - query <= self.high)
        )


def key_runs(piece: Piece, queries: range) -> Iterator[KeyRun]:
    """Yield the keys of a piece that a tile of queries sees, as runs without a common pair.

    There is one run if the step of ``queries`` is a multiple of the step of the piece (1 for a
    plain piece), so a dilated window is best visited residue by residue. Otherwise there are runs
    for every residue of the tile or, if fewer, for every query cell. A run may be empty only if
    the tile's step is not that of the piece.

    Args:
        piece: A tidy piece.
        queries: Query indices of the tile, ascending, of any step.
    """
    rows = piece.queries
    queries = clip(queries, rows.tokens)
    if not queries:
        return
    if piece.is_plain:
        yield from _run(queries, piece.keys, piece.low, piece.high)
        return
    period = rows.step // gcd(rows.step, queries.step)
    runs_of_cell = piece.high - piece.low + 1 if piece.offsets_matter else 1
    runs_of_cells = runs_of_cell * (len(queries) * queries.step // rows.step + 1)
    if rows.step == piece.keys.step and min(period, len(queries)) < runs_of_cells:
        for residue in range(min(period, len(queries))):
            yield from _run_of_residue(piece, queries[residue::period])
        return
    while queries:
        cell = (queries.start - rows.origin) // rows.step
        first = rows.origin + cell * rows.step
        yield from _runs_of_cell(piece, clip(queries, range(first, first + rows.width)), cell)
        queries = clip(queries, range(first + rows.step, rows.tokens.stop))


def clip(queries: range, tokens: range) -> range:
    """Return the queries that lie in ``tokens``."""
    skipped = -(-max(tokens.start - queries.start, 0) // queries.step)
    start = queries.start + skipped * queries.step
    return range(start, min(queries.stop, tokens.stop), queries.step)


def _run(queries: range, keys: Axis, low: int = -FAR, high: int = FAR) -> Iterator[KeyRun]:
    """Make a run of the keys that some query sees, without bounds that bind nothing."""
    start = max(keys.tokens.start, queries[0] + low)
    stop = min(keys.tokens.stop, queries[-1] + high + 1)
    if start >= stop:
        return
    keys = keys._replace(tokens=range(start, stop)).trimmed()
    if not keys.tokens:
        return
    first, last = keys.cells()
    if first == last or keys.width == keys.step:
        keys = Axis(keys.tokens)
    low = -FAR if queries[-1] + low <= keys.tokens.start else low
    high = FAR if queries[0] + high >= keys.tokens.stop - 1 else high
    yield KeyRun(queries, keys, low, high)


def _run_of_residue(piece: Piece, queries: range) -> Iterator[KeyRun]:
    """Handle queries of one offset in their cells: keys have a fixed run of offsets."""
    rows, keys, low, high, inner_low, inner_high = piece
    offset = (queries.start - rows.origin) % rows.step
    first, last = max(offset + inner_low, 0), min(offset + inner_high, keys.width - 1)
    if offset < rows.width and first <= last:
        apart = keys.origin - rows.origin - offset
        visited = keys._replace(origin=keys.origin + first, width=last - first + 1)
        low, high = apart + first + keys.step * low, apart + last + keys.step * high
        yield from _run(queries, visited, low, high)


def _runs_of_cell(piece: Piece, queries: range, cell: int) -> Iterator[KeyRun]:
    """Handle queries of one cell: a run over the key cells, or one for each if offsets matter."""
    if not queries:
        return
    rows, keys, low, high, inner_low, inner_high = piece
    cell_start = rows.origin + rows.step * cell
    begin, end = queries[0] - cell_start, queries[-1] - cell_start
    first, last = max(begin + inner_low, 0), min(end + inner_high, keys.width - 1)
    if first > last:
        return
    visited = keys._replace(origin=keys.origin + first, width=last - first + 1)
    visited = visited.within_cells(cell + low, cell + high)
    if end + inner_low <= first and begin + inner_high >= last:
        yield from _run(queries, visited)
    elif visited.tokens:
        for key_cell in range(visited.cells()[0], visited.cells()[1] + 1):
            apart = keys.origin + keys.step * key_cell - cell_start
            one_cell = visited.within_cells(key_cell, key_cell)
            yield from _run(queries, one_cell, apart + inner_low, apart + inner_high)
