"""Affine views: a piece as bands between strided slices of the tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.piece import FAR, Axis, Piece, count_band, plain_piece, tidy
from cqs.ranges import moved

_TILE = 128
"""Queries and keys of a kernel's tile."""


class View(NamedTuple):
    """Queries and keys of which query i sees key j if ``low <= j - i <= high``.

    The ranges slice the tensors without a copy; attention between the slices is dense, causal or
    windowed. The two ranges may have different steps.
    """

    queries: range
    keys: range
    low: int = -FAR
    high: int = FAR
    bits: NDArray[np.uint8] | None = None
    """Mask of a partial block, or ``None``: uint8 ``[len(queries), ceil(len(keys) / 8)]``, one bit
    per pair, high bits first. A live pair is in the band and has its bit set."""

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        if self.bits is not None:
            return False
        nearest, farthest = self.keys[0] - self.queries[-1], self.keys[-1] - self.queries[0]
        return self.low <= nearest and farthest <= self.high

    def moved(self, rows: int, columns: int) -> "View":
        """Return the view with ``rows`` added to every query and ``columns`` to every key."""
        queries, keys, low, high, bits = self
        apart = columns - rows
        low, high = (low if low <= -FAR else low + apart), (high if high >= FAR else high + apart)
        return View(moved(queries, rows), moved(keys, columns), low, high, bits)

    def to_mask(self) -> NDArray[np.bool_]:
        """Return a boolean array ``[len(queries), len(keys)]``, True where a query sees a key."""
        rows, columns = (
            np.arange(side.start, side.stop, side.step) for side in (self.queries, self.keys)
        )
        mask = np.ones((len(rows), len(columns)), dtype=bool)
        if self.bits is not None:
            mask = np.unpackbits(self.bits, axis=-1, count=len(columns)).view(bool)
        if self.low > -FAR:
            mask &= (rows + self.low)[:, None] <= columns
        if self.high < FAR:
            mask &= columns <= (rows + self.high)[:, None]
        return mask


def union_mask(views: Iterable[View], queries: range, keys: range) -> NDArray[np.bool_]:
    """Return a boolean array ``[len(queries), len(keys)]``, True for the pairs of any view.

    Args:
        views: Views within the rectangle of these queries and keys.
        queries: Query indices, a range of step 1.
        keys: Key indices, a range of step 1.
    """
    mask = np.zeros((len(queries), len(keys)), dtype=bool)
    for view in views:
        at = view.moved(-queries.start, -keys.start)
        rows, columns = (slice(side.start, side.stop, side.step) for side in at[:2])
        mask[rows, columns] |= view.to_mask()
    return mask


def views(piece: Piece) -> Iterator[View]:
    """Cut a tidy piece into affine views that have no pair in common.

    Of up to three methods, the one that visits the fewest tiles is used.

    ===================  ==========================================  ================  =========
    cut into             possible if                                 best for          TFLOP/s
    ===================  ==========================================  ================  =========
    pairs of residues    steps are equal, or there is no band        dilated, strided  624 (386)
    residues of keys     queries fill their cells, offsets are free  summary columns   303 (199)
    pairs of cells       always                                      diagonal blocks   399 (308)
    ===================  ==========================================  ================  =========

    A residue is the set of tokens at one offset of their cells. A plain piece is a single view.

    Throughput is forward (backward) on one H200 with 65,536 tokens, and counts live pairs only. The
    patterns are every 8th key, ``fixed(128, 8)`` and blocks of 512. Dense attention with cuDNN
    reaches 619 (539).

    Example:
        >>> from cqs.patterns import dilated
        >>> (piece,) = dilated(1, 0, 2).bind(6).pieces
        >>> [view[:4] for view in views(piece)]
        [(range(0, 6, 2), range(0, 6, 2), -2, 0), (range(1, 6, 2), range(1, 6, 2), -2, 0)]
    """
    if piece.is_plain:
        queries, keys, low, high, *_ = piece
        return iter([View(queries.tokens, keys.tokens, low, high)])
    return min(cutting_methods(piece), key=lambda method: method[0])[1](piece)


def cutting_methods(piece: Piece) -> Iterator[tuple[float, Callable[[Piece], Iterator[View]]]]:
    """Yield the possible methods of cutting with their approximate numbers of visited tiles."""
    rows, columns = piece.queries, piece.keys
    (a, a_last), (b, b_last) = rows.cells(), columns.cells()
    num_rows, num_columns = a_last - a + 1, b_last - b + 1
    seen = count_band(a, a_last + 1, b, b_last + 1, piece.low, piece.high) / num_rows
    is_banded = seen < num_columns
    offsets = min(columns.width, piece.inner_high - piece.inner_low + 1)

    yield num_rows * _tiles(rows.width) * (1 + seen * _tiles(columns.width)), _pairs_of_cells
    if is_banded and rows.step != columns.step:
        return
    slope = _TILE if is_banded else 0
    visited = min(num_columns, seen + slope)
    yield rows.width * _tiles(num_rows) * (1 + offsets * _tiles(visited)), _pairs_of_residues
    if piece.inner_low > 1 - rows.width or piece.inner_high < columns.width - 1:
        # only some queries of a cell see a given key offset
        return
    if rows.width == rows.step:
        visited = min(num_columns, seen + slope / columns.step)
        num_tiles = _tiles(num_rows * rows.step)
        yield num_tiles * (1 + columns.width * _tiles(visited)), _key_residues


def _tiles(tokens: float) -> int:
    return int(-(-tokens // _TILE))


def _pairs_of_residues(piece: Piece) -> Iterator[View]:
    """Yield a view for each offset of a query and a key in their cells."""
    rows, columns = piece.queries, piece.keys
    for offset in range(rows.width):
        first = max(offset + piece.inner_low, 0)
        last = min(offset + piece.inner_high, columns.width - 1)
        for key_offset in range(first, last + 1):
            apart = columns.origin + key_offset - rows.origin - offset
            residues = _residue(rows, offset), _residue(columns, key_offset)
            yield from _view(piece, *residues, apart, apart)


def _key_residues(piece: Piece) -> Iterator[View]:
    """Cut by key offset: all queries of a cell see the keys at one offset."""
    rows, columns = piece.queries, piece.keys
    for offset in range(columns.width):
        apart = columns.origin + offset - rows.origin
        keys = _residue(columns, offset)
        yield from _view(piece, rows.tokens, keys, apart - rows.width + 1, apart)


def _view(
    piece: Piece, queries: range, keys: range, low_apart: int, high_apart: int
) -> Iterator[View]:
    """Make a view, unless a side is empty, of a band of cells.

    Args:
        piece: The piece.
        queries: Some queries of the piece.
        keys: Some keys of the piece.
        low_apart: Distance from query to key in cells of equal number, at the start of the band.
        high_apart: Distance from query to key in cells of equal number, at the end of the band.
    """
    if queries and keys:
        step = piece.keys.step
        low = -FAR if piece.low <= -FAR else low_apart + step * piece.low
        high = FAR if piece.high >= FAR else high_apart + step * piece.high
        is_banded = piece.queries.step == step
        yield View(queries, keys, low, high) if is_banded else View(queries, keys)


def _pairs_of_cells(piece: Piece) -> Iterator[View]:
    """Yield a view for each pair of a cell of queries and a cell of keys."""
    rows, columns = piece.queries, piece.keys
    (a, a_last), (b, b_last) = rows.cells(), columns.cells()
    for cell in range(a, a_last + 1):
        queries = rows.within_cells(cell, cell + 1).tokens
        for key_cell in range(max(b, cell + piece.low), min(b_last, cell + piece.high) + 1):
            keys = columns.within_cells(key_cell, key_cell + 1).tokens
            apart = columns.origin + columns.step * key_cell - rows.origin - rows.step * cell
            band = apart + piece.inner_low, apart + piece.inner_high
            cell_piece = tidy(plain_piece(queries, keys, *band))
            if cell_piece is not None:
                yield View(cell_piece.queries.tokens, cell_piece.keys.tokens, *band)


def _residue(axis: Axis, offset: int) -> range:
    """Return the tokens at one offset of their cells."""
    ahead = (axis.origin + offset - axis.tokens.start) % axis.step
    return range(axis.tokens.start + ahead, axis.tokens.stop, axis.step)
