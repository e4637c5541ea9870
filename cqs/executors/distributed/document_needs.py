"""The rows that every rank requires for its task of packed documents, in arrays."""

from collections.abc import Sequence

import numpy as np

from cqs.patterns.bound_documents import Integers
from cqs.scheduler import Step
from cqs.scheduler.placement import Placement, Ranges, unite

Wanted = list[tuple[range, ...]]
"""For every rank, ascending token ranges."""


class DocumentNeeds:
    """The queries that every rank computes, in its shard and in those of others.

    A rank computes the queries of its task for its own heads. Only the steps of single ranks are
    made one by one.
    """

    def __init__(
        self,
        placement: Placement,
        shards_q: Sequence[range],
        shards_kv: Sequence[range],
        head_parallel: int,
    ) -> None:
        """Cut the queries of tasks at the ends of shards.

        Args:
            placement: The queries of all tasks.
            shards_q: For every rank, the positions of its queries.
            shards_kv: For every rank, the positions of its keys.
            head_parallel: Number of ranks of a task.
        """
        self._documents, self._num_ranks = placement.documents, len(shards_q)
        self._shards_kv = np.array([(shard.start, shard.stop) for shard in shards_kv])
        first, last = np.array([(shard.start, shard.stop) for shard in shards_q]).T
        self.all = _repeat_per_rank(placement.queries, head_parallel)
        self.keys = _repeat_per_rank(placement.keys, head_parallel)
        rank, start, stop = self.all
        first, last = first[rank], last[rank]
        self.home = self._live(rank, np.maximum(start, first), np.minimum(stop, last))
        before = rank, start, np.minimum(stop, first)
        after = rank, np.maximum(start, last), stop
        # An empty shard has nothing at home; its ends must not cut the queries of its rank.
        both = (np.concatenate(column) for column in zip(before, after, strict=True))
        self.away = unite(self._live(*both))

    def steps(self, ranges: Ranges, rank: int) -> tuple[Step, ...]:
        """Return the steps of one rank; their query group is the rank."""
        _, starts, stops = ranges.task_ranges(rank)
        key_ends = self._documents.keys_of(starts, stops)
        pairs = self._documents.live_before(stops) - self._documents.live_before(starts)
        columns = (column.tolist() for column in (starts, stops, *key_ends, pairs))
        return tuple(
            Step(rank, range(start, stop), (range(key, key_stop),), None, live_pairs)
            for start, stop, key, key_stop, live_pairs in zip(*columns, strict=True)
        )

    def remote_keys(self) -> Ranges:
        """Return the keys that ranks receive in a forward pass.

        Steps at home, and those away, read keys in the rank's shard if it has them all.
        """
        parts = []
        for ranges in (self.home, self.away):
            rank, *ends = ranges
            start, stop = self._documents.keys_of(*ends)
            first, last = self._shards_kv[rank].T
            is_missing = (start < first) | (stop > last)
            receives = np.bincount(rank[is_missing], minlength=self._num_ranks) > 0
            parts.append(tuple(column[receives[rank]] for column in (rank, start, stop)))
        return unite(Ranges(*(np.concatenate(columns) for columns in zip(*parts, strict=True))))

    def listed(self, ranges: Ranges) -> Wanted:
        """Return the ranges of every rank."""
        token_ranges = ranges.listed()
        marks = np.searchsorted(ranges.task, np.arange(self._num_ranks + 1)).tolist()
        return [tuple(token_ranges[a:b]) for a, b in zip(marks, marks[1:], strict=False)]

    def _live(self, rank: Integers, start: Integers, stop: Integers) -> Ranges:
        """Return the ranges that have a live pair."""
        stop = np.maximum(start, stop)
        live = self._documents.live_before(stop) > self._documents.live_before(start)
        return Ranges(rank[live], start[live], stop[live])


def _repeat_per_rank(ranges: Ranges, head_parallel: int) -> Ranges:
    """Repeat the token ranges of every task for each of its ranks."""
    if head_parallel == 1:
        return ranges
    task, start, stop = (np.repeat(column, head_parallel) for column in ranges)
    rank = task * head_parallel + np.tile(np.arange(head_parallel), len(ranges.task))
    order = np.lexsort((start, rank))
    return Ranges(rank[order], start[order], stop[order])
