"""Attention on devices that stray, are slow and die, played event by event.

Two ways to spread the same work. Tasks that need nothing of each other are taken from one queue; a
death costs the task that was running, which is handed out again. Steps that all devices take
together, as those of a ring, last as long as the slowest device; a death throws all of them back to
what was last saved. How long a task or a step takes is not computed here: :mod:`cqs.simulation`.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cqs.report import measurement

_HOUR = 3600.0
_MOST_DEATHS = 10**6
_DRAWN_AT_ONCE = 1024
_LEAST_REPEATS = 5
"""Of a row whose percentiles say how times stray."""


@dataclass(frozen=True)
class Trouble:
    """What devices do to a schedule; by default nothing."""

    life_hours: float = math.inf
    """Mean time to the death of one device; times to death are exponential."""
    notice_seconds: float = 0.0
    """From a death to the moment when its task is handed out again."""
    repair_seconds: float = 0.0
    """From a death to a device that works in its place, or to all devices working again."""
    slow_share: float = 0.0
    """Chance that a device is slow."""
    slow_factor: float = 1.0
    """How much longer a slow device takes, always."""
    relative_times: tuple[float, ...] = (1.0,)
    """Ascending quantiles of a time over its median, between which times are drawn."""

    def __post_init__(self) -> None:
        """Raise ValueError unless all numbers are possible."""
        for name in ("life_hours", "slow_factor"):
            if not (number := getattr(self, name)) > 0:
                raise ValueError(f"{name} must be positive, got {number:g}")
        for name in ("notice_seconds", "repair_seconds"):
            if not 0 <= (number := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {number:g}")
        if not 0 <= self.slow_share <= 1:
            raise ValueError(f"slow_share must lie in 0..1, got {self.slow_share:g}")
        times = self.relative_times
        if not times or times[0] <= 0 or list(times) != sorted(times):
            raise ValueError("relative_times must be positive and ascending")

    def quantiles(self, chances: np.ndarray) -> np.ndarray:
        """Return the relative times that times stay below with such chances."""
        grid = np.linspace(0, 1, len(self.relative_times))
        return np.asarray(np.interp(chances, grid, self.relative_times))


class Attempt(NamedTuple):
    """One device at one task, in seconds from the beginning."""

    task: int
    device: int
    start: float
    stop: float
    is_finished: bool
    """False: the device died meanwhile."""


@dataclass(frozen=True)
class Outcome:
    """How one call went."""

    seconds: float
    num_deaths: int
    lost_seconds: float
    """Of computation that was thrown away, over all devices."""
    attempts: tuple[Attempt, ...] = ()
    """Of tasks, in the order in which they ended."""


def play_tasks(
    task_seconds: float,
    num_tasks: int,
    num_devices: int,
    trouble: Trouble,
    rng: np.random.Generator,
) -> Outcome:
    """Play tasks that devices take from one queue, each again until it is finished.

    Args:
        task_seconds: Median time of a task on a device that is not slow.
        num_tasks: All are ready at the beginning.
        num_devices: A device that died comes back, as another, after ``repair_seconds``.
        trouble: What may happen.
        rng: Where chance comes from.

    Raises:
        OverflowError: if not all are finished after a million deaths.

    Example:
        >>> play_tasks(2.0, 6, 3, Trouble(), np.random.default_rng(0)).seconds
        4.0
    """
    return _TaskPlay(task_seconds, num_tasks, num_devices, trouble, rng).run()


class _TaskPlay:
    """The event loop of :func:`play_tasks`."""

    def __init__(
        self,
        task_seconds: float,
        num_tasks: int,
        num_devices: int,
        trouble: Trouble,
        rng: np.random.Generator,
    ):
        self._task_seconds, self._trouble, self._rng = task_seconds, trouble, rng
        self._todo = deque(range(num_tasks))
        self._num_left = num_tasks
        self._idle: deque[int] = deque()
        self._running: dict[int, tuple[int, float]] = {}
        """Device -> task and when it began."""
        self._slowness = [1.0] * num_devices
        self._events: list[tuple[float, int, str, int, int]] = []
        """Time, a number that breaks ties, what happens, device or task, and which attempt."""
        self._num_events = 0
        self._num_attempts = [0] * num_devices
        self._attempts: list[Attempt] = []
        self._num_deaths = 0
        self._drawn: list[float] = []

    def run(self) -> Outcome:
        now = 0.0
        for device in range(len(self._num_attempts)):
            self._join(now, device)
        while self._num_left:
            now, _, kind, subject, attempt = heapq.heappop(self._events)
            if kind == "finish" and attempt == self._num_attempts[subject]:
                self._end_attempt(now, subject, is_finished=True)
                self._num_left -= 1
                self._take(now, subject)
            elif kind == "die":
                self._die(now, subject)
            elif kind == "hand out":
                self._todo.appendleft(subject)
                if self._idle:
                    self._take(now, self._idle.popleft())
            elif kind == "join":
                self._join(now, subject)
        lost = sum(each.stop - each.start for each in self._attempts if not each.is_finished)
        return Outcome(now, self._num_deaths, lost, tuple(self._attempts))

    def _join(self, now: float, device: int) -> None:
        is_slow = self._rng.random() < self._trouble.slow_share
        self._slowness[device] = self._trouble.slow_factor if is_slow else 1.0
        if self._trouble.life_hours < math.inf:
            life = self._rng.exponential(self._trouble.life_hours * _HOUR)
            self._push(now + life, "die", device)
        self._take(now, device)

    def _take(self, now: float, device: int) -> None:
        if not self._todo:
            self._idle.append(device)
            return
        self._running[device] = self._todo.popleft(), now
        seconds = self._task_seconds * self._draw_relative_time() * self._slowness[device]
        self._push(now + seconds, "finish", device, self._num_attempts[device])

    def _draw_relative_time(self) -> float:
        if not self._drawn:
            self._drawn = self._trouble.quantiles(self._rng.random(_DRAWN_AT_ONCE)).tolist()
        return self._drawn.pop()

    def _die(self, now: float, device: int) -> None:
        self._num_deaths = _count_death(self._num_deaths)
        if device in self._running:
            task = self._end_attempt(now, device, is_finished=False)
            self._push(now + self._trouble.notice_seconds, "hand out", task)
        else:
            self._idle.remove(device)
        self._push(now + self._trouble.repair_seconds, "join", device)

    def _end_attempt(self, now: float, device: int, *, is_finished: bool) -> int:
        task, start = self._running.pop(device)
        self._num_attempts[device] += 1
        self._attempts.append(Attempt(task, device, start, now, is_finished))
        return task

    def _push(self, time: float, kind: str, subject: int, attempt: int = 0) -> None:
        heapq.heappush(self._events, (time, self._num_events, kind, subject, attempt))
        self._num_events += 1


def play_steps(
    step_seconds: float,
    num_steps: int,
    num_devices: int,
    trouble: Trouble,
    rng: np.random.Generator,
    *,
    num_saves: int = 0,
) -> Outcome:
    """Play steps in which all devices wait for the slowest, and none can do without another.

    The first death stops all devices; after ``repair_seconds`` they begin again, where results
    were last saved. A ring whose devices wait for their neighbours alone waits less than this.

    Args:
        step_seconds: Median time of a step on a device that is not slow.
        num_steps: All devices take each.
        num_devices: A device that died is replaced in the repair.
        trouble: What may happen.
        rng: Where chance comes from.
        num_saves: How often partial results are saved, at no cost, in equal parts of the steps.

    Raises:
        OverflowError: if not all are done after a million deaths.

    Example:
        >>> play_steps(0.5, 8, 8, Trouble(), np.random.default_rng(0)).seconds
        4.0
    """
    marks = np.linspace(0, num_steps, num_saves + 2).round().astype(int)
    deaths_per_second = num_devices / (trouble.life_hours * _HOUR)
    seconds = lost = 0.0
    num_deaths = 0
    num_slow = int(rng.binomial(num_devices, trouble.slow_share))
    for steps in np.diff(marks):
        while True:
            longest = _longest(int(steps), num_devices - num_slow, trouble, rng)
            if num_slow:
                slowest = trouble.slow_factor * _longest(int(steps), num_slow, trouble, rng)
                longest = np.maximum(longest, slowest)
            needed = step_seconds * float(longest.sum())
            death = rng.exponential(1 / deaths_per_second) if deaths_per_second else math.inf
            if needed <= death:
                seconds += needed
                break
            num_deaths = _count_death(num_deaths)
            seconds += death + trouble.repair_seconds
            lost += num_devices * death
    return Outcome(seconds, num_deaths, lost)


def _count_death(num_deaths: int) -> int:
    if num_deaths == _MOST_DEATHS:
        raise OverflowError(f"not done after {num_deaths} deaths")
    return num_deaths + 1


def _longest(
    num_steps: int, num_devices: int, trouble: Trouble, rng: np.random.Generator
) -> np.ndarray:
    """Draw for each step the longest relative time of so many devices.

    The largest of n draws stays below a quantile with the n-th power of the chance of one.
    """
    if not num_devices:
        return np.zeros(num_steps)
    return trouble.quantiles(rng.random(num_steps) ** (1 / num_devices))


def read_relative_times(path: str) -> tuple[float, ...]:
    """Read how times stray from rows of the benchmarks.

    Of each row that was repeated five times or more its 20th percentile, its median and its 80th
    percentile, over its median; the rows together are the quantiles. What happens more seldom than
    once in five repeats they do not show.

    Raises:
        ValueError: if there is none, or a line is no JSON object.
    """

    def pick(row: dict[str, Any]) -> list[float]:
        if row["repeats"] < _LEAST_REPEATS:
            return []
        return [1.0, *(row[name] / row["median_ms"] for name in ("p20_ms", "p80_ms"))]

    found = measurement.read_rows(path, pick)
    if not found:
        raise ValueError(f"{path} has no rows of {_LEAST_REPEATS} repeats or more")
    return tuple(sorted(found))
