"""Routing tables: which rows of each shard a rank sends to and receives from the others."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from cqs.ranges import moved, overlap
from cqs.scheduler.held_bytes import Flow
from cqs.scheduler.placement import Ranges, count_rows

HeadsOfRanks = tuple[range, ...]
"""A range of heads for every rank; all ranges have one length."""


class Route:
    """Routing table of one rank for queries or keys: the rows that it sends and receives.

    Example:
        >>> shards = [range(0, 4), range(4, 8)]
        >>> route = Route(shards, [(range(0, 2), range(6, 8)), (range(2, 8),)], 1)
        >>> route.sends, route.receives, route.held
        (((range(2, 4),), (range(0, 4),)), (2, 4), (range(2, 8),))
    """

    def __init__(
        self, shards: Sequence[range], wanted: Sequence[tuple[range, ...]], rank: int
    ) -> None:
        """Count the rows that every rank requires of every other.

        Args:
            shards: For every rank, the token positions of its shard.
            wanted: For every rank, the token positions that it requires, in ascending ranges.
            rank: The rank that this routing table belongs to.
        """
        self.shards, self.wanted, self.rank = shards, wanted, rank
        self.held = wanted[rank]
        """Positions of the received tokens: ascending ranges, in the order of the ranks."""
        ends = [
            (peer, part.start, part.stop) for peer, parts in enumerate(wanted) for part in parts
        ]
        marks = np.array([0, *(shard.stop for shard in shards)])
        self.numbers = count_rows(marks, Ranges(*np.array(ends, np.int64).reshape(-1, 3).T))
        """Number of rows of every rank's shard that every rank requires, ``[ranks, ranks]``."""
        self.lengths = tuple(self.numbers[rank].tolist())
        """Number of rows that this rank sends to every rank, itself included."""
        self.receives = tuple(self.numbers[:, rank].tolist())
        """Number of rows that this rank receives from every rank, itself included."""
        self.num_moved = int(self.numbers.sum() - self.numbers.trace())
        """Number of rows that all ranks send to others."""
        self.is_local = not self.num_moved and all(len(parts) <= 1 for parts in wanted)
        """Whether every rank requires one range of its own rows, or none; equal on all ranks."""
        own = self.lengths[rank]  # as many as it receives from itself
        self.stays = sum(self.lengths) == own == sum(self.receives)
        """Whether this rank neither sends rows to nor receives rows from other ranks."""

    @cached_property
    def sends(self) -> tuple[tuple[range, ...], ...]:
        """For every rank, ascending ranges of the rows of this rank's shard that are sent to it."""
        own = self.shards[self.rank]
        return tuple(
            tuple(moved(tokens, -own.start) for tokens in _common(own, ranges))
            for ranges in self.wanted
        )

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """Numbers of rows of every rank."""
        own = self.numbers.diagonal()
        columns = self.numbers.sum(axis=0), self.numbers.sum(axis=1) - own, own
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(Flow(there, back, kept, self.is_local) for there, back, kept in numbers)

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
