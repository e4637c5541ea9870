"""Balance the live pairs of a pattern across tasks that hold quorums.

The quorum of task t are the groups ``t + a`` modulo the number of tasks, for every a of the
interest set; any two groups are in the quorum of some task. A strip is a run of rows of one query
group with the keys of a key group. Its work is its number of live pairs.

With a pattern, groups of equal length do not hold equal work. Balancing has four phases:

1. Assign every pair of groups to a task whose quorum holds both: the owner in a plan without a
   pattern, unless that task is full.
2. Move strips of rows from tasks above the mean to tasks whose quorums hold both groups. A move may
   pass through other tasks, which give away other strips: any two quorums share a group, and every
   task that holds a group may compute it against itself.
3. Move the remaining excess to tasks that must hold a group outside their quorum, also through
   other tasks if this adds fewer groups.
4. Even out single rows that exceed the tolerance.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial, reduce
from heapq import heappop, heappush
from operator import or_

from cqs.scheduler.balancing import TOLERANCE, Balancer
from cqs.scheduler.quorum import owner_offsets
from cqs.scheduler.token_groups import Strip, TokenGroups


def balance_quorums(token_groups: TokenGroups, interest_set: tuple[int, ...]) -> list[list[Strip]]:
    """Assign every live pair to one of ``token_groups.number`` tasks, with balanced work.

    Args:
        token_groups: The token groups of a problem with a pattern.
        interest_set: Difference cover of the integers modulo the number of tasks; contains 0.

    Returns:
        The strips of every task. Every live pair lies in exactly one strip of one task.
    """
    rows, columns = list(enumerate(token_groups.queries)), range(len(token_groups.keys))
    strips = list(token_groups.live_strips(rows, columns))
    mean = -(-sum(strip.live_pairs for strip in strips) // token_groups.number)
    tolerated = mean // TOLERANCE  # a divisor
    balancer = QuorumBalancer(token_groups, mean + tolerated, mean + tolerated // 2, interest_set)
    balancer.assign(strips)
    balancer.rebalance(max(tolerated, 1), within_quorums=True)
    balancer.rebalance(max(tolerated // 2, 1), within_quorums=False)
    balancer.even_out()
    return balancer.strips


class QuorumBalancer(Balancer):
    """The strips of each task, of one key group each, and the groups that the task holds for them.

    Sets of token groups and of tasks are bit masks: bit i of an integer stands for element i.
    """

    def __init__(
        self, token_groups: TokenGroups, limit: int, goal: int, interest_set: tuple[int, ...]
    ) -> None:
        """Start with no strips.

        Args:
            token_groups: The token groups of a problem with a pattern.
            limit: See :class:`Balancer`.
            goal: See :class:`Balancer`.
            interest_set: Difference cover of the integers modulo the number of tasks; contains 0.
        """
        self.num_tasks = token_groups.number
        super().__init__(token_groups, limit, goal, self.num_tasks)
        # Key group i is of token group i % W. Empty ones are equal, but no strip has their keys.
        self._key_groups = {keys: i for i, keys in enumerate(token_groups.keys)}
        self._held = [0] * self.num_tasks
        self._holding = [0] * self.num_tasks
        """Bit mask of the tasks that hold each group."""
        self._quorum_size = len(interest_set)
        self._owner_offsets = owner_offsets(interest_set, self.num_tasks)
        """Offsets of the owners of a pair of groups by their distance: two at distance W / 2."""
        self._holder_offsets = [
            [a for a in interest_set if (a + distance) % self.num_tasks in interest_set]
            for distance in range(self.num_tasks)
        ]

    def assign(self, strips: list[Strip]) -> None:
        """Assign every strip to a task whose quorum holds its groups.

        Strips with a single candidate are assigned first, then the largest. Candidates are compared
        by their excess over the limit, then in this order: the owner in a plan without a pattern,
        the fewest newly held groups, the least work.
        """
        parts = [part for strip in strips for part in self._plain_parts(strip)]
        parts.sort(key=lambda part: (len(self._holders(part[0])) > 1, -part[0].live_pairs))
        for strip, owner in parts:
            choices = []
            for index in self._holders(strip):
                total = self._live_pairs[index] + strip.live_pairs
                new = self._num_new(index, strip)
                choices.append((max(total - self._limit, 0), index != owner, new, total, index))
            *_, chosen = min(choices)
            self.add(chosen, strip)

    def rebalance(self, least: int, *, within_quorums: bool) -> None:
        """Move work away from tasks above the limit, the busiest first.

        Args:
            least: Size of the smallest strip that is moved, and the smallest deficit that is
                filled.
            within_quorums: Whether a strip may move only to tasks whose quorums hold both groups.
        """
        live_pairs = self._live_pairs
        for giver in sorted(range(self.num_tasks), key=lambda giver: -live_pairs[giver]):
            while live_pairs[giver] > self._limit:
                moves = self._find_moves(giver, least, within_quorums)
                if not moves:
                    break
                last = moves[0][2]
                most = min(live_pairs[giver] - self._goal, self._goal - live_pairs[last])
                for move in moves:
                    most = self._move_rows(*move, most)
                if not most:
                    break

    def even_out(self) -> None:
        """Move half the difference from the busiest to the least busy task, until none is too busy.

        This moves rows of many live pairs, which :meth:`rebalance` leaves because they would take a
        task above the goal. It ends early if no strip has rows that are small enough.
        """
        live_pairs = self._live_pairs
        while max(live_pairs) > self._limit:
            giver, receiver = live_pairs.index(max(live_pairs)), live_pairs.index(min(live_pairs))
            half = (live_pairs[giver] - live_pairs[receiver] + 1) // 2
            ranked = sorted(self.strips[giver], key=partial(self._num_new, receiver))
            if not any(self._move_rows(giver, strip, receiver, half) for strip in ranked):
                break

    def _find_moves(
        self, giver: int, least: int, within_quorums: bool
    ) -> list[tuple[int, Strip, int]]:
        """Return the cheapest path of moves from ``giver`` to a task below the goal.

        This is Dijkstra's algorithm on tasks with the costs of :meth:`_cost`. Ties are resolved by
        the largest strip, then by the largest deficit.

        Returns:
            The moves, the last first, each with the task that gives, the strip, and the task that
            receives it or some of its rows; an empty list if no path exists.
        """
        live_pairs = self._live_pairs
        able = [index for index, total in enumerate(live_pairs) if total <= self._limit]
        lacking = sum(1 << index for index in able if self._goal - live_pairs[index] >= least)
        by_step: defaultdict[tuple[int, int], int] = defaultdict(int)
        for index in able:
            for num_new in range(3):
                by_step[self._cost(index, num_new), num_new] |= 1 << index
        steps = sorted(by_step.items())
        givers: dict[int, tuple[int, int]] = {}
        reached, queue = defaultdict(int, {0: 1 << giver}), [(0, giver)]
        bound, end = 1 << 62, giver
        while queue and queue[0][0] + 1 < bound:
            cost, index = heappop(queue)
            strips = [strip for strip in self._largest(index) if strip.live_pairs >= least]
            for (step, num_new), receivers in steps:
                if (total := cost + step) >= bound:
                    break
                for known, tasks in reached.items():
                    receivers &= ~tasks if known <= total else -1
                if not receivers:
                    continue
                by_strip = [self._receivers(strip, num_new, within_quorums) for strip in strips]
                receivers &= reduce(or_, by_strip, 0)
                reached[total] |= receivers
                for receiver in _elements(receivers):
                    givers[receiver] = index, num_new
                    heappush(queue, (total, receiver))
                if ends := receivers & lacking:
                    first = next(common for tasks in by_strip if (common := ends & tasks))
                    bound, end = total, min(_elements(first), key=live_pairs.__getitem__)
        path = []
        while end != giver:
            index, num_new = givers[end]
            for strip in self._largest(index):
                if self._receivers(strip, num_new, within_quorums) >> end & 1:
                    break
            path.append((index, strip, end))
            end = index
        return path

    def _holders(self, strip: Strip) -> list[int]:
        """Return the tasks whose quorums hold both groups of a strip."""
        key_group = self._key_groups[strip.keys[0]]
        offsets = self._holder_offsets[(key_group - strip.query_group) % self.num_tasks]
        return [(strip.query_group - offset) % self.num_tasks for offset in offsets]

    def _plain_parts(self, strip: Strip) -> list[tuple[Strip, int]]:
        """Return (part, owner) pairs of a strip, as in a plan without a pattern.

        A strip shared by two tasks is cut into halves. If the mirrored strip across the diagonal
        has the same number of live pairs, each task gets one whole strip instead.
        """
        lap, group = divmod(self._key_groups[strip.keys[0]], self.num_tasks)
        offsets = self._owner_offsets[(group - strip.query_group) % self.num_tasks]
        owners = [(strip.query_group - offset) % self.num_tasks for offset in offsets]
        if len(owners) == 2:
            queries = self._token_groups.queries[group]
            keys = self._token_groups.keys[lap * self.num_tasks + strip.query_group]
            if self._token_groups.count(queries, keys) == strip.live_pairs:
                owners.pop()  # the mirrored strip has its owners in the other order
        parts = (strip,) if len(owners) == 1 else self._cut(strip, strip.live_pairs // 2)
        return [(part, owner) for part, owner in zip(parts, owners, strict=True) if part]

    def _groups(self, strip: Strip) -> int:
        """Return the bit mask of the token groups that a strip requires."""
        return 1 << strip.query_group | 1 << self._key_groups[strip.keys[0]] % self.num_tasks

    def _num_new(self, index: int, strip: Strip) -> int:
        """Return how many groups of a strip a task does not hold yet."""
        return (self._groups(strip) & ~self._held[index]).bit_count()

    def _cost(self, index: int, num_new: int) -> int:
        """Return the cost of a move: 1, plus 1 per new group, plus W per group beyond a quorum."""
        beyond = self._held[index].bit_count() + num_new - self._quorum_size
        return 1 + num_new + (self.num_tasks * max(beyond, 0) if num_new else 0)

    def _largest(self, index: int) -> list[Strip]:
        """Return a task's largest strip of every pair of groups, the largest first."""
        largest: dict[int, Strip] = {}
        for strip in sorted(self.strips[index], key=lambda strip: -strip.live_pairs):
            largest.setdefault(self._groups(strip), strip)
        return list(largest.values())

    def _receivers(self, strip: Strip, num_new: int, within_quorums: bool) -> int:
        """Return the bit mask of the tasks that could take a strip with ``num_new`` new groups.

        The mask may have bits beyond the number of tasks. With ``within_quorums`` it contains only
        tasks whose quorums hold both groups.
        """
        query_group = strip.query_group
        key_group = self._key_groups[strip.keys[0]] % self.num_tasks
        quorums = sum(1 << index for index in self._holders(strip)) if within_quorums else -1
        if num_new >= 1 + (query_group != key_group):
            return quorums
        one, other = self._holding[query_group], self._holding[key_group]
        return quorums & (one | other if num_new else one & other)

    def add(self, index: int, strip: Strip) -> None:
        """Add a strip to a task, which then holds its groups."""
        super().add(index, strip)
        self._hold(index, self._held[index] | self._groups(strip))

    def _move_rows(self, giver: int, strip: Strip, receiver: int, most: int) -> int:
        """Move rows and the groups that they require, see :meth:`Balancer._move_rows`."""
        number = super()._move_rows(giver, strip, receiver, most)
        if number:
            self._hold(giver, reduce(or_, map(self._groups, self.strips[giver]), 0))
        return number

    def _cut(self, strip: Strip, most: int) -> tuple[Strip | None, Strip | None]:
        """Cut a strip in the unit of its whole group, so that small rests are also cut at tiles."""
        groups = self._token_groups
        return groups.cut_strip(strip, most, groups.unit(groups.queries[strip.query_group]))

    def _hold(self, index: int, groups: int) -> None:
        for group in _elements(self._held[index] ^ groups):
            self._holding[group] ^= 1 << index
        self._held[index] = groups


def _elements(numbers: int) -> Iterator[int]:
    """Yield the numbers whose bits are set, ascending."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
