"""Routing tables: which rows of each shard a rank sends to and receives from the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from cqs.patterns.bound_documents import Integers
from cqs.ranges import moved, overlap
from cqs.scheduler.held_bytes import Flow
from cqs.scheduler.placement import Ranges, count_rows

HeadsOfRanks = tuple[range, ...]
"""A range of heads for every rank; all ranges have one length."""


@dataclass(frozen=True, eq=False)
class Route:
    """Routing table of one rank for queries or keys: the rows that it sends and receives.

    Example:
        >>> shards = [range(0, 4), range(4, 8)]
        >>> route = Route(shards, [(range(0, 2), range(6, 8)), (range(2, 8),)], 1)
        >>> route.sends, route.receives, route.held
        (((range(2, 4),), (range(0, 4),)), (2, 4), (range(2, 8),))
    """

    shards: Sequence[range]
    """For every rank, the token positions of its shard."""
    wanted: Sequence[tuple[range, ...]]
    """For every rank, the token positions that it requires, in ascending ranges."""
    rank: int
    """The rank that this routing table belongs to."""

    @cached_property
    def held(self) -> tuple[range, ...]:
        """Positions of the received tokens: ascending ranges, in the order of the ranks."""
        return self.wanted[self.rank]

    @cached_property
    def sends(self) -> tuple[tuple[range, ...], ...]:
        """For every rank, ascending ranges of the rows of this rank's shard that are sent to it."""
        own = self.shards[self.rank]
        return tuple(
            tuple(moved(tokens, -own.start) for tokens in _common(own, ranges))
            for ranges in self.wanted
        )

    @cached_property
    def numbers(self) -> Integers:
        """Number of rows of every rank's shard that every rank requires, ``[ranks, ranks]``."""
        ranges = [
            (rank, tokens.start, tokens.stop)
            for rank, wanted in enumerate(self.wanted)
            for tokens in wanted
        ]
        marks = np.array([0, *(shard.stop for shard in self.shards)])
        return count_rows(marks, Ranges(*np.array(ranges, np.int64).reshape(-1, 3).T))

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """Numbers of rows of every rank."""
        own = self.numbers.diagonal()
        columns = self.numbers.sum(axis=0), self.numbers.sum(axis=1) - own, own
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(Flow(there, back, kept, self.is_local) for there, back, kept in numbers)

    @property
    def num_moved(self) -> int:
        """Number of rows that all ranks send to others."""
        return int(self.numbers.sum() - self.numbers.trace())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows that this rank sends to every rank, itself included."""
        return tuple(self.numbers[self.rank].tolist())

    @cached_property
    def receives(self) -> tuple[int, ...]:
        """Number of rows that this rank receives from every rank, itself included."""
        return tuple(self.numbers[:, self.rank].tolist())

    def find_offsets(self, *, is_home: bool) -> tuple[tuple[int, ...], int]:
        """Return row offsets in the send buffers of all ranks, ordered by receiving rank.

        Args:
            is_home: Whether the rows are results, which are sent in reverse.

        Returns:
            For every rank, the index of the first row that it packs for this rank; and the number
            of rows in the largest send buffer of any rank.
        """
        counts = (self.numbers.T if is_home else self.numbers).copy()
        np.fill_diagonal(counts, 0)
        firsts = tuple(counts[:, : self.rank].sum(axis=1).tolist())
        return firsts, int(counts.sum(axis=1).max())

    @cached_property
    def stays(self) -> bool:
        """Whether this rank neither sends rows to nor receives rows from other ranks."""
        own = self.lengths[self.rank]  # as many as it receives from itself
        return sum(self.lengths) == own == sum(self.receives)

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank requires one range of its own rows, or none; equal on all ranks."""
        return not self.num_moved and all(len(ranges) <= 1 for ranges in self.wanted)


def cut_shards(lengths: Sequence[int]) -> list[range]:
    """Return the token positions of every shard, given the number of tokens of each.

    Example:
        >>> cut_shards([2, 0, 3])
        [range(0, 2), range(2, 2), range(2, 5)]
    """
    return [range(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _common(tokens: range, ranges: Sequence[range]) -> list[range]:
    """Return the non-empty intersections of the ranges with ``tokens``."""
    return [common for wanted in ranges if (common := overlap(tokens, wanted))]
