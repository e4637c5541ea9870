"""Strips: query rows of one group with whole key groups, the units of plans with a pattern."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise, starmap
from operator import attrgetter
from typing import NamedTuple

Count = Callable[[range, range], int]
"""Function that returns the number of live pairs of a range of queries and a range of keys."""


class Strip(NamedTuple):
    """Query rows of one group, and the key groups that they are paired with."""

    query_group: int
    """Token group of the queries."""
    queries: range
    """The query rows."""
    key_groups: tuple[int, ...]
    """Indices among the key groups of the plan, ascending."""
    live_pairs: int
    """Number of live pairs of the strip."""


def live_strips(
    query_groups: Sequence[range], key_groups: Sequence[range], count: Count
) -> Iterator[Strip]:
    """Yield a strip for every query group and single key group that have a live pair.

    The score matrix is halved recursively, so each empty or fully live part costs one count.

    Args:
        query_groups: Ranges that tile the queries.
        key_groups: Ranges that tile the keys.
        count: Returns the number of live pairs of a range of queries and a range of keys.
    """

    def tokens(rows: range, columns: range) -> tuple[range, range]:
        return (
            range(query_groups[rows[0]].start, query_groups[rows[-1]].stop),
            range(key_groups[columns[0]].start, key_groups[columns[-1]].stop),
        )

    everything = range(len(query_groups)), range(len(key_groups))
    left = [(*everything, count(*tokens(*everything)))]
    while left:
        rows, columns, live_pairs = left.pop()
        queries, keys = tokens(rows, columns)
        if not live_pairs:
            continue
        if len(rows) == len(columns) == 1:
            yield Strip(rows[0], queries, (columns[0],), live_pairs)
            continue
        if len(rows) >= len(columns):
            half = len(rows) // 2
            first, second = (rows[:half], columns), (rows[half:], columns)
        else:
            half = len(columns) // 2
            first, second = (rows, columns[:half]), (rows, columns[half:])
        part = tokens(*first)
        is_full = live_pairs == len(queries) * len(keys)
        of_first = len(part[0]) * len(part[1]) if is_full else count(*part)
        left.append((*second, live_pairs - of_first))
        left.append((*first, of_first))


def cut_strip(
    strip: Strip, most: int, unit: int, keys: range, count: Count
) -> tuple[Strip | None, Strip | None]:
    """Cut off as many rows from the start of a strip as have at most ``most`` live pairs.

    Args:
        strip: The strip, with one key group.
        most: Largest number of live pairs to cut off.
        unit: Number of rows, counted from the strip's first row, at whose multiples to cut.
        keys: The keys of the strip's key group.
        count: Returns the number of live pairs of a range of queries and a range of keys.

    Returns:
        The first part and the rest; ``None`` for an empty part.
    """
    if strip.live_pairs <= most:
        return strip, None
    start, stop = strip.queries.start, strip.queries.stop
    cuts = range(start + unit, stop, unit)
    number = bisect_left(cuts, most + 1, key=lambda cut: count(range(start, cut), keys))
    live_pairs = count(range(start, cuts[number - 1]), keys) if number else 0
    if not live_pairs:
        return None, strip
    first = strip._replace(queries=range(start, cuts[number - 1]), live_pairs=live_pairs)
    rest = range(cuts[number - 1], stop)
    return first, strip._replace(queries=rest, live_pairs=strip.live_pairs - live_pairs)


def join_strips(
    strips: Iterable[Strip], key_groups: Sequence[range], count: Count
) -> Iterator[Strip]:
    """Join the strips of one task into strips of several key groups, no two with a common row.

    Rows are cut where their set of live key groups changes. Rows without a live pair are removed
    from both ends of a strip.

    Args:
        strips: Strips of one task, with one key group each and without a common pair.
        key_groups: The keys of every key group of the plan.
        count: Returns the number of live pairs of a range of queries and a range of keys.

    Yields:
        Strips ordered by query group and row.
    """
    by_query_group = attrgetter("query_group")
    for query_group, group in groupby(sorted(strips, key=by_query_group), by_query_group):
        owned = list(group)
        edges = {edge for s in owned for edge in (s.queries.start, s.queries.stop)}
        joined: list[Strip] = []
        for queries in starmap(range, pairwise(sorted(edges))):
            live = {
                strip.key_groups: live_pairs
                for strip in owned
                if queries.start in strip.queries
                if (
                    live_pairs := strip.live_pairs
                    if queries == strip.queries
                    else count(queries, key_groups[strip.key_groups[0]])
                )
            }
            columns = tuple(sorted(chain(*live)))
            live_pairs = sum(live.values())
            if joined and (last := joined[-1]).key_groups == columns:
                if last.queries.stop == queries.start:
                    queries = range(last.queries.start, queries.stop)
                    live_pairs += joined.pop().live_pairs
            if columns:
                joined.append(Strip(query_group, queries, columns, live_pairs))
        for strip in joined:
            yield strip._replace(queries=_seeing(strip, key_groups, count))


def _seeing(strip: Strip, key_groups: Sequence[range], count: Count) -> range:
    """Return the rows of a strip from the first to the last that has a live pair."""

    def is_live(start: int, stop: int) -> bool:
        return any(count(range(start, stop), key_groups[index]) for index in strip.key_groups)

    start, stop = strip.queries.start, strip.queries.stop
    if not is_live(start, start + 1):
        start += bisect_left(strip.queries, True, key=lambda row: is_live(start, row + 1))
    if not is_live(stop - 1, stop):
        stop = start + bisect_left(range(start, stop), True, key=lambda row: not is_live(row, stop))
    return range(start, stop)
