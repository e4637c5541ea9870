"""Patterns made from token positions: global tokens, Longformer, packed documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice, pairwise
from typing import Any

from cqs.arguments import as_bool, as_integer, to_integer
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.patterns.regular import bind_pieces, causal, sliding_window
from cqs.ranges import overlap
from cqs.uncompiled import uncompiled

_MOST = 2**20
"""Largest number of elements of a list argument, which may be an endless iterator."""


@uncompiled
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


@uncompiled
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


@uncompiled
def documents(cu_seqlens: Any, cu_seqlens_kv: Any = None, *, is_causal: bool = True) -> Pattern:
    """Return the pattern of packed documents: a query sees only keys of its own document.

    This is the block-diagonal mask of variable-length FlashAttention. Queries and keys after the
    last document are masked out.

    Args:
        cu_seqlens: Cumulative numbers of queries of the documents, ``[num_documents + 1]``:
            integers that begin with 0 and do not decrease, as a sequence, array or tensor.
        cu_seqlens_kv: Cumulative numbers of keys of the documents, ``[num_documents + 1]``.
            ``None`` means that queries and keys are the same tokens, so ``seqlen_q`` must equal
            ``seqlen_kv``.
        is_causal: Whether a query sees only keys up to its own position. Positions are aligned at
            the end of each document: its last query sees all its keys. ``& causal()`` and
            ``is_causal=True`` of :func:`cqs.attention` have the same effect.

    Raises:
        TypeError: Cumulative lengths are not integers, or ``is_causal`` is not a bool.
        ValueError: Cumulative lengths do not begin with 0, decrease, or differ in number.

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


def _cumulative(name: str, lengths: Any) -> tuple[int, ...]:
    ends = tuple(to_integer(each, f"{name} must be integers") for each in as_list(name, lengths))
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
        columns = [_cells(keys, *run) for run in self.runs]
        rows = (Piece(_cells(queries, *run), keys) for run in self.runs)
        rest = (Piece(_cells(queries, *gap), column) for gap in gaps for column in columns)
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

    @property
    def default_lengths(self) -> tuple[int, int] | None:  # type: ignore[override]
        """Number of queries and of keys of all documents; ``None`` without ``cu_seqlens_kv``."""
        return None if self.ends_kv is None else (self.ends[-1], self.ends_kv[-1])

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the lengths are equal or, with ``cu_seqlens_kv``, hold all documents."""
        if self.ends_kv is None:
            return lengths[0] == lengths[1]
        return lengths[0] >= self.ends[-1] and lengths[1] >= self.ends_kv[-1]

    def offsets(self, lengths: Lengths) -> set[int]:
        """Return the differences between the ends of keys and of queries of the documents."""
        ends = zip(self.ends[1:], (self.ends_kv or self.ends)[1:], strict=True)
        return {stop_kv - stop for stop, stop_kv in ends}

    def intersected(self, other: Pattern) -> Pattern | None:
        """Return documents with a causal mask for ``& causal()``, else ``None``."""
        return replace(self, is_causal=True) if other == causal() else None

    def _bind(self, lengths: Lengths) -> BoundPattern:
        if not self.suits(lengths):
            raise ValueError(
                f"cu_seqlens and cu_seqlens_kv must be those of {lengths.seqlen_q} queries and "
                f"{lengths.seqlen_kv} keys, got {self!r}: pass both where lengths differ"
            )
        high = 0 if self.is_causal else FAR
        pieces = (
            Piece(
                _to_the_end(*of_queries, lengths.seqlen_q),
                _to_the_end(*of_keys, lengths.seqlen_kv),
                high=high,
            )
            for of_queries, of_keys in zip(
                pairwise(self.ends), pairwise(self.ends_kv or self.ends), strict=True
            )
        )
        return bind_pieces(lengths, pieces)

    def __repr__(self) -> str:
        ends_kv = "" if self.ends_kv is None else f", {list(self.ends_kv)}"
        return f"documents({list(self.ends)}{ends_kv}, is_causal={self.is_causal})"


def _to_the_end(start: int, stop: int, length: int) -> Axis:
    """Return a document's tokens with cells counted from its end, where its diagonal ends."""
    return Axis(overlap(range(start, stop), range(length)), stop)


def _cells(axis: Axis, start: int, stop: int) -> Axis:
    """Return the part of an axis with cells ``start .. stop - 1``: tokens at these positions."""
    return axis.within_cells(start, stop - 1)


def _as_runs(name: str, indices: Any) -> tuple[tuple[int, int], ...]:
    """Join positions, or the first n for a number n, into runs of adjacent tokens."""
    if isinstance(indices, range) and indices.step == 1:
        as_integer(name, indices.start, 0)
        return ((indices.start, indices.stop),) if indices else ()
    if not isinstance(indices, Sequence) and not hasattr(indices, "__iter__"):
        number = as_integer(name, indices, 0)
        return ((0, number),) if number else ()
    tokens = sorted({as_integer(name, each, 0) for each in as_list(name, indices)})
    # Adjacent tokens are as far from their places in the list.
    groups = groupby(enumerate(tokens), key=lambda place: place[1] - place[0])
    runs = ([token for _, token in group] for _, group in groups)
    return tuple((run[0], run[-1] + 1) for run in runs)


def as_list(name: str, values: Any, most: int = _MOST) -> list[Any]:
    """Return up to ``most`` elements of an iterable or array as a list of Python numbers."""
    try:
        elements = values.tolist() if hasattr(values, "tolist") else values
        found = list(islice(elements, most + 1))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None
    if len(found) > most:
        raise ValueError(f"{name} must have at most {most} elements")
    return found
