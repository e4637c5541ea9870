"""What every worker owns of a pattern, and what it would cost it to own more."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from cqs.scheduler.quorum import pair_offsets
from cqs.scheduler.strips import Count, Strip, cut_strip


class Shares:
    """Strips of one key group each, by owner. Sets of token groups are integers, a bit for each."""

    def __init__(
        self,
        query_groups: Sequence[range],
        key_groups: Sequence[range],
        interest_set: tuple[int, ...],
        tile: int,
        count: Count,
    ):
        """Begin with nothing owned; the arguments are those of ``level_work``."""
        self.num_workers = len(query_groups)
        self.strips: list[list[Strip]] = [[] for _ in query_groups]
        self.live_pairs = [0] * self.num_workers
        self._held = [0] * self.num_workers
        self._query_groups, self._key_groups = query_groups, key_groups
        self._quorum_size, self._tile, self._count = len(interest_set), tile, count
        partners, shared = pair_offsets(interest_set, self.num_workers)
        self._owner_offsets: dict[int, tuple[int, ...]] = {
            (b - a) % self.num_workers: (a,) for a, groups in partners.items() for b in groups
        }
        if shared is not None:
            self._owner_offsets[self.num_workers // 2] = shared
        self._holder_offsets = [
            [a for a in interest_set if (a + distance) % self.num_workers in interest_set]
            for distance in range(self.num_workers)
        ]

    def holders(self, strip: Strip) -> list[int]:
        """List the workers whose quorum holds both groups of a strip."""
        distance = (strip.key_groups[0] - strip.query_group) % self.num_workers
        offsets = self._holder_offsets[distance]
        return [(strip.query_group - offset) % self.num_workers for offset in offsets]

    def plain_parts(self, strip: Strip) -> list[tuple[Strip, int]]:
        """Name the owner of a strip in a plan without a pattern; if two share it, cut it in two."""
        distance = (strip.key_groups[0] - strip.query_group) % self.num_workers
        offsets = self._owner_offsets[distance]
        owners = [(strip.query_group - offset) % self.num_workers for offset in offsets]
        parts = (strip,) if len(owners) == 1 else self._cut(strip, strip.live_pairs // 2)
        return [(part, owner) for part, owner in zip(parts, owners, strict=True) if part]

    def groups(self, strip: Strip) -> int:
        """Return the token groups that a strip needs."""
        return 1 << strip.query_group | 1 << strip.key_groups[0] % self.num_workers

    def num_new(self, worker: int, groups: int) -> int:
        """Return how many of some groups a worker does not hold yet."""
        return (groups & ~self._held[worker]).bit_count()

    def cost(self, worker: int, groups: int) -> int:
        """Return 1, and 1 for each group to hold newly; many for one more than in a quorum."""
        if not (new := self.num_new(worker, groups)):
            return 1
        beyond = self._held[worker].bit_count() + new - self._quorum_size
        return 1 + new + self.num_workers * max(beyond, 0)

    def add(self, worker: int, strip: Strip) -> None:
        """Give a strip to a worker."""
        self.strips[worker].append(strip)
        self.live_pairs[worker] += strip.live_pairs
        self._held[worker] |= self.groups(strip)

    def pass_on(self, giver: int, strip: Strip, receiver: int, most: int) -> int:
        """Pass on the first rows of a strip that have at most so many live pairs.

        Returns:
            How many; 0 if a single row, or tile of rows, has more.
        """
        passed, rest = self._cut(strip, most)
        if passed is None:
            return 0
        self.strips[giver].remove(strip)
        if rest is not None:
            self.strips[giver].append(rest)
        self.live_pairs[giver] -= passed.live_pairs
        self._held[giver] = reduce(or_, map(self.groups, self.strips[giver]), 0)
        self.add(receiver, passed)
        return passed.live_pairs

    def _cut(self, strip: Strip, most: int) -> tuple[Strip | None, Strip | None]:
        """Cut off the first rows with at most so many live pairs, at a tile."""
        group = self._query_groups[strip.query_group]
        unit = self._tile if len(group) >= 2 * self._tile else 1
        return cut_strip(strip, most, unit, self._key_groups[strip.key_groups[0]], self._count)
