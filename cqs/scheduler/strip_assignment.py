"""Assignment of the strips of a pattern to tasks, while it is being balanced."""

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_

from cqs.scheduler.quorum import pair_offsets
from cqs.scheduler.token_groups import Strip, TokenGroups


class StripAssignment:
    """The strips that each task owns, with one key group each, and the groups that each task holds.

    Sets of token groups and of tasks are bit masks: bit i of an integer stands for element i.
    """

    def __init__(self, token_groups: TokenGroups, interest_set: tuple[int, ...]):
        """Start with no strips. The arguments are documented at ``balance_work``."""
        self.num_tasks = token_groups.number
        self.strips: list[list[Strip]] = [[] for _ in range(self.num_tasks)]
        self.live_pairs = [0] * self.num_tasks
        self._held = [0] * self.num_tasks
        self._holding = [0] * self.num_tasks
        """Bit mask of the tasks that hold each group."""
        self._ranked: dict[int, list[Strip]] = {}
        self._token_groups, self._quorum_size = token_groups, len(interest_set)
        partners, shared = pair_offsets(interest_set, self.num_tasks)
        self._owner_offsets: dict[int, tuple[int, ...]] = {
            (b - a) % self.num_tasks: (a,) for a, groups in partners.items() for b in groups
        }
        if shared is not None:
            self._owner_offsets[self.num_tasks // 2] = shared
        self._holder_offsets = [
            [a for a in interest_set if (a + distance) % self.num_tasks in interest_set]
            for distance in range(self.num_tasks)
        ]

    def holders(self, strip: Strip) -> list[int]:
        """Return the tasks whose quorums hold both groups of a strip."""
        offsets = self._holder_offsets[(strip.key_group - strip.query_group) % self.num_tasks]
        return [(strip.query_group - offset) % self.num_tasks for offset in offsets]

    def plain_parts(self, strip: Strip) -> list[tuple[Strip, int]]:
        """Return (part, owner) pairs of a strip, as in a plan without a pattern.

        A strip shared by two tasks is cut into halves. If the mirrored strip across the diagonal
        has the same number of live pairs, each task gets one whole strip instead.
        """
        lap, group = divmod(strip.key_group, self.num_tasks)
        offsets = self._owner_offsets[(group - strip.query_group) % self.num_tasks]
        owners = [(strip.query_group - offset) % self.num_tasks for offset in offsets]
        if len(owners) == 2:
            queries = self._token_groups.queries[group]
            keys = self._token_groups.keys[lap * self.num_tasks + strip.query_group]
            if self._token_groups.count(queries, keys) == strip.live_pairs:
                owners.pop()
        parts = (strip,) if len(owners) == 1 else self._cut(strip, strip.live_pairs // 2)
        return [(part, owner) for part, owner in zip(parts, owners, strict=True) if part]

    def groups(self, strip: Strip) -> int:
        """Return the bit mask of the token groups that a strip requires."""
        return 1 << strip.query_group | 1 << strip.key_group % self.num_tasks

    def num_new(self, index: int, groups: int) -> int:
        """Return how many groups of the bit mask ``groups`` a task does not hold yet."""
        return (groups & ~self._held[index]).bit_count()

    def cost(self, index: int, num_new: int) -> int:
        """Return the cost of a move: 1, plus 1 per new group, plus W per group beyond a quorum."""
        beyond = self._held[index].bit_count() + num_new - self._quorum_size
        return 1 + num_new + (self.num_tasks * max(beyond, 0) if num_new else 0)

    def ranked(self, index: int) -> list[Strip]:
        """Return a task's largest strip of every pair of groups, the largest first."""
        if index not in self._ranked:
            largest: dict[int, Strip] = {}
            for strip in sorted(self.strips[index], key=lambda strip: -strip.live_pairs):
                largest.setdefault(self.groups(strip), strip)
            self._ranked[index] = list(largest.values())
        return self._ranked[index]

    def receivers(self, strip: Strip, num_new: int, within_quorums: bool) -> int:
        """Return the bit mask of the tasks that could take a strip with ``num_new`` new groups.

        The mask may have bits beyond the number of tasks. With ``within_quorums`` it contains only
        tasks whose quorums hold both groups.
        """
        query_group, key_group = strip.query_group, strip.key_group % self.num_tasks
        quorums = bit_mask(self.holders(strip)) if within_quorums else -1
        if num_new >= 1 + (query_group != key_group):
            return quorums
        one, other = self._holding[query_group], self._holding[key_group]
        return quorums & (one | other if num_new else one & other)

    def add(self, index: int, strip: Strip) -> None:
        """Add a strip to a task."""
        self.strips[index].append(strip)
        self.live_pairs[index] += strip.live_pairs
        self._hold(index, self._held[index] | self.groups(strip))

    def move_rows(self, giver: int, strip: Strip, receiver: int, most: int) -> int:
        """Move the first rows of a strip, with at most ``most`` live pairs, to another task.

        Returns:
            The number of live pairs moved; 0 if the first row or tile of rows has more.
        """
        moved, rest = self._cut(strip, most)
        if moved is None:
            return 0
        self.strips[giver].remove(strip)
        if rest is not None:
            self.strips[giver].append(rest)
        self.live_pairs[giver] -= moved.live_pairs
        self._hold(giver, reduce(or_, map(self.groups, self.strips[giver]), 0))
        self.add(receiver, moved)
        return moved.live_pairs

    def _hold(self, index: int, groups: int) -> None:
        for group in elements(self._held[index] ^ groups):
            self._holding[group] ^= 1 << index
        self._held[index] = groups
        self._ranked.pop(index, None)

    def _cut(self, strip: Strip, most: int) -> tuple[Strip | None, Strip | None]:
        """Cut off the first rows with at most ``most`` live pairs, at a multiple of the tile.

        Returns:
            The first part and the rest; ``None`` for an empty part.
        """
        if strip.live_pairs <= most:
            return strip, None
        groups, queries = self._token_groups, strip.queries
        keys, unit = groups.keys[strip.key_group], groups.unit(groups.queries[strip.query_group])
        middle = groups.cut_rows(queries, [keys], most, unit)
        first, rest = range(queries.start, middle), range(middle, queries.stop)
        live_pairs = groups.count(first, keys)
        if not live_pairs:
            return None, strip
        return (
            strip._replace(queries=first, live_pairs=live_pairs),
            strip._replace(queries=rest, live_pairs=strip.live_pairs - live_pairs),
        )


def bit_mask(numbers: Iterable[int]) -> int:
    """Return the bit mask of a set of numbers."""
    return reduce(or_, (1 << number for number in numbers), 0)


def elements(numbers: int) -> Iterator[int]:
    """Yield the numbers whose bits are set, ascending."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
