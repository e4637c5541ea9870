"""Patterns of one or two affine pieces: windows, strides and diagonal blocks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cqs.arguments import as_integer
from cqs.patterns.algebra import tidy_all
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern
from cqs.patterns.piece import FAR, Piece


def bind_pieces(lengths: Lengths, pieces: Iterable[Piece]) -> BoundPattern:
    """Return the bound pattern of disjoint pieces."""
    return BoundPattern(*lengths, tuple(tidy_all(pieces)))


def causal() -> Pattern:
    """Return the causal pattern: a query at position p sees the keys ``j <= p``.

    Query i is at position ``p = i + seqlen_kv - seqlen_q``, aligned at the bottom right.

    Example:
        >>> causal().to_mask(2, 3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    return _Regular("causal", (), _window)


def sliding_window(left: int | None, right: int | None = 0) -> Pattern:
    """Return a sliding window: a query at position p sees the keys ``p - left .. p + right``.

    Query i is at position ``p = i + seqlen_kv - seqlen_q``. The window is causal if ``right`` is 0.
    ``sliding_window(None, None)`` allows every pair.

    Args:
        left: Number of keys before the query's position, at least 0; ``None`` sets no limit.
        right: Number of keys after the query's position, at least 0; ``None`` sets no limit.

    Raises:
        TypeError: ``left`` or ``right`` is neither an integer nor ``None``.
        ValueError: ``left`` or ``right`` is negative.

    Example:
        >>> sliding_window(2, 0).count(range(100, 200), range(100, 200))
        297
    """
    left = None if left is None else as_integer("left", left, 0)
    right = None if right is None else as_integer("right", right, 0)
    if (left, right) == (None, 0):
        return causal()
    return _Regular("sliding_window", (left, right), _window)


def dilated(left: int, right: int, step: int) -> Pattern:
    """Return a dilated window: a query sees keys ``p + step * n`` for ``-left <= n <= right``.

    This is the dilated sliding window of Longformer (Beltagy et al., arXiv 2004.05150). Query i is
    at position ``p = i + seqlen_kv - seqlen_q``.

    Args:
        left: Number of keys before the query's position, at least 0.
        right: Number of keys after the query's position, at least 0.
        step: Distance between neighbouring keys, in tokens, at least 1.

    Example:
        >>> dilated(1, 1, 2).to_mask(5)[2].astype(int).tolist()
        [1, 0, 1, 0, 1]
    """
    left, right = as_integer("left", left, 0), as_integer("right", right, 0)
    step = as_integer("step", step, 1)
    if step == 1:
        return sliding_window(left, right)
    return _Regular("dilated", (left, right, step), _dilated)


def strided(stride: int) -> Pattern:
    """Return strided attention: the last ``stride`` keys, and every ``stride``-th key before.

    The pattern is causal: a query at position p sees key j if ``0 <= p - j < stride`` or ``p - j``
    is a positive multiple of ``stride``. This is the union of the two heads of strided attention
    (Child et al., arXiv 1904.10509). Query i is at position ``p = i + seqlen_kv - seqlen_q``.

    Example:
        >>> strided(3).to_mask(8)[7].astype(int).tolist()
        [0, 1, 0, 0, 1, 1, 1, 1]
    """
    return _Regular("strided", (as_integer("stride", stride, 1),), _strided)


def fixed(stride: int, columns: int) -> Pattern:
    """Return fixed attention: a query's own block, and summary columns of all earlier blocks.

    The pattern is causal: a query at position p sees key j if ``j <= p`` in the block of p, or if
    j is in an earlier block and ``j % stride >= stride - columns``. This is the union of the two
    heads of fixed attention (Child et al., arXiv 1904.10509).

    Args:
        stride: Tokens per block, at least 1; blocks are counted from the first key.
        columns: Number of summary columns at the end of each block, from 0 to ``stride``.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is out of range.

    Example:
        >>> fixed(4, 1).to_mask(8)[5].astype(int).tolist()
        [0, 0, 0, 1, 1, 1, 0, 0]
    """
    stride, columns = as_integer("stride", stride, 1), as_integer("columns", columns, 0)
    if columns > stride:
        raise ValueError(f"columns must be at most stride = {stride}, got {columns}")
    return _Regular("fixed", (stride, columns), _fixed)


def block_diagonal(size: int) -> Pattern:
    """Return diagonal blocks: a query at position p sees keys with ``j // size == p // size``.

    The pattern is non-causal; ``block_diagonal(size) & causal()`` is causal. Blocks of ``size``
    tokens are counted from the first key.

    Example:
        >>> block_diagonal(2).to_mask(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    return _Regular("block_diagonal", (as_integer("size", size, 1),), _block_diagonal)


@dataclass(frozen=True, repr=False)
class _Regular(Pattern):
    maker: str
    """Name of the function that makes the pattern."""
    arguments: tuple[int | None, ...]
    pieces: Callable[..., list[Piece]]
    """Returns the pieces of the pattern, given lengths and the arguments."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return bind_pieces(lengths, self.pieces(lengths, *self.arguments))

    def __repr__(self) -> str:
        return f"{self.maker}({', '.join(map(str, self.arguments))})"


def _window(lengths: Lengths, left: int | None = None, right: int | None = 0) -> list[Piece]:
    low = -FAR if left is None else -left
    return [Piece(lengths.queries(), lengths.keys(), low, FAR if right is None else right)]


def _dilated(lengths: Lengths, left: int, right: int, step: int) -> list[Piece]:
    return [Piece(lengths.queries(step), lengths.keys(step), -left, right, 0, 0)]


def _strided(lengths: Lengths, stride: int) -> list[Piece]:
    earlier = Piece(lengths.queries(stride), lengths.keys(stride), -FAR, -1, 0, 0)
    return [*_window(lengths, stride - 1), earlier]


def _fixed(lengths: Lengths, stride: int, columns: int) -> list[Piece]:
    queries, keys = lengths.queries(stride), lengths.keys(stride)
    pieces = [Piece(queries, keys, 0, 0, inner_high=0)]
    if columns:
        summary = keys._replace(origin=stride - columns, width=columns)
        pieces.append(Piece(queries, summary, -FAR, -1))
    return pieces


def _block_diagonal(lengths: Lengths, size: int) -> list[Piece]:
    return [Piece(lengths.queries(size), lengths.keys(size), 0, 0)]
