"""Patterns of token positions: windows, strides, diagonal blocks, global tokens, documents."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, ClassVar

import numpy as np

from cqs.arguments import as_bool, as_integer, to_integer
from cqs.patterns.algebra import tidy_all
from cqs.patterns.arrays import adjacent_runs, as_list
from cqs.patterns.bound import BoundPattern
from cqs.patterns.bound_documents import BoundDocuments
from cqs.patterns.pattern import Lengths, Pattern, made_in_graphs, per_head
from cqs.patterns.piece import FAR, Piece


def bind_pieces(lengths: Lengths, pieces: Iterable[Piece]) -> BoundPattern:
    """Return the bound pattern of disjoint pieces."""
    return BoundPattern(*lengths, tuple(tidy_all(pieces)))


@made_in_graphs
def causal() -> Pattern:
    """Return the causal pattern: a query at position p sees the keys ``j <= p``.

    Query i is at position ``p = i + seqlen_kv - seqlen_q``, aligned at the bottom right.

    Example:
        >>> causal().to_mask(2, 3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    return _Regular("causal", (), _window)


@made_in_graphs
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


@made_in_graphs
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


@made_in_graphs
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


@made_in_graphs
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


@made_in_graphs
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


@made_in_graphs
def global_tokens(indices: int | Iterable[int]) -> Pattern:
    """Return the pattern in which some tokens see every key and are seen by every query.

    The pattern is non-causal. A pair is live if the position of its query or key is in ``indices``.
    G runs of adjacent tokens make at most about G * G pieces.

    Args:
        indices: Positions in any order, or a number n for the first n positions. Positions beyond
            the sequence have no effect.

    Example:
        >>> global_tokens(1).to_mask(3).astype(int).tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    return _GlobalTokens(_as_runs("indices", indices))


@made_in_graphs
def longformer(window: int, global_tokens: int | Iterable[int]) -> Pattern:
    """Return the Longformer pattern: a sliding window and global tokens.

    The pattern (Beltagy et al., arXiv 2004.05150) is non-causal.

    Args:
        window: Number of keys around each query, half on either side, without the query's own.
        global_tokens: Positions in any order, or a number n for the first n positions.

    Example:
        >>> longformer(2, 1).to_mask(5).astype(int)[3].tolist()
        [1, 0, 1, 1, 1]
    """
    side = as_integer("window", window, 0) // 2
    return sliding_window(side, side) | _GlobalTokens(_as_runs("global_tokens", global_tokens))


@made_in_graphs
def documents(cu_seqlens: Any, cu_seqlens_kv: Any = None, *, is_causal: bool = True) -> Pattern:
    """Return the pattern of packed documents: a query sees only keys of its own document.

    This is the block-diagonal mask of variable-length FlashAttention. The documents have all
    tokens: padding after the last one is a document of its own.

    Args:
        cu_seqlens: Cumulative numbers of queries of the documents, ``[num_documents + 1]``:
            integers that begin with 0, do not decrease and end at ``seqlen_q``, as a sequence,
            array or tensor.
        cu_seqlens_kv: Cumulative numbers of keys of the documents, ``[num_documents + 1]``, which
            end at ``seqlen_kv``. ``None`` means that queries and keys are the same tokens, so
            ``seqlen_q`` must equal ``seqlen_kv``.
        is_causal: Whether a query sees only keys up to its own position. Positions are aligned at
            the end of each document: its last query sees all its keys. ``& causal()`` and
            ``is_causal=True`` of :func:`cqs.attention` have the same effect.

    Raises:
        TypeError: Cumulative lengths are not integers, or ``is_causal`` is not a bool.
        ValueError: Cumulative lengths do not begin with 0, decrease, or differ in number. Calls
            raise it if they do not end at the numbers of queries and keys of the whole sequence.

    Example:
        >>> documents([0, 2, 3]).to_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        >>> documents([0, 1, 3], [0, 2, 4]).to_mask(3, 4).astype(int).tolist()
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    ends = _cumulative("cu_seqlens", cu_seqlens)
    ends_kv = None if cu_seqlens_kv is None else _cumulative("cu_seqlens_kv", cu_seqlens_kv)
    if ends_kv is not None and len(ends_kv) != len(ends):
        raise ValueError(
            f"cu_seqlens_kv must have as many elements as cu_seqlens, {len(ends)}, "
            f"got {len(ends_kv)}"
        )
    return _Documents(ends, ends_kv, as_bool("is_causal", is_causal))


@made_in_graphs
def padded(lengths: Any, lengths_kv: Any = None) -> Pattern:
    """Return the pattern of a padded batch: element b has only its first ``lengths[b]`` tokens.

    All other queries and keys are masked out. With ``& causal()``, or ``is_causal=True`` of
    :func:`cqs.attention`, positions are aligned at the end of each element: its last query sees all
    its keys.

    Args:
        lengths: Number of queries of every batch element, ``[batch]``: integers, as a sequence,
            array or tensor.
        lengths_kv: Number of keys of every batch element, ``[batch]``; ``None`` means ``lengths``.

    Raises:
        TypeError: A length is not an integer.
        ValueError: A length is negative, or the two numbers of lengths differ.

    Example:
        >>> padded([2, 1]).head(1, 0).to_mask(3, 3).astype(int).tolist()
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    """
    numbers = [as_integer("lengths", length, 0) for length in as_list("lengths", lengths)]
    numbers_kv = numbers
    if lengths_kv is not None:
        numbers_kv = [as_integer("lengths_kv", n, 0) for n in as_list("lengths_kv", lengths_kv)]
    if len(numbers_kv) != len(numbers):
        raise ValueError(
            "lengths and lengths_kv must be of the same batch elements, "
            f"got {len(numbers)} and {len(numbers_kv)}"
        )
    pairs = zip(numbers, numbers_kv, strict=True)
    return per_head([[_Documents((0, n), (0, n_kv), False, True)] for n, n_kv in pairs])


def _cumulative(name: str, lengths: Any) -> tuple[int, ...]:
    ends = tuple(to_integer(end, f"{name} must be integers") for end in as_list(name, lengths))
    if not ends or ends[0] != 0 or any(end < start for start, end in pairwise(ends)):
        raise ValueError(f"{name} must begin with 0 and never decrease, got {list(ends)}")
    return ends


@dataclass(frozen=True, repr=False)
class _GlobalTokens(Pattern):
    runs: tuple[tuple[int, int], ...]
    """(first token, last + 1) of every run, ascending and not adjacent."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        edges = [-FAR, *(edge for run in self.runs for edge in run), FAR]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        columns = [keys.within_cells(*run) for run in self.runs]
        rows = (Piece(queries.within_cells(*run), keys) for run in self.runs)
        rest = (Piece(queries.within_cells(*gap), column) for gap in gaps for column in columns)
        return bind_pieces(lengths, chain(rows, rest))

    def __repr__(self) -> str:
        if len(self.runs) == 1:
            return "global_tokens(range({}, {}))".format(*self.runs[0])
        runs = (str(a) if b == a + 1 else f"*range({a}, {b})" for a, b in self.runs)
        return f"global_tokens([{', '.join(runs)}])"


@dataclass(frozen=True, repr=False)
class _Documents(Pattern):
    ends: tuple[int, ...]
    ends_kv: tuple[int, ...] | None
    """``None`` if queries and keys are the same tokens."""
    is_causal: bool
    is_padded: bool = False
    """Whether the only document may be followed by padding, as of :func:`padded`."""

    advice: ClassVar[str] = (
        "cu_seqlens must end at the lengths, with padding as a document of its own; pass "
        "cu_seqlens_kv too if they differ, and to padded lengths of at most these"
    )

    @property
    def default_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        """Number of queries and of keys of all documents."""
        return self.ends[-1], (self.ends_kv or self.ends)[-1]

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the documents have all tokens, or fit before the padding."""
        least = self.default_lengths
        if self.is_padded:
            return least[0] <= lengths[0] and least[1] <= lengths[1]
        return least == lengths

    def offsets(self, lengths: Lengths) -> set[int]:
        """Return the differences between the ends of keys and of queries of the documents."""
        ends = zip(self.ends[1:], (self.ends_kv or self.ends)[1:], strict=True)
        return {stop_kv - stop for stop, stop_kv in ends}

    def intersected(self, other: Pattern) -> Pattern | None:
        """Return documents for ``& causal()``, and ``&`` other documents of the same tokens."""
        if other == causal():
            return replace(self, is_causal=True)
        if not isinstance(other, _Documents) or (self.ends_kv or other.ends_kv):
            return None
        if self.ends[-1] != other.ends[-1]:
            return None  # one of them suits no lengths of the other
        ends = tuple(sorted({*self.ends, *other.ends}))
        return _Documents(ends, None, self.is_causal or other.is_causal)

    def _bind(self, lengths: Lengths) -> BoundPattern:
        sides = np.array(self.ends), np.array(self.ends_kv or self.ends)
        bound = BoundDocuments(*lengths, *sides, is_causal=self.is_causal)
        return bound if max(lengths) < 2**31 else BoundPattern(*lengths, bound.pieces)

    def __repr__(self) -> str:
        if self.is_padded:
            text = "padded([{}], [{}])".format(*self.default_lengths)
            return f"({text} & causal())" if self.is_causal else text
        ends_kv = "" if self.ends_kv is None else f", {list(self.ends_kv)}"
        return f"documents({list(self.ends)}{ends_kv}, is_causal={self.is_causal})"


def _as_runs(name: str, indices: Any) -> tuple[tuple[int, int], ...]:
    """Join positions, or the first n for a number n, into runs of adjacent tokens."""
    if isinstance(indices, range) and indices.step == 1:
        as_integer(name, indices.start, 0)
        return ((indices.start, indices.stop),) if indices else ()
    if not isinstance(indices, Sequence) and not hasattr(indices, "__iter__"):
        number = as_integer(name, indices, 0)
        return ((0, number),) if number else ()
    tokens = sorted({as_integer(name, index, 0) for index in as_list(name, indices)})
    return tuple((first, last + 1) for first, last in adjacent_runs(tokens))
