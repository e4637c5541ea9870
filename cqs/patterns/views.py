"""Affine views: a piece as plain bands between strided slices of the tensors."""

from collections.abc import Iterator
from typing import NamedTuple

from cqs.patterns.piece import Axis, Piece


class View(NamedTuple):
    """Query ``queries[a]`` sees key ``keys[b]`` if ``low <= b - a <= high``.

    The ranges slice the tensors without a copy; what is left is dense, causal or windowed
    attention.
    """

    queries: range
    keys: range
    low: int
    high: int


def views(piece: Piece) -> Iterator[View]:
    """Cut a tidy piece into affine views that have no pair in common.

    One for each pair of offsets within the cells: one for a plain piece, ``step`` for a dilated
    window, but ``size * size`` for diagonal blocks, which are better visited by key runs.

    Example:
        >>> from cqs.patterns import dilated
        >>> (piece,) = dilated(1, 0, 2).bind(6).pieces
        >>> [tuple(view) for view in views(piece)]
        [(range(0, 6, 2), range(0, 6, 2), -1, 0), (range(1, 6, 2), range(1, 6, 2), -1, 0)]
    """
    for offset in range(piece.queries.width):
        first = max(offset + piece.inner_low, 0)
        last = min(offset + piece.inner_high, piece.keys.width - 1)
        for key_offset in range(first, last + 1):
            queries, keys = _slice(piece.queries, offset), _slice(piece.keys, key_offset)
            if queries and keys:
                shift = _cell(piece.queries, queries) - _cell(piece.keys, keys)
                yield View(queries, keys, piece.low + shift, piece.high + shift)


def _slice(axis: Axis, offset: int) -> range:
    """Return the tokens at one offset of their cells."""
    ahead = (axis.origin + offset - axis.tokens.start) % axis.step
    return range(axis.tokens.start + ahead, axis.tokens.stop, axis.step)


def _cell(axis: Axis, tokens: range) -> int:
    return (tokens.start - axis.origin) // axis.step
