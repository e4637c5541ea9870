"""Affine pieces: sets of (query, key) pairs in closed form.

Each side is divided into cells of ``width`` tokens, ``step`` apart. A pair belongs to a piece if
its cells a and b satisfy ``low <= b - a <= high`` and its offsets in them, u and v, satisfy
``inner_low <= v - u <= inner_high``. Two bands, one of cells and one inside them, describe every
regular pattern by fourteen integers, at any length.

=======================  ===================  ======================  =======================
pattern                  step                 band of cells           band of offsets
=======================  ===================  ======================  =======================
causal, sliding window   1                    the window, in tokens   none
dilated window, strided  s                    the window, in cells    v = u
block-diagonal           size                 a = b                   none; v <= u if causal
summary columns          s, keys of width c   b < a                   none
=======================  ===================  ======================  =======================

A piece with cells of one token and equal steps has queries ``q0 + a * s``, keys ``k0 + b * s`` and
a band. The rows of SPLAT (Gupta et al., arXiv 2407.16847), each an arithmetic progression of keys,
are the same set written row by row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from cqs.ranges import meets, overlap

FAR = 2**62
"""Larger than every distance between two tokens; stands for no bound."""


class Axis(NamedTuple):
    """The queries or keys of a piece: the elements of ``tokens`` that are in a cell.

    Token ``origin + step * cell + offset`` is in ``cell`` if ``0 <= offset < width``; tokens
    between two cells belong to none.
    """

    tokens: range
    """Token indices, a range of step 1."""
    origin: int = 0
    """Token at offset 0 of cell 0."""
    step: int = 1
    """Distance between neighbouring cells, in tokens."""
    width: int = 1
    """Tokens of a cell, at most ``step``."""

    def cells(self) -> tuple[int, int]:
        """Return the cells of the first and of the last token."""
        first = (self.tokens.start - self.origin) // self.step
        return first, (self.tokens.stop - 1 - self.origin) // self.step

    def segments(self, tokens: range) -> Iterator[tuple[int, int, int, int]]:
        """Cut some tokens of the axis into at most three products of cells and offsets.

        Args:
            tokens: A part of ``tokens``, not empty.

        Yields:
            First cell, last cell + 1, first offset, last offset + 1. No product is empty.
        """
        first, begin = divmod(tokens.start - self.origin, self.step)
        last, end = divmod(tokens.stop - self.origin, self.step)
        whole = first + (begin > 0)
        products = [
            (first, whole, begin, self.width),
            (whole, last, 0, self.width),
            (last, last + 1, 0, min(end, self.width)),
        ]
        if first == last:
            products = [(first, first + 1, begin, min(end, self.width))]
        for cell, cell_stop, offset, offset_stop in products:
            if cell < cell_stop and offset < offset_stop:
                yield cell, cell_stop, offset, offset_stop

    def trimmed(self) -> "Axis":
        """Return the axis without tokens at both ends that are in no cell."""
        start, stop = self.tokens.start, self.tokens.stop
        cell, offset = divmod(start - self.origin, self.step)
        if offset >= self.width:
            start = self.origin + (cell + 1) * self.step
        cell, offset = divmod(stop - 1 - self.origin, self.step)
        if offset >= self.width:
            stop = self.origin + cell * self.step + self.width
        return self._replace(tokens=range(start, max(start, stop)))

    def within_cells(self, first: int, stop: int) -> "Axis":
        """Return the part of the axis in cells ``first .. stop - 1``."""
        start = max(self.tokens.start, self.origin + first * self.step)
        end = min(self.tokens.stop, self.origin + (stop - 1) * self.step + self.width)
        return self._replace(tokens=range(start, max(start, end)))


class Piece(NamedTuple):
    """A set of query-key pairs: their cells are in one band, their offsets in another."""

    queries: Axis
    keys: Axis
    low: int = -FAR
    high: int = FAR
    """``low <= key cell - query cell <= high``."""
    inner_low: int = -FAR
    inner_high: int = FAR
    """``inner_low <= key offset - query offset <= inner_high``."""

    @property
    def is_plain(self) -> bool:
        """Whether cells are single tokens side by side, so that the band is one of tokens."""
        return self.queries.step == self.keys.step == 1

    @property
    def is_rectangle(self) -> bool:
        """Whether every query sees every key; exact for tidy pieces only."""
        if not self.is_plain:
            return False
        queries, keys = self.queries.tokens, self.keys.tokens
        nearest, farthest = keys.start - queries.stop + 1, keys.stop - 1 - queries.start
        return self.low <= nearest and farthest <= self.high

    def meets(self, queries: range, keys: range) -> bool:
        """Return whether a rectangle has tokens of both axes."""
        return meets(queries, self.queries.tokens) and meets(keys, self.keys.tokens)

    def count_pairs(self, queries: range, keys: range) -> int:
        """Return the number of pairs within a rectangle, in constant time."""
        rows, columns = self.queries, self.keys
        queries, keys = overlap(queries, rows.tokens), overlap(keys, columns.tokens)
        if not (queries and keys):
            return 0
        if self.is_plain:
            a, b = rows.origin, columns.origin
            edges = queries.start - a, queries.stop - a, keys.start - b, keys.stop - b
            return count_band(*edges, self.low, self.high)
        key_segments = tuple(columns.segments(keys))
        return sum(
            count_band(a, a_stop, b, b_stop, self.low, self.high)
            * count_band(u, u_stop, v, v_stop, self.inner_low, self.inner_high)
            for a, a_stop, u, u_stop in rows.segments(queries)
            for b, b_stop, v, v_stop in key_segments
        )

    @property
    def num_pairs(self) -> int:
        """Number of pairs of the whole piece."""
        return self.count_pairs(self.queries.tokens, self.keys.tokens)

    def within(self, queries: range, keys: range) -> "Piece":
        """Return the part of the piece within a rectangle, which may not be tidy."""
        return self._replace(
            queries=self.queries._replace(tokens=overlap(self.queries.tokens, queries)),
            keys=self.keys._replace(tokens=overlap(self.keys.tokens, keys)),
        )

    def transposed(self) -> "Piece":
        """Return the piece with queries and keys exchanged."""
        queries, keys, low, high, inner_low, inner_high = self
        return Piece(keys, queries, -high, -low, -inner_high, -inner_low)


def plain_piece(queries: range, keys: range, low: int = -FAR, high: int = FAR) -> Piece:
    """Return the piece of the pairs with ``low <= key - query <= high``.

    Example:
        >>> plain_piece(range(4), range(4), high=0).num_pairs
        10
    """
    return Piece(Axis(queries), Axis(keys), low, high)


def count_band(a: int, a_stop: int, b: int, b_stop: int, low: int, high: int) -> int:
    """Count the integer points of ``[a, a_stop) x [b, b_stop)`` with ``low <= y - x <= high``.

    Example:
        >>> count_band(0, 4, 0, 4, -1, 0)
        7
    """
    if low > high:
        return 0
    up_to_high = _count_below(a, a_stop, b, b_stop, high)
    return up_to_high - _count_below(a, a_stop, b, b_stop, low - 1)


def _count_below(a: int, a_stop: int, b: int, b_stop: int, bound: int) -> int:
    """Count the points with ``y - x <= bound``: a signed sum of four triangles."""
    return (
        _triangle(bound + a_stop - b)
        - _triangle(bound + a - b)
        - _triangle(bound + a_stop - b_stop)
        + _triangle(bound + a - b_stop)
    )


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def tidy(piece: Piece) -> Piece | None:
    """Return the same set with tight ranges and bands; None if it is empty.

    A piece is returned as a plain piece if possible. Otherwise its cells are numbered from 0.
    """
    queries, keys = piece.queries.trimmed(), piece.keys.trimmed()
    first, last = keys.cells()
    queries = queries.within_cells(first - piece.high, last - piece.low + 1)
    first, last = queries.cells()
    keys = keys.within_cells(first + piece.low, last + piece.high + 1)
    inner_low = max(piece.inner_low, 1 - queries.width)
    inner_high = min(piece.inner_high, keys.width - 1)
    if not (queries.tokens and keys.tokens) or inner_low > inner_high:
        return None
    piece = Piece(queries, keys, piece.low, piece.high, inner_low, inner_high)
    plain = None if piece.is_plain else _as_plain(piece)
    if plain is not None:
        return tidy(plain)
    piece = _renumbered(piece)
    return piece if piece.low <= piece.high and piece.num_pairs else None


def _as_plain(piece: Piece) -> Piece | None:
    """Return the plain piece if there is one cell on each side or every pair is live, else None."""
    queries, keys, low, high, inner_low, inner_high = piece
    (a, a_last), (b, b_last) = queries.cells(), keys.cells()
    if a == a_last and b == b_last and low <= b - a <= high:
        shift = keys.origin + keys.step * b - queries.origin - queries.step * a
        return plain_piece(queries.tokens, keys.tokens, inner_low + shift, inner_high + shift)
    if piece.num_pairs == len(queries.tokens) * len(keys.tokens):
        return plain_piece(queries.tokens, keys.tokens)
    return None


def _renumbered(piece: Piece) -> Piece:
    """Renumber cells by their tokens if the piece is plain, else from 0; clip the band to them."""
    queries, keys, low, high, *inner = piece
    if piece.is_plain:
        shift = keys.origin - queries.origin
        queries, keys = Axis(queries.tokens), Axis(keys.tokens)
        inner = [0, 0]
    else:
        a, b = queries.cells()[0], keys.cells()[0]
        shift = a - b
        queries = queries._replace(origin=queries.origin + queries.step * a)
        keys = keys._replace(origin=keys.origin + keys.step * b)
    (a, a_last), (b, b_last) = queries.cells(), keys.cells()
    low, high = max(low + shift, b - a_last), min(high + shift, b_last - a)
    return Piece(queries, keys, low, high, *inner)
