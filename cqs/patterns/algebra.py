"""Intersection, difference and union of affine pieces, as disjoint pieces again.

Exact where a few pieces can say the result: rectangles with anything; cells of equal steps on both
sides with each other, whatever their origins and widths; and bands of tokens with cells of one
step. Only cells of different steps, a dilated window and summary columns of another stride, say,
have no such answer.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice, product, starmap

from cqs.patterns.piece import FAR, Axis, Piece, plain_piece, tidy
from cqs.ranges import overlap

MAX_PIECES = 2**16
"""Most pieces of a bound pattern; a count of the whole pattern takes about 10 us per piece."""
_MAX_PAIRS = 2**20
"""Most pairs of pieces that a combination of two patterns compares, in about 2 s."""

_MANY = 64
"""A union cuts the side with more pieces if it has more than this number times the other's."""


class UnequalStepsError(Exception):
    """Two pieces with different steps intersect; a few pieces cannot represent the result."""


def intersect(one: Iterable[Piece], other: Iterable[Piece]) -> list[Piece]:
    """Return the pairs in both of two disjoint unions."""
    ones, others = tuple(one), tuple(other)
    _check_pairs(len(ones) * len(others))
    pairs = product(ones, others)
    return _listed(chain.from_iterable(starmap(_intersect, pairs)))


def subtract(one: Iterable[Piece], other: Iterable[Piece]) -> list[Piece]:
    """Return the pairs of ``one`` that are not in ``other``."""
    remaining = list(one)
    num_pairs = 0
    for removed in other:
        _check_pairs(num_pairs := num_pairs + len(remaining))
        remaining = _listed(kept for piece in remaining for kept in _subtract(piece, removed))
    return remaining


def unite(one: Iterable[Piece], other: Iterable[Piece]) -> list[Piece]:
    """Return the pairs in either: one of the two, and what the other adds to it."""
    kept, added = list(one), list(other)
    if len(kept) > _MANY * len(added):  # each removed piece may cut all that remains
        kept, added = added, kept
    return kept + subtract(added, kept)


def tidy_all(pieces: Iterable[Piece]) -> list[Piece]:
    """Tidy every piece and drop empty ones.

    Raises:
        ValueError: There are more than 65,536 pieces.
    """
    return [tidied for piece in _listed(pieces) if (tidied := tidy(piece)) is not None]


def _listed(pieces: Iterable[Piece]) -> list[Piece]:
    """List pieces, or raise ValueError if there are too many."""
    listed = list(islice(pieces, MAX_PIECES + 1))
    if len(listed) > MAX_PIECES:
        raise ValueError(f"a pattern must have at most {MAX_PIECES} pieces, got more: simplify it")
    return listed


def _check_pairs(number: int) -> None:
    if number > _MAX_PAIRS:
        raise ValueError(
            f"patterns that combine must have at most {_MAX_PAIRS} pairs of pieces, got {number}: "
            "simplify them"
        )


def _intersect(one: Piece, other: Piece) -> list[Piece]:
    """Return the pairs that are in both pieces, as disjoint pieces.

    A plain piece is a band of tokens, others have cells. The simpler one becomes ``other``.

    Raises:
        UnequalStepsError: The cells of the pieces, or of both sides of one, have different steps.
    """
    if not one.meets(other.queries.tokens, other.keys.tokens):
        return []
    if one.is_rectangle or (one.is_plain and not other.is_rectangle):
        one, other = other, one
    if other.is_plain and (one.is_plain or other.is_rectangle):
        clipped = one.within(other.queries.tokens, other.keys.tokens)
        if not other.is_rectangle:
            low, high = max(one.low, other.low), min(one.high, other.high)
            clipped = clipped._replace(low=low, high=high)
        return tidy_all([clipped])
    one, other = _with_equal_steps(one), _with_equal_steps(other)
    if (one.queries.step, one.keys.step) == (other.queries.step, other.keys.step):
        return tidy_all(_intersect_cells(one, other))
    if not other.is_plain or one.queries.step != one.keys.step:
        raise UnequalStepsError
    return tidy_all(
        piece for part in _in_cells_of(one, other) for piece in _intersect_cells(one, part)
    )


def _with_equal_steps(piece: Piece) -> Piece:
    """Rewrite full columns of a query range, or full rows, with equal steps of both axes."""
    queries, keys = piece.queries, piece.keys
    all_pairs = Piece(queries, keys)
    if queries.step == keys.step or piece.num_pairs < all_pairs.num_pairs:
        return piece
    if keys.step == 1:
        return _with_equal_steps(piece.transposed()).transposed()
    if queries.step > 1:
        return piece
    cells = Axis(queries.tokens, 0, keys.step, keys.step)
    return Piece(cells, keys, inner_low=1 - cells.width, inner_high=keys.width - 1)


def _subtract(one: Piece, other: Piece) -> list[Piece]:
    if not one.meets(other.queries.tokens, other.keys.tokens):
        return [one]
    rests = [rest for rest in _complement(other, one) if rest.low <= rest.high]
    return [piece for rest in tidy_all(rests) for piece in _intersect(one, rest)]


def _complement(piece: Piece, universe: Piece) -> Iterator[Piece]:
    """Yield disjoint pieces of the pairs in the rectangle of ``universe`` but not in ``piece``."""
    all_queries, all_keys = universe.queries.tokens, universe.keys.tokens
    rows, columns = piece.queries.tokens, piece.keys.tokens
    middle = overlap(all_queries, rows)
    yield plain_piece(range(all_queries.start, middle.start), all_keys)
    yield plain_piece(range(middle.stop, all_queries.stop), all_keys)
    yield plain_piece(middle, range(all_keys.start, max(columns.start, all_keys.start)))
    yield plain_piece(middle, range(min(columns.stop, all_keys.stop), all_keys.stop))
    if piece.queries.width < piece.queries.step:
        yield Piece(_gaps(piece.queries), piece.keys._replace(width=piece.keys.step))
    if piece.keys.width < piece.keys.step:
        yield Piece(piece.queries, _gaps(piece.keys))
    yield piece._replace(high=piece.low - 1, low=-FAR, inner_low=-FAR, inner_high=FAR)
    yield piece._replace(low=piece.high + 1, high=FAR, inner_low=-FAR, inner_high=FAR)
    yield piece._replace(inner_high=piece.inner_low - 1, inner_low=-FAR)
    yield piece._replace(inner_low=piece.inner_high + 1, inner_high=FAR)


def _gaps(axis: Axis) -> Axis:
    """Return the tokens between the cells of an axis as its cells."""
    return axis._replace(origin=axis.origin + axis.width, width=axis.step - axis.width)


def _common_cells(one: Axis, other: Axis) -> Iterator[Axis]:
    """Cut the tokens common to two axes of one step into at most two axes."""
    tokens = overlap(one.tokens, other.tokens)
    ahead = (other.origin - one.origin) % one.step
    if (width := min(one.width - ahead, other.width)) > 0:
        yield Axis(tokens, one.origin + ahead, one.step, width)
    if (width := min(one.width, other.width - one.step + ahead)) > 0:
        yield Axis(tokens, one.origin, one.step, width)


def _bands_on(piece: Piece, queries: Axis, keys: Axis) -> tuple[int, int, int, int]:
    """Return both bands of a piece in the numbering of axes that hold parts of its cells."""
    a, u = divmod(queries.origin - piece.queries.origin, piece.queries.step)
    b, v = divmod(keys.origin - piece.keys.origin, piece.keys.step)
    _, _, low, high, inner_low, inner_high = piece
    return low + a - b, high + a - b, inner_low + u - v, inner_high + u - v


def _intersect_cells(one: Piece, other: Piece) -> Iterator[Piece]:
    """Intersect two pieces of equal steps: at most four pairs of axes, each with two bands."""
    axes = _common_cells(one.queries, other.queries), _common_cells(one.keys, other.keys)
    for queries, keys in product(*axes):
        first, second = _bands_on(one, queries, keys), _bands_on(other, queries, keys)
        low, inner_low = map(max, first[::2], second[::2])
        high, inner_high = map(min, first[1::2], second[1::2])
        yield Piece(queries, keys, low, high, inner_low, inner_high)


def _in_cells_of(cells: Piece, band: Piece) -> Iterator[Piece]:
    """Write a band of tokens in the cells of another piece, whose steps are equal.

    Cells a and b with offsets u and v are ``s * (b - a) + (v - u)`` tokens apart. For some
    differences of cells, every difference of offsets in the other piece is inside the band: these
    form one run. For a few differences around the run, a band of offsets remains.
    """
    step = cells.queries.step
    queries = Axis(band.queries.tokens, cells.queries.origin, step, step)
    keys = Axis(band.keys.tokens, cells.keys.origin, step, step)
    low = band.low - (cells.keys.origin - cells.queries.origin)
    high = band.high - (cells.keys.origin - cells.queries.origin)
    first, last = -((cells.inner_high - low) // step), (high - cells.inner_low) // step
    full_first = -((cells.inner_low - low) // step)
    full_last = (high - cells.inner_high) // step
    if full_first > full_last:
        full_first, full_last = last + 1, last
    else:
        yield Piece(queries, keys, full_first, full_last)
    for apart in (*range(first, full_first), *range(full_last + 1, last + 1)):
        yield Piece(queries, keys, apart, apart, low - step * apart, high - step * apart)
