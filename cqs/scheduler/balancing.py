"""Balance live pairs across tasks: tasks above the mean give rows of their strips to others."""

from cqs.scheduler.token_groups import Strip, TokenGroups

TOLERANCE = 100
"""The busiest task may exceed the mean by one part in this number, that is, by 1 %."""


def balance_rows(strips: list[list[Strip]], token_groups: TokenGroups) -> list[list[Strip]]:
    """Move rows between tasks with the same keys until none exceeds the mean by 1 % or a row.

    The tasks with the most live pairs give their first rows to those with the fewest. More excess
    than a row, or a tile of rows, remains where all others lack less than one.

    Args:
        strips: The strips of every task.
        token_groups: The token groups.
    """
    mean = -(-sum(strip.live_pairs for owned in strips for strip in owned) // len(strips))
    balancer = Balancer(token_groups, mean + mean // TOLERANCE, mean, len(strips))
    for index, owned in enumerate(strips):
        for strip in owned:
            # A strip without live pairs can be cut nowhere, and no step computes it.
            if strip.live_pairs:
                balancer.add(index, strip)
    balancer.level()
    return balancer.strips


class Balancer:
    """The strips of each task. Tasks above a limit give rows to others, which can take any rows."""

    def __init__(self, token_groups: TokenGroups, limit: int, goal: int, num_tasks: int) -> None:
        """Start with no strips.

        Args:
            token_groups: The token groups, which count live pairs.
            limit: A task with more live pairs gives some away.
            goal: Live pairs that givers and receivers should have, between the mean and ``limit``.
            num_tasks: Number of tasks.
        """
        self.strips: list[list[Strip]] = [[] for _ in range(num_tasks)]
        self._live_pairs = [0] * num_tasks
        self._token_groups, self._limit, self._goal = token_groups, limit, goal

    def add(self, index: int, strip: Strip) -> None:
        """Add a strip with live pairs to a task."""
        self.strips[index].append(strip)
        self._live_pairs[index] += strip.live_pairs

    def level(self) -> None:
        """Move first rows from the tasks with the most live pairs to those with the fewest."""
        live_pairs = self._live_pairs
        order = sorted(range(len(live_pairs)), key=live_pairs.__getitem__)
        low, high = 0, len(order) - 1
        while low < high:
            receiver, giver = order[low], order[high]
            excess, deficit = live_pairs[giver] - self._goal, self._goal - live_pairs[receiver]
            if live_pairs[giver] <= self._limit:
                high -= 1
                continue
            first = min(self.strips[giver], key=lambda strip: strip.queries.start)
            # Without a row that fits, the one with the smaller difference is left as it is.
            if not self._move_rows(giver, first, receiver, min(excess, deficit)):
                low, high = (low + 1, high) if excess > deficit else (low, high - 1)

    def _move_rows(self, giver: int, strip: Strip, receiver: int, most: int) -> int:
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
        self._live_pairs[giver] -= moved.live_pairs
        self.add(receiver, moved)
        return moved.live_pairs

    def _cut(self, strip: Strip, most: int) -> tuple[Strip | None, Strip | None]:
        """Cut off the first rows with at most ``most`` live pairs."""
        return self._token_groups.cut_strip(strip, most, self._token_groups.unit(strip.queries))
