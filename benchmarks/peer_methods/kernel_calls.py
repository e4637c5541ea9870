"""Kernel calls for chunks of queries and the chunks of keys that they attend to."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from cqs.patterns import BoundPattern
from cqs.patterns.views import View
from cqs.scheduler import Step


class KernelCall(NamedTuple):
    """One kernel call: a range of query rows, a range of key rows, and the steps within."""

    rows: slice
    columns: slice
    steps: tuple[Step, ...]
    """Relative to these rows and columns."""
    patterns: tuple[BoundPattern | None, ...] = (None,)
    """Pattern of each cut of the heads, see :meth:`cqs.problem.Problem.cuts`."""


class RowViews(BoundPattern):
    """Live pairs of rows of tensors, whatever the positions of their tokens."""

    def __init__(self, num_rows: int, num_columns: int, views: tuple[View, ...]) -> None:
        """Take disjoint views of rows and columns."""
        super().__init__(num_rows, num_columns, ())
        vars(self)["_views"] = views  # the base class is frozen

    __eq__, __hash__ = object.__eq__, object.__hash__

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield all views; rows and columns must be all of them."""
        assert (len(queries), len(keys)) == self.lengths
        return iter(vars(self)["_views"])


@lru_cache(maxsize=256)
def make_kernel_call(
    queries: tuple[int, ...], keys: tuple[tuple[int, int], ...], length: int, is_causal: bool
) -> KernelCall | None:
    """Return the kernel call of chunks of queries with the chunks of keys that they attend to.

    Args:
        queries: Indices of the chunks in a tensor of queries, ascending.
        keys: Position in a tensor of keys, and index, of every chunk of keys.
        length: Tokens per chunk.
        is_causal: Whether a chunk attends only to itself, causally, and to chunks before it.

    Returns:
        The call, or ``None`` if there are no live pairs.

    Example:
        >>> call = make_kernel_call((1, 6), ((0, 2), (1, 5)), 10, True)
        >>> call.rows, call.columns
        (slice(10, 20, None), slice(0, 20, None))
        >>> call.steps[0].queries, call.steps[0].keys
        (range(0, 10), (range(0, 20),))
    """
    if is_causal and keys == tuple(enumerate(queries)):  # one square, wherever the chunks are
        tokens = range(len(queries) * length)
        step = Step(0, tokens, (), tokens, len(tokens) * (len(tokens) + 1) // 2)
        return KernelCall(slice(len(tokens)), slice(len(tokens)), (step,))
    full = [[place for place, n in keys if n < chunk or not is_causal] for chunk in queries]
    diagonal = [[place for place, n in keys if n == chunk and is_causal] for chunk in queries]
    seen = [place for places in full + diagonal for place in places]
    if not seen:
        return None
    first, last = min(seen), max(seen)
    blind = sum(not (each or own) for each, own in zip(full, diagonal, strict=True))
    steps: list[Step] = []
    chunks = range(blind, len(queries))
    for (places, own), alike in groupby(chunks, lambda chunk: (full[chunk], diagonal[chunk])):
        (rows,) = join_chunks((chunk - blind for chunk in alike), length)
        squares = join_chunks((place - first for place in own), length)
        pairs = len(rows) * len(places) * length + len(squares) * length * (length + 1) // 2
        columns = join_chunks((place - first for place in places), length)
        steps.append(Step(len(steps), rows, columns, squares[0] if squares else None, pairs))
    return KernelCall(
        slice(blind * length, len(queries) * length),
        slice(first * length, (last + 1) * length),
        tuple(steps),
    )


def join_chunks(chunks: Iterable[int], length: int) -> tuple[range, ...]:
    """Return the rows of chunks, with adjacent chunks joined.

    Example:
        >>> join_chunks([0, 1, 3], 10)
        (range(0, 20), range(30, 40))
    """
    found: list[range] = []
    for chunk in chunks:
        start = chunk * length
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(range(start, (chunk + 1) * length))
    return tuple(found)
