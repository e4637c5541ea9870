"""Placement of packed documents: which task computes which queries, in arrays.

Queries stay with the task that holds their tokens, with two exceptions. The last rows of a document
join those before them if they are few. Tasks above a limit give rows to tasks below it.

Rows with the most live pairs are given first, because sending a row costs the same whatever it
sees. These are whole documents, or stretches of short ones, and a part of one document for the
rest. Every query has all its keys in one task, so nothing is merged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from cqs.patterns.bound_documents import BoundDocuments, Integers
from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.task import Step

_UNITS = 64
"""Stretches of short documents that a task's queries are divided into, which are given whole."""
_SLACK = 0.005
"""Live pairs, relative to the mean of the tasks, by which a cut may move to whole documents or
tiles."""
_LEAST_PARTS = 8
"""Queries of a shard relative to the last rows of a document, at least, if
the task before computes these rows."""
_KEY_COST = 0.25
"""Bytes of a key and its value relative to those of a query and its output: KV heads per query
head, here as in Llama 3."""


class Ranges(NamedTuple):
    """Disjoint ranges of tokens of several tasks: arrays of one length."""

    task: Integers
    """Index of the task, ascending."""
    start: Integers
    """First token, ascending within a task."""
    stop: Integers
    """Last token + 1."""

    def task_ranges(self, index: int) -> list[range]:
        """Return the token ranges of one task."""
        first, end = np.searchsorted(self.task, (index, index + 1))
        return list(map(range, self.start[first:end].tolist(), self.stop[first:end].tolist()))


@dataclass(frozen=True, eq=False)
class Placement:
    """The tasks that compute the queries of packed documents, and the traffic that they require."""

    documents: BoundDocuments
    """The live pairs."""
    marks: Integers
    """First query that each task holds, and the number of queries."""
    key_marks: Integers
    """First key that each task holds, and the number of keys."""
    queries: Ranges
    """The queries that each task computes. All live pairs are in exactly one range."""

    @cached_property
    def live_pairs(self) -> Integers:
        """Number of live pairs of each task."""
        task, *ends = self.queries
        before, after = map(self.documents.live_before, ends)
        live_pairs = np.zeros(len(self.marks) - 1, np.int64)
        np.add.at(live_pairs, task, after - before)
        return live_pairs

    @property
    def balance(self) -> float:
        """Live pairs of the busiest task, relative to the mean of all tasks."""
        return float(self.live_pairs.max() / max(self.live_pairs.mean(), 1))

    @cached_property
    def keys(self) -> Ranges:
        """The keys that each task reads."""
        task, *ends = self.queries
        return unite(Ranges(task, *self.documents.keys_of(*ends)))

    def steps(self, parts: Sequence[tuple[int, range]]) -> list[Step]:
        """Return a step for every part of the queries that has a live pair.

        Args:
            parts: For every part the query group of its step, and the queries.
        """
        # In arrays, because a count of few rows takes as long as one of many.
        ends = np.array([(part.start, part.stop) for _, part in parts], np.int64).reshape(-1, 2)
        live_pairs = np.diff(self.documents.live_before(ends))[:, 0]
        is_live = live_pairs > 0
        columns = *self.documents.keys_of(*ends[is_live].T), live_pairs[is_live]
        counted = zip(compress(parts, is_live), *map(np.ndarray.tolist, columns), strict=True)
        return [
            Step(group, queries, (range(start, stop),), None, pairs)
            for (group, queries), start, stop, pairs in counted
        ]

    @cached_property
    def moved(self) -> tuple[Integers, Integers]:
        """Numbers of queries and of keys that each task holds and each task computes with.

        Two arrays ``[num_tasks, num_tasks]``, holders first; the diagonals stay where they are.
        """
        return count_rows(self.marks, self.queries), count_rows(self.key_marks, self.keys)

    def moved_bytes(self, shape: AttentionShape) -> int:
        """Return the bytes that all tasks receive and return in a forward pass."""
        queries, keys = (int(rows.sum() - rows.trace()) for rows in self.moved)
        output = shape.batch * shape.num_heads * queries * shape.value_columns * shape.itemsize
        return shape.query_bytes(queries) + shape.key_bytes(keys) + output


@lru_cache(maxsize=32)
def place_documents(
    documents: BoundDocuments,
    shards: tuple[int, ...],
    key_shards: tuple[int, ...],
    tile: int,
    tolerance: float,
) -> Placement:
    """Assign every query to a task.

    Args:
        documents: The live pairs.
        shards: Number of queries that each task holds, one after another; together all queries.
        key_shards: Number of keys that each task holds, one after another; together all keys.
        tile: Number of rows of a kernel's tile; documents are cut at multiples if balance allows.
        tolerance: Live pairs of a task above the mean, relative to the mean, from which it gives
            rows to others; infinite if all rows stay.
    """
    marks, key_marks = (np.cumsum([0, *lengths]) for lengths in (shards, key_shards))
    homes = _join_tails(documents, marks) if math.isfinite(tolerance) else marks
    loads = np.diff(documents.live_before(homes))
    limit, slack = (1 + tolerance) * max(loads.mean(), 1), _SLACK * loads.mean()
    division = _Division(documents, homes, loads, limit, slack, tile)
    given = division.choose_rows()
    ends, receivers = division.divide(given)
    cuts = np.unique(np.concatenate([homes, *given, ends]))
    starts, stops = cuts[:-1], cuts[1:]
    task = np.searchsorted(homes, starts, side="right") - 1
    if len(receivers):
        begun, ended = (np.searchsorted(edges, starts, side="right") for edges in given)
        takers = receivers[np.searchsorted(ends, starts, side="right")]
        task = np.where(begun > ended, takers, task)
    live = np.diff(documents.live_before(cuts)) > 0
    queries = unite(Ranges(task[live], starts[live], stops[live]))
    return Placement(documents, marks, key_marks, queries)


def _join_tails(documents: BoundDocuments, marks: Integers) -> Integers:
    """Assign the last rows of a document to the task before if its other keys cost more to send.

    Returns:
        First query of each task's share, and the number of queries.
    """
    homes, inner = marks.copy(), marks[1:-1]
    if not len(documents.starts):
        return homes
    document = np.maximum(np.searchsorted(documents.starts, inner, side="right") - 1, 0)
    rows, keys = documents.stops[document] - inner, inner - documents.starts[document]
    is_cheap = (1 + _KEY_COST) * rows < _KEY_COST * keys
    is_tail = (rows > 0) & (_LEAST_PARTS * rows <= np.diff(marks)[1:])
    homes[1:-1] += np.where(is_cheap & is_tail, rows, 0)
    return homes


class _Division(NamedTuple):
    """Divides the rows that tasks above a limit give away among the others."""

    documents: BoundDocuments
    """The live pairs."""
    homes: Integers
    """First query of each task, and the number of queries."""
    loads: Integers
    """Live pairs of each task's queries."""
    limit: float
    """Live pairs that a task keeps at most."""
    slack: float
    """Live pairs by which a cut may move."""
    tile: int
    """Number of rows of a kernel's tile."""

    def choose_rows(self) -> Integers:
        """Choose the rows that tasks above the limit give away.

        Returns:
            Ranges of queries ``[2, number]`` in ascending order: the first ones, and the last + 1.
        """
        documents, homes, loads = self.documents, self.homes, self.loads
        size = max(int(homes[-1]) // (len(loads) * _UNITS), 1)
        is_long = documents.stops - documents.starts >= size
        is_first = np.diff(documents.starts // size, prepend=-1) > 0
        breaks = documents.starts[is_first | is_long], documents.stops[is_long]
        cuts = np.unique(np.concatenate([homes, *breaks]))
        pairs = np.diff(documents.live_before(cuts))
        has_pairs = pairs > 0
        pairs, starts, stops = pairs[has_pairs], cuts[:-1][has_pairs], cuts[1:][has_pairs]
        home = np.searchsorted(homes, starts, side="right") - 1
        key_starts, key_stops = documents.keys_of(starts, stops)
        value = pairs / (stops - starts + _KEY_COST * (key_stops - key_starts))
        order = np.lexsort((-value, home))
        cumulative = np.empty_like(pairs)
        cumulative[order] = np.cumsum(pairs[order]) - pairs[order]
        kept_before = cumulative - (np.cumsum(loads) - loads)[home]
        wanted = np.clip((loads - self.limit)[home] - kept_before, 0, pairs)
        # What remains of a stretch, or is given of it, is not worth a cut if it is little.
        wanted[(wanted < pairs) & (wanted <= self.slack)] = 0
        wanted = np.where((wanted > 0) & (pairs - wanted <= self.slack), pairs, wanted)
        chosen = wanted > 0
        wanted, starts, stops = wanted[chosen], starts[chosen], stops[chosen]
        partial = wanted < pairs[chosen]
        if partial.any():
            cut = self._cut_part(starts[partial], stops[partial], wanted[partial])
            starts[partial], stops[partial] = cut
        return np.array([starts, stops])

    def _cut_part(
        self, starts: Integers, stops: Integers, wanted: Integers
    ) -> tuple[Integers, Integers]:
        """Return rows within ranges that have about ``wanted`` live pairs and are cheap to send.

        Late rows of a causal document see the most keys, so few of them are enough; but all keys
        before them must be sent to each receiver. With a cost of c per key and r receivers, sending
        rows of which the last sees b keys and the first a keys costs ``b - a + c r b``. For a given
        number of pairs, ``b^2 - a^2``, the minimum has ``b = (1 + c r) a``.
        """
        documents = self.documents
        before = documents.live_before(stops)
        if documents.is_causal:
            ratio = 1 + _KEY_COST * np.ceil(wanted / (self.limit - self.loads).max())
            last_keys = np.sqrt(2 * wanted * ratio**2 / (ratio**2 - 1)).astype(np.int64)
            _, key_stops = documents.keys_of(starts, stops)
            document = np.searchsorted(documents.starts, stops, side="left") - 1
            best = stops - np.maximum(key_stops - documents.key_starts[document] - last_keys, 0)
            least = documents.rows_with(documents.live_before(starts) + np.ceil(wanted).astype(int))
            best = np.maximum(best, np.minimum(least, stops))
            is_inside = best > np.maximum(starts, documents.starts[document])
            stops = np.where(is_inside, self._snap(best), stops)
            before = documents.live_before(stops)
        first = documents.rows_with(np.maximum(before - wanted.astype(np.int64), 0))
        return np.clip(self._snap(first), starts, stops), stops

    def divide(self, given: Integers) -> tuple[Integers, Integers]:
        """Divide rows among as few tasks as have room for them.

        Args:
            given: Ranges of queries ``[2, number]``, ascending.

        Returns:
            Where the rows of one receiver end and those of the next begin, and the receivers.
        """
        room = self.limit - self.loads
        if not given.size or not (room > 0).any():
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        before, after = self.documents.live_before(given)
        reached = np.cumsum(after - before)
        total = reached[-1]
        order = np.argsort(-room, kind="stable")
        filled = np.cumsum(np.maximum(room[order], 0))
        enough = int(np.searchsorted(filled, total - self.slack)) + 1
        number = min(enough, np.count_nonzero(room > 0))
        receivers = order[:number][::-1]  # the smallest first: later rows read more keys
        ends = np.cumsum(room[receivers])
        ends = (ends * (total / ends[-1])).astype(np.int64)[:-1]
        place = np.minimum(np.searchsorted(reached, ends, side="right"), len(reached) - 1)
        rows = self.documents.rows_with(after[place] - (reached[place] - ends))
        return np.clip(self._snap(rows), *given[:, place]), receivers

    def _snap(self, rows: Integers) -> Integers:
        """Move cuts to ends of documents, else to multiples of the tile within them."""
        documents, tile = self.documents, self.tile
        document = np.maximum(np.searchsorted(documents.starts, rows, side="right") - 1, 0)
        first, last = documents.starts[document], documents.stops[document]
        aligned = np.minimum(first + (rows - first + tile // 2) // tile * tile, last)
        border = np.where(rows - first < last - rows, first, last)
        before, snapped = documents.live_before(rows), rows
        for moved in (aligned, border):
            is_near = np.abs(documents.live_before(moved) - before) <= self.slack
            snapped = np.where(is_near, moved, snapped)
        return snapped


def unite(ranges: Ranges) -> Ranges:
    """Sort ranges by task and token, and join overlapping and adjacent ones of one task."""
    task, start, stop = ranges
    if not len(task):
        return ranges
    order = np.lexsort((start, task))
    task, start, stop = task[order], start[order], stop[order]
    shift = task * (int(stop.max()) + 2)  # ranges of different tasks do not touch
    reached = np.maximum.accumulate(stop + shift)
    first = np.flatnonzero(np.append(True, start[1:] + shift[1:] > reached[:-1]))
    last = np.append(first[1:], len(task)) - 1
    return Ranges(task[first], start[first], reached[last] - shift[first])


def count_rows(marks: Integers, ranges: Ranges) -> Integers:
    """Return the number of tokens that each task holds and each task has in its ranges.

    Args:
        marks: First token that each task holds, and the number of tokens.
        ranges: Ranges of as many tasks.

    Returns:
        Numbers of tokens ``[num_tasks, num_tasks]``, holders first.
    """
    num_tasks, span = len(marks) - 1, int(marks[-1]) + 1
    # All tasks share one axis, on which task i has the tokens from i * span.
    start, stop = (np.append(0, ends + ranges.task * span) for ends in ranges[1:])
    points = np.arange(num_tasks)[:, None] * span + marks
    last = np.searchsorted(start[1:], points)  # the range that begins last before a point
    before = np.cumsum(stop - start)[last] - np.maximum(stop[last] - points, 0)
    return np.asarray(np.diff(before).T)
