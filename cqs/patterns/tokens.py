"""Patterns that name tokens: global tokens, Longformer, packed documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.patterns.regular import bind_pieces, sliding_window
from cqs.scheduler.arguments import as_bool, as_integer, to_integer
from cqs.uncompiled import uncompiled

_MOST = 2**20
"""Numbers in a row; more are better said otherwise, and may be an endless range."""


@uncompiled
def global_tokens(indices: int | Iterable[int]) -> Pattern:
    """Some tokens see every key, and every query sees them.

    Not causal. A pair attends if the position of the query or the key is among ``indices``; those
    beyond the sequence do nothing. G runs of adjacent tokens make at most about G * G pieces.

    Args:
        indices: Positions, in any order; a number n stands for the first n.

    Example:
        >>> global_tokens(1).to_mask(3).astype(int).tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    return _GlobalTokens(_as_runs("indices", indices))


@uncompiled
def longformer(window: int, global_tokens: int | Iterable[int]) -> Pattern:
    """A sliding window of ``window // 2`` keys on either side, and global tokens.

    The pattern of Longformer (Beltagy et al., arXiv 2004.05150), whose window of w has w / 2 tokens
    on each side of the query's own. Not causal.

    Args:
        window: Number of keys around each query, besides its own.
        global_tokens: As in :func:`global_tokens`: positions, or the number of the first.

    Example:
        >>> longformer(2, 1).to_mask(5).astype(int)[3].tolist()
        [1, 0, 1, 1, 1]
    """
    side = as_integer("window", window, 0) // 2
    return sliding_window(side, side) | _GlobalTokens(_as_runs("global_tokens", global_tokens))


@uncompiled
def documents(cumulative_lengths: Any, is_causal: bool = True) -> Pattern:
    """Documents packed one after another; a query sees the keys of its own.

    The block-diagonal mask of packed sequences. Tokens after the last document, and queries before
    the first key, belong to none: they see nothing and nobody sees them.

    Args:
        cumulative_lengths: Where each document begins, and where the last ends: integers that
            begin with 0 and never decrease, as ``cu_seqlens`` in flash attention; also an array.
        is_causal: Whether a query sees only the keys up to its own position.

    Example:
        >>> documents([0, 2, 3]).to_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    rule = "cumulative_lengths must be integers"
    ends = tuple(
        to_integer(each, rule) for each in as_list("cumulative_lengths", cumulative_lengths)
    )
    if not ends or ends[0] != 0 or any(end < start for start, end in pairwise(ends)):
        raise ValueError(
            f"cumulative_lengths must begin with 0 and never decrease, got {list(ends)}"
        )
    return _Documents(ends, as_bool("is_causal", is_causal))


@dataclass(frozen=True, repr=False)
class _GlobalTokens(Pattern):
    runs: tuple[tuple[int, int], ...]
    """First token, last + 1; ascending, apart."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        edges = [-FAR, *(edge for run in self.runs for edge in run), FAR]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        columns = [_cells(keys, *run) for run in self.runs]
        pieces = [Piece(_cells(queries, *run), keys) for run in self.runs]
        pieces += [Piece(_cells(queries, *gap), column) for gap in gaps for column in columns]
        return bind_pieces(lengths, pieces)

    def __repr__(self) -> str:
        if len(self.runs) == 1:
            return "global_tokens(range({}, {}))".format(*self.runs[0])
        runs = (str(a) if b == a + 1 else f"*range({a}, {b})" for a, b in self.runs)
        return f"global_tokens([{', '.join(runs)}])"


@dataclass(frozen=True, repr=False)
class _Documents(Pattern):
    ends: tuple[int, ...]
    is_causal: bool

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        high = 0 if self.is_causal else FAR
        return bind_pieces(
            lengths,
            [
                Piece(_cells(queries, *document), _cells(keys, *document), high=high)
                for document in pairwise(self.ends)
            ],
        )

    def __repr__(self) -> str:
        return f"documents({list(self.ends)}, is_causal={self.is_causal})"


def _cells(axis: Axis, start: int, stop: int) -> Axis:
    """Keep the cells ``start .. stop - 1`` of an axis: its tokens at these positions."""
    return axis.within_cells(start, stop - 1)


def _as_runs(name: str, indices: Any) -> tuple[tuple[int, int], ...]:
    """Join positions, or the first so many, into runs of adjacent tokens."""
    if isinstance(indices, range) and indices.step == 1:
        as_integer(name, indices.start, 0)
        return ((indices.start, indices.stop),) if indices else ()
    if not isinstance(indices, Sequence) and not hasattr(indices, "__iter__"):
        number = as_integer(name, indices, 0)
        return ((0, number),) if number else ()
    tokens = sorted({as_integer(name, each, 0) for each in as_list(name, indices)})
    runs: list[tuple[int, int]] = []
    for token in tokens:
        if runs and runs[-1][1] == token:
            runs[-1] = runs[-1][0], token + 1
        else:
            runs.append((token, token + 1))
    return tuple(runs)


def as_list(name: str, values: Any) -> list[Any]:
    """Return the elements of an iterable, not too many; of an array, as Python numbers."""
    try:
        elements = values.tolist() if hasattr(values, "tolist") else values
        found = list(islice(elements, _MOST + 1))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None
    if len(found) > _MOST:
        raise ValueError(f"{name} must have at most {_MOST} elements")
    return found
