"""Closed forms of masks: the few pieces that a regular mask consists of."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, permutations

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.affine_rows import Rows, as_pieces
from cqs.patterns.algebra import UnequalStepsError, tidy_all, unite
from cqs.patterns.arrays import adjacent_runs
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths
from cqs.patterns.piece import FAR, Axis, Piece

_MOST_PIECES = 64
"""Largest number of pieces of a regular mask: a kernel computes more of them slower than blocks."""
_MOST_STEPS = 3
"""Largest number of steps of progressions that are tried from one number."""
_MOST_PERIODS = 8
"""Largest number of periods that are compared over the whole mask."""
_NUM_SAMPLES = 8
"""Number of rows that stand for all in quick tests."""
_MOST_GAPS = 12
"""Largest number of distances between neighbouring keys of one row of a regular mask."""

_Mask = NDArray[np.bool_]
_Band = tuple[int, int, int]
"""First diagonal, last diagonal, and the distance between diagonals."""


def find_pieces(mask: _Mask) -> tuple[Piece, ...] | None:
    """Return disjoint pieces that have exactly the live pairs of a mask, if a few suffice.

    Found are windows, dilated windows and strides; bands of blocks, blocks that are causal, and
    columns of blocks, if blocks are of one size; lists of these; and rows of keys in arithmetic
    progression, the format of SPLAT (Gupta et al., arXiv 2407.16847), alone or beside a window.
    Takes time linear in the pairs.

    Args:
        mask: ``[seqlen_q, seqlen_kv]``, True where a query sees a key.

    Returns:
        At most 64 tidy pieces, or ``None``.
    """
    lengths, num_live = Lengths(*mask.shape), int(np.count_nonzero(mask))
    if num_live == 0:
        return ()
    if _is_irregular(mask):
        return None
    diagonals = _diagonal_pieces(mask, lengths)
    if diagonals and _count(diagonals) == num_live:
        return tuple(diagonals)
    half = min(lengths) / 2
    long = [diagonal for diagonal in diagonals if _longest(diagonal) >= half]
    rest = mask & ~_to_mask(long, lengths)
    parts = [part for part in (long, *_block_pieces(mask, rest, lengths)) if part]
    orders = (order for number in range(len(parts)) for order in permutations(parts, number + 1))
    lists: list[list[Piece]] = [pieces for order in orders if (pieces := _unite(order)) is not None]
    lists = [pieces for pieces in lists if _count(pieces) == num_live]
    lists += [
        [*kept, *pieces]
        for kept, rows in (([], mask), (long, rest))
        if (pieces := _row_pieces(rows)) is not None and len(kept) + len(pieces) <= _MOST_PIECES
    ]
    fewest = min(lists, key=len, default=None)
    return None if fewest is None else tuple(fewest)


def _is_irregular(mask: _Mask) -> bool:
    """Return whether a few rows have keys at more distances from each other than patterns have."""
    rows = np.linspace(0, len(mask) - 1, _NUM_SAMPLES).astype(int)
    gaps = (np.unique(np.diff(np.flatnonzero(mask[row]))) for row in rows)
    return any(len(distances) > _MOST_GAPS for distances in gaps)


def _count(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_pairs for piece in pieces)


def _unite(parts: Sequence[list[Piece]]) -> list[Piece] | None:
    """Return the union of parts, or ``None`` if it takes many pieces."""
    union: list[Piece] = []
    for part in parts:
        try:
            united = unite(union, part)
        except UnequalStepsError:
            return None
        is_disjoint = _count(united) == _count(union) + _count(part)
        union = union + part if is_disjoint else united
        if len(union) > _MOST_PIECES:
            return None
    return union


def _to_mask(pieces: Sequence[Piece], lengths: Lengths) -> _Mask:
    return BoundPattern(*lengths, tuple(pieces)).to_mask()


def _diagonal_pieces(mask: _Mask, lengths: Lengths) -> list[Piece]:
    """Return the pieces of all full diagonals, or none if there are many."""
    shift = lengths.seqlen_kv - lengths.seqlen_q
    full = np.flatnonzero(_full_diagonals(mask)) - lengths.seqlen_q + 1 - shift
    return tidy_all(_band_piece(lengths, *band) for band in _as_bands(full.tolist()) or ())


def _band_piece(lengths: Lengths, first: int, last: int, step: int) -> Piece:
    """Return the piece of diagonals: key position - query position from ``first`` to ``last``."""
    offset = first % step
    keys = lengths.keys(step)._replace(origin=offset)
    low, high = (first - offset) // step, (last - offset) // step
    return Piece(lengths.queries(step), keys, low, high, 0, 0)


def _longest(piece: Piece) -> int:
    """Return the number of pairs of the longest diagonal that a piece may have."""
    return min(len(piece.queries.tokens), len(piece.keys.tokens))


def _full_diagonals(mask: _Mask) -> _Mask:
    """Return whether each diagonal is all True, ``[rows + columns - 1]``, from the lower left."""
    rows, columns = mask.shape
    full = np.ones(rows + columns - 1, dtype=bool)
    for row, live in enumerate(mask):
        full[rows - 1 - row : rows - 1 - row + columns] &= live
    return full


def _as_bands(diagonals: list[int]) -> list[_Band] | None:
    """Write ascending integers as disjoint arithmetic progressions, or ``None`` if as many."""
    candidates = _runs_first(diagonals), _progressions(diagonals)
    return min((bands for bands in candidates if bands is not None), key=len, default=None)


def _runs_first(diagonals: list[int]) -> list[_Band] | None:
    """Write adjacent integers as runs, and the others as progressions.

    A progression whose next member is the end of a longer run takes it, as that of a dilated
    pattern beside a window.
    """
    runs = [run for run in adjacent_runs(diagonals) if run[0] < run[1]]
    beside = set(diagonals).difference(*(range(first, last + 1) for first, last in runs))
    others = _progressions(sorted(beside))
    if others is None:
        return None
    bands = []
    for first, last, step in others:
        for i, (start, end) in enumerate(runs):
            if end - start > 1 and step > 1:  # a single number has step 1
                if start == last + step:
                    last, runs[i] = start, (start + 1, end)
                elif end == first - step:
                    first, runs[i] = end, (start, end - 1)
        bands.append((first, last, step))
    return [*((first, last, 1) for first, last in runs), *bands]


def _progressions(numbers: list[int]) -> list[_Band] | None:
    """Write ascending integers as progressions, from each first the longest of a few steps."""
    left, bands = list(numbers), list[_Band]()
    while left:
        if len(bands) == _MOST_PIECES:
            return None
        members = set(left)
        best = range(left[0], left[0] + 1)
        for other in left[1 : _MOST_STEPS + 1]:
            step = other - left[0]
            stop = other
            while stop in members:
                stop += step
            best = max(best, range(left[0], stop, step), key=len)
        bands.append((best[0], best[-1], best.step))
        left = [number for number in left if number not in best]
    return bands


def _block_pieces(mask: _Mask, rest: _Mask, lengths: Lengths) -> Iterator[list[Piece]]:
    """Yield parts of a mask with blocks of one size: bands of them, causal ones, and columns.

    Args:
        mask: The mask.
        rest: The mask without diagonals that are full: its period is the size of the blocks.
        lengths: The lengths.
    """
    size = _period(rest, lengths)
    if size is None:
        return
    queries, keys = lengths.queries(size), lengths.keys(size)
    full = _all_in_cells(_all_in_cells(mask, queries, 0), keys, 1)
    (first_row, _), (first_column, _) = queries.cells(), keys.cells()
    near = np.flatnonzero(_full_diagonals(full)) - len(full) + 1 + first_column - first_row
    bands = [(a, b) for a, b in adjacent_runs(near) if a <= 0 <= b]
    candidates = [[Piece(queries, keys, *band) for band in bands]]
    candidates.append([Piece(queries, keys, 0, 0, inner_high=0)])
    columns = _columns(mask, queries, keys)
    for high in (-1, FAR):
        candidates.append([Piece(queries, column, -FAR, high) for column in columns])
    num_live = np.count_nonzero(mask)
    for candidate in candidates:
        pieces = tidy_all(candidate)
        is_small = bool(pieces) and _count(pieces) <= num_live
        if is_small and not (_to_mask(pieces, lengths) & ~mask).any():
            yield pieces


def _period(rest: _Mask, lengths: Lengths) -> int | None:
    """Return the least number of tokens by which rows and columns may both be moved."""
    shift = lengths.seqlen_kv - lengths.seqlen_q
    live = np.flatnonzero(rest.any(axis=1))
    live = live[live >= -shift]  # queries before the first key have no blocks
    if not len(live):
        return None
    # One row excludes most numbers, a few rows nearly all others; whole masks are compared then.
    samples = live[np.linspace(0, len(live) - 1, _NUM_SAMPLES).astype(int)].tolist()
    num_tried = 0
    for size in range(2, min(lengths.seqlen_q, lengths.seqlen_kv)):
        if not all(_moves(rest, row, size) for row in (samples[_NUM_SAMPLES // 2], *samples)):
            continue
        if (rest[:-size, :-size] == rest[size:, size:]).all():
            return size
        num_tried += 1
        if num_tried == _MOST_PERIODS:
            break
    return None


def _moves(rest: _Mask, row: int, size: int) -> bool:
    """Return whether a row, moved by some tokens, equals the rows by as many before and after."""
    after, before = row + size, row - size
    if after < len(rest) and not (rest[row, :-size] == rest[after, size:]).all():
        return False
    return before < 0 or bool((rest[before, :-size] == rest[row, size:]).all())


def _all_in_cells(mask: _Mask, axis: Axis, dimension: int) -> _Mask:
    """Reduce one dimension of a mask to cells: True where all tokens of a cell are."""
    first = axis.origin + axis.step * axis.cells()[0]
    edges = np.maximum(np.arange(first, axis.tokens.stop, axis.step), 0)
    reduced: _Mask = np.logical_and.reduceat(mask, edges, axis=dimension)
    return reduced


def _columns(mask: _Mask, queries: Axis, keys: Axis) -> list[Axis]:
    """Return the keys of the first block that all queries of the last whole block see."""
    size = queries.step
    _, last = queries.cells()
    stop = queries.origin + size * last
    rows = mask[max(stop - size, 0) : stop, :size]
    runs = adjacent_runs(np.flatnonzero(rows.all(axis=0))) if len(rows) else ()
    return [keys._replace(origin=first, width=end - first + 1) for first, end in runs]


def _row_pieces(mask: _Mask) -> list[Piece] | None:
    """Return the pieces of rows that are arithmetic progressions; ``None`` if they are not."""
    counts = np.count_nonzero(mask, axis=1)
    first = mask.argmax(axis=1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    steps = np.where(counts > 1, (last - first) // np.maximum(counts - 1, 1), 1)
    if ((last - first != steps * (counts - 1)) & (counts > 0)).any():
        return None
    for row, start, end, step in zip(mask, first, last, steps, strict=True):
        if row[start] and not row[start : end + 1 : step].all():
            return None
    columns = (column.astype(object) for column in (first, steps, counts, last))
    pieces = list(islice(as_pieces(Rows(*columns)), _MOST_PIECES + 1))
    return tidy_all(pieces) if len(pieces) <= _MOST_PIECES else None
