"""Packed documents at given lengths, as arrays: exact counts by prefix sums."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.algebra import MAX_PIECES, tidy_all
from cqs.patterns.bound import BoundPattern, check_tokens
from cqs.patterns.piece import FAR, Axis, Piece, count_band
from cqs.patterns.views import View
from cqs.ranges import overlap

Integers = NDArray[np.int64]


class BoundDocuments(BoundPattern):
    """Live pairs of packed documents: diagonal blocks that are ascending on both sides.

    A count takes O(log documents), and :attr:`pieces` are made on first access.
    """

    def __init__(
        self, seqlen_q: int, seqlen_kv: int, ends: Integers, ends_kv: Integers, *, is_causal: bool
    ) -> None:
        """Bind documents to lengths.

        Args:
            seqlen_q: Number of queries, less than 2**31 for counts of 64 bits.
            seqlen_kv: Number of keys, less than 2**31 for counts of 64 bits.
            ends: Cumulative numbers of queries, ``[num_documents + 1]``, at most ``seqlen_q``.
            ends_kv: Cumulative numbers of keys, ``[num_documents + 1]``, at most ``seqlen_kv``.
            is_causal: Whether documents are causal, aligned at their ends.

        Raises:
            ValueError: There are more than 65,536 documents with queries and keys.
        """
        has_pairs = (np.diff(ends) > 0) & (np.diff(ends_kv) > 0)
        if (number := np.count_nonzero(has_pairs)) > MAX_PIECES:
            raise ValueError(f"documents with pairs must be at most {MAX_PIECES}, got {number}")
        marks = ends[:-1], ends[1:], ends_kv[:-1], ends_kv[1:]
        starts, stops, key_starts, key_stops = (edges[has_pairs] for edges in marks)
        # ``blocks`` of the base class has pairs beside the pieces, of which documents have none.
        fields: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "blocks": None}
        fields |= {"is_causal": is_causal, "starts": starts, "stops": stops}
        fields |= {"key_starts": key_starts, "key_stops": key_stops}
        vars(self).update(fields)  # the base class is frozen

    is_causal: bool
    starts: Integers
    """First query of every document that has queries and keys, ascending."""
    stops: Integers
    """Last query + 1 of every document."""
    key_starts: Integers
    """First key of every document."""
    key_stops: Integers
    """Last key + 1 of every document."""

    def __eq__(self, other: object) -> bool:
        """Return whether two patterns have the same lengths and documents."""
        return isinstance(other, BoundDocuments) and self._content == other._content

    __hash__ = BoundPattern.__hash__

    @cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.is_causal, tuple(self._edge_lists[1])))

    @property
    def _content(self) -> tuple[Any, ...]:
        return self.lengths, self.is_causal, self._edge_lists

    @cached_property
    def _edge_lists(self) -> list[list[int]]:
        """First query, last + 1, first key, last + 1 of every document, as Python integers."""
        edges = self.starts, self.stops, self.key_starts, self.key_stops
        return [edge.tolist() for edge in edges]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """One piece for every document with a live pair."""
        high = 0 if self.is_causal else FAR
        return tuple(
            tidy_all(
                Piece(Axis(range(q, q_stop), q_stop), Axis(range(k, k_stop), k_stop), high=high)
                for q, q_stop, k, k_stop in zip(*self._edge_lists, strict=True)
            )
        )

    @cached_property
    def _cumulative(self) -> Integers:
        """Live pairs of all documents before each one, and of all."""
        pairs = self._sizes[0] * self._sizes[1]
        if self.is_causal:
            pairs = _triangles(self._sizes[1]) - _triangles(self._ahead)
        return np.concatenate([[0], np.cumsum(pairs)], dtype=np.int64)

    @cached_property
    def _sizes(self) -> tuple[Integers, Integers]:
        """Number of queries and of keys of every document."""
        return self.stops - self.starts, self.key_stops - self.key_starts

    @cached_property
    def _ahead(self) -> Integers:
        """Keys minus queries of every document: row i of a causal one sees ``i + 1 + ahead``."""
        return self._sizes[1] - self._sizes[0]

    @cached_property
    def _offsets(self) -> Integers:
        """Live pairs before every document, less those that its missing first rows would have."""
        return self._cumulative[:-1] - _triangles(self._ahead)

    def live_before(self, rows: Integers) -> Integers:
        """Return the number of live pairs of all queries before each of the given ones.

        Args:
            rows: Query indices from 0 to ``seqlen_q``, in any order.
        """
        if not len(self.starts):
            return np.zeros_like(rows)
        document = np.maximum(np.searchsorted(self.starts, rows, side="right") - 1, 0)
        inside = np.minimum(rows, self.stops[document]) - self.starts[document]
        own: Integers = np.maximum(inside, 0)
        if self.is_causal:
            return self._offsets[document] + _triangles(own + self._ahead[document])
        return np.asarray(self._cumulative[document] + own * self._sizes[1][document])

    def rows_with(self, live_pairs: Integers) -> Integers:
        """Return query indices before which there are about so many live pairs.

        Args:
            live_pairs: Numbers of live pairs, at most that of all.
        """
        document = np.searchsorted(self._cumulative[1:-1], live_pairs, side="right")
        num_rows, num_keys = (sizes[document] for sizes in self._sizes)
        exact: NDArray[np.float64] = (live_pairs - self._cumulative[document]) / num_keys
        if self.is_causal:
            # The root of the triangle T(x) = x (x + 1) / 2.
            triangle = live_pairs - self._offsets[document]
            exact = np.sqrt(2.0 * triangle + 0.25) - 0.5 - self._ahead[document]
        rows = np.minimum(np.rint(exact).astype(np.int64), num_rows)
        return np.asarray(self.starts[document] + np.maximum(rows, 0))

    def keys_of(self, starts: Integers, stops: Integers) -> tuple[Integers, Integers]:
        """Return the first key and the last + 1 that ranges of queries read.

        Args:
            starts: First query of every range.
            stops: Last query + 1 of every range. Every range has a live pair.
        """
        first = np.searchsorted(self.stops, starts, side="right")
        last = np.searchsorted(self.starts, stops, side="left") - 1
        key_stops = self.key_stops[last]
        if self.is_causal:
            key_stops = np.minimum(key_stops, key_stops + stops - self.stops[last])
            # The last document has no key for these rows: those of the one before end earlier.
            key_stops = np.maximum(key_stops, self.key_starts[last])
        return self.key_starts[first], key_stops

    def count(self, queries: range, keys: range) -> int:
        """Return the exact number of live pairs within a rectangle; see the base class."""
        queries, keys = check_tokens("queries", queries), check_tokens("keys", keys)
        documents = self._meeting(queries, keys)
        ends = {*documents[:1], *documents[-1:]}
        total = sum(count_band(*self._within(i, queries, keys)) for i in ends)
        if inner := documents[1:-1]:
            total += int(self._cumulative[inner.stop] - self._cumulative[inner.start])
        return total

    def _meeting(self, queries: range, keys: range) -> range:
        """Return the documents that have queries and keys in a rectangle."""
        if not (queries and keys):
            return range(0)
        starts, stops, key_starts, key_stops = self._edge_lists
        first = max(bisect_right(stops, queries.start), bisect_right(key_stops, keys.start))
        end = min(bisect_left(starts, queries.stop), bisect_left(key_starts, keys.stop))
        return range(first, end)

    def _within(self, document: int, queries: range, keys: range) -> tuple[int, ...]:
        """Return rows, columns and band of a document's part of a rectangle."""
        start, stop, key_start, key_stop = (edges[document] for edges in self._edge_lists)
        rows = overlap(range(start, stop), queries)
        columns = overlap(range(key_start, key_stop), keys)
        high = key_stop - stop if self.is_causal else FAR
        return rows.start, rows.stop, columns.start, columns.stop, -FAR, high

    def views(self, queries: range, keys: range) -> Iterator[View]:
        """Yield one view for each document with a live pair; see the base class."""
        for document in self._meeting(queries, keys):
            row, row_stop, key, key_stop, _, high = self._within(document, queries, keys)
            row, key_stop = max(row, key - high), min(key_stop, row_stop + high)
            if row < row_stop and key < key_stop:
                low, high = key - row_stop + 1, min(high, key_stop - 1 - row)
                yield View(range(row, row_stop), range(key, key_stop), low, high)


def _triangles(sides: Integers) -> Integers:
    """Return the numbers of pairs of causal triangles; those without a side have none."""
    sides = np.maximum(sides, 0)
    return np.asarray(sides * (sides + 1) // 2)
