"""Token groups of an attention problem, and the steps that compute parts of its scores."""

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from cqs.ranges import overlap
from cqs.scheduler.task import Step, join_ranges


class Strip(NamedTuple):
    """Query rows of one group with the keys that a task pairs them with: what balancing moves."""

    query_group: int
    """Token group of the queries."""
    queries: range
    """The query rows."""
    keys: tuple[range, ...]
    """Ranges of whole key groups; in quorum plans with a pattern one group."""
    live_pairs: int
    """Number of live pairs of the strip."""


@dataclass(frozen=True)
class TokenGroups:
    """Contiguous ranges of queries and keys, and the live pairs between them."""

    seqlen_q: int
    seqlen_kv: int
    number: int
    """Number of groups."""
    is_causal: bool
    tile: int
    """Number of tokens at whose multiples groups are cut, see :func:`cqs.make_plan`."""
    pattern: Any = None
    """A :class:`cqs.patterns.BoundPattern`, which includes the causal mask, or ``None``."""
    parts: int = 1
    """Number of consecutive groups of another division that each group consists of."""

    @cached_property
    def queries(self) -> tuple[range, ...]:
        """The queries of each group, except those of which all keys are masked by causality."""
        first = max(self.seqlen_q - self.seqlen_kv, 0) if self.is_causal else 0
        return self._cut(first, self.seqlen_q)

    @cached_property
    def keys(self) -> tuple[range, ...]:
        """Ranges that tile the keys; range i belongs to group ``i % number``."""
        prefix = self._cut(0, self.num_prefix) if self.num_prefix else ()
        return *prefix, *self._cut(self.num_prefix, self.seqlen_kv)

    def merged(self, size: int) -> "TokenGroups":
        """Return the groups that consist of ``size`` consecutive groups each."""
        return replace(self, number=self.number // size, parts=self.parts * size)

    @property
    def num_prefix(self) -> int:
        """Number of keys before the first query's position, which every causal query sees."""
        has_diagonal = self.is_causal or self.pattern is not None
        return max(self.seqlen_kv - self.seqlen_q, 0) if has_diagonal else 0

    def keys_of(self, groups: Iterable[int]) -> list[range]:
        """Return the key groups of some groups."""
        laps = range(0, len(self.keys), self.number)
        return [self.keys[lap + group] for group in groups for lap in laps]

    def count(self, queries: range, keys: range) -> int:
        """Return the number of live pairs of a range of queries and a range of keys."""
        if self.pattern is not None:
            return int(self.pattern.count(queries, keys))
        if not self.is_causal:
            return len(queries) * len(keys)
        above = self.seqlen_kv - self.seqlen_q - keys.start
        # Row i sees the first i + 1 + above of the keys, at least none and at most all.
        first, last = (max(row + above, 0) for row in (queries.start, queries.stop))
        return _staircase(last, len(keys)) - _staircase(first, len(keys)) if queries else 0

    def count_area(self, queries: range, keys: Iterable[range]) -> int:
        """Return the number of live pairs of a range of queries and several ranges of keys."""
        return sum(self.count(queries, key_range) for key_range in keys)

    def unit(self, queries: range) -> int:
        """Return the number of rows at whose multiples a range of queries is cut."""
        return self.tile if len(queries) >= 2 * self.tile else 1

    def steps(self, strips: Iterable[Strip]) -> list[Step]:
        """Return the steps that compute the live pairs of strips without a common row, ordered."""
        return [
            step
            for _, queries, keys, _ in sorted(strips, key=lambda strip: strip.queries.start)
            for group, rows in self.cut(queries)
            for step in self.steps_of_group(group, rows, keys)
        ]

    def strip(self, group: int, queries: range, keys: tuple[range, ...]) -> Strip:
        """Return the strip of queries of one group and some keys."""
        return Strip(group, queries, keys, self.count_area(queries, keys))

    def cut(self, queries: range) -> Iterator[tuple[int, range]]:
        """Cut a range of queries at the ends of groups; yield the group and queries of each part.

        Queries that see no key by causality are dropped.
        """
        for group in _overlapping(self.queries, queries):
            yield group, overlap(self.queries[group], queries)

    def steps_of_group(self, group: int, queries: range, keys: Sequence[range]) -> list[Step]:
        """Return the steps that compute the live pairs of rows of one group.

        Args:
            group: Index of the group.
            queries: Some or all queries of the group.
            keys: Disjoint ranges of whole key groups, in any order.
        """
        if self.pattern is not None:
            columns = [_overlapping(self.keys, run) for run in join_ranges(keys)]
            strips = [self.live_strips([(group, queries)], part) for part in columns if part]
            return self.join(chain(*strips)) if queries else []
        square = None
        if self.is_causal:
            # The first key of the rows' causal square: keys are cut where queries are, so that who
            # has it has the whole square.
            first = queries.start + self.seqlen_kv - self.seqlen_q
            if any(key_range.start <= first < key_range.stop for key_range in keys):
                square = range(first, first + len(queries))
            keys = [range(key_range.start, min(key_range.stop, first)) for key_range in keys]
        return [Step.of(group, queries, keys, square)] if queries and (square or any(keys)) else []

    def live_strips(
        self,
        rows: Sequence[tuple[int, range]],
        columns: Sequence[int],
        live_pairs: int | None = None,
    ) -> Generator[Strip, None, int]:
        """Yield a strip for every query group and key group that have a live pair.

        The score matrix is halved recursively, so each empty part costs one count.

        Args:
            rows: Adjacent query groups, each with its index and queries.
            columns: Indices of adjacent key groups, except empty ones.
            live_pairs: Number of live pairs of them, if it is known.

        Returns:
            The number of live pairs.
        """
        queries = range(rows[0][1].start, rows[-1][1].stop)
        keys = range(self.keys[columns[0]].start, self.keys[columns[-1]].stop)
        if live_pairs is None:
            live_pairs = self.count(queries, keys)
        if live_pairs and len(rows) == len(columns) == 1:
            yield Strip(rows[0][0], queries, (keys,), live_pairs)
        elif live_pairs:
            i, k = (len(rows) // 2, 0) if len(rows) >= len(columns) else (0, len(columns) // 2)
            first = yield from self.live_strips(rows[:i] or rows, columns[:k] or columns)
            yield from self.live_strips(rows[i:], columns[k:], live_pairs - first)
        return live_pairs

    def cut_strip(self, strip: Strip, most: int, unit: int) -> tuple[Strip | None, Strip | None]:
        """Cut off the first rows with at most ``most`` live pairs, at a multiple of ``unit`` rows.

        Returns:
            The first part and the rest; ``None`` for an empty part.
        """
        if strip.live_pairs <= most:
            return strip, None
        group, queries, keys, live_pairs = strip

        def count(cut: int) -> int:
            return self.count_area(range(queries.start, cut), keys)

        cuts = range(queries.start + unit, queries.stop, unit)
        number = bisect_right(cuts, most, key=count)
        middle = cuts[number - 1] if number else queries.start
        if not (first := count(middle)):
            return None, strip
        return (
            Strip(group, range(queries.start, middle), keys, first),
            Strip(group, range(middle, queries.stop), keys, live_pairs - first),
        )

    def join(self, strips: Iterable[Strip]) -> list[Step]:
        """Join the strips of one task into steps of several key groups without a common row.

        Rows are cut where their set of live key groups changes. Rows without a live pair are
        removed from both ends of a step.

        Args:
            strips: Strips of one task without a common pair.

        Returns:
            Steps ordered by query group and row.
        """
        steps: list[Step] = []
        by_query_group = attrgetter("query_group")
        for query_group, group in groupby(sorted(strips, key=by_query_group), by_query_group):
            owned = list(group)
            edges = {edge for s in owned for edge in (s.queries.start, s.queries.stop)}
            parts: list[tuple[list[range], range, int]] = []
            for queries in starmap(range, pairwise(sorted(edges))):
                there = [strip.keys[0] for strip in owned if queries.start in strip.queries]
                counts = {keys: self.count(queries, keys) for keys in there}
                live = sorted(filter(counts.get, counts), key=attrgetter("start"))
                parts.append((live, queries, sum(counts.values())))
            for keys, run in groupby(parts, itemgetter(0)):
                _, spans, numbers = zip(*run, strict=True)
                if keys:
                    rows = self._seeing(range(spans[0].start, spans[-1].stop), keys)
                    steps.append(Step(query_group, rows, join_ranges(keys), None, sum(numbers)))
        return steps

    def held_keys(self, steps: Iterable[Step]) -> list[int]:
        """Return the ascending indices among :attr:`keys` of the key groups that steps read."""
        blocks = [block.keys for step in steps for block in step.blocks()]
        return sorted({i for keys in set(blocks) for i in _overlapping(self.keys, keys)})

    def _seeing(self, queries: range, keys: Sequence[range]) -> range:
        """Return the rows from the first to the last that has a live pair; there is one."""

        def is_live(start: int, stop: int) -> bool:
            return any(self.count(range(start, stop), key_range) for key_range in keys)

        start, stop = queries.start, queries.stop
        if not is_live(start, start + 1):
            start += bisect_left(queries, True, key=lambda row: is_live(start, row + 1))
        if not is_live(stop - 1, stop):
            rows = range(start, stop)
            stop = start + bisect_left(rows, True, key=lambda row: not is_live(row, stop))
        return range(start, stop)

    def _cut(self, start: int, stop: int) -> tuple[range, ...]:
        """Cut ``range(start, stop)`` into one range per group; sizes differ by at most a tile."""
        length, parts = stop - start, self.number * self.parts
        tile = self.tile if length >= parts * self.tile else 1
        num_tiles = -(-length // tile)
        marks = [
            start + min(g * num_tiles // parts * tile, length)
            for g in range(0, parts + 1, self.parts)
        ]
        return tuple(map(range, marks[:-1], marks[1:]))


def _overlapping(groups: Sequence[range], tokens: range) -> list[int]:
    """Return the indices of the groups that share a token with ``tokens``, ascending."""
    first = bisect_right(groups, tokens.start, key=attrgetter("stop"))
    end = bisect_left(groups, tokens.stop, key=attrgetter("start"))
    return [i for i in range(first, end) if groups[i]]


def _staircase(rows: int, width: int) -> int:
    """Return the number of pairs of ``rows`` rows that see 1, 2, ..., at most ``width`` keys."""
    short = min(rows, width)
    return short * (short + 1) // 2 + (rows - short) * width
