"""Event-by-event simulation of attention on devices that vary, are slow and fail.

Two schedules of the same work are compared. Independent tasks are taken from one queue; a failure
loses the task that was running, which is assigned again. Steps that all devices take together, as
in a ring, last as long as the slowest device; after a failure all devices continue from the last
saved state. :mod:`cqs.scheduler.cost_model` predicts the time of a task or a step.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cqs.report import measurement

_HOUR = 3600.0
_MAX_FAILURES = 10**6
_DRAWN_AT_ONCE = 1024
_MIN_REPEATS = 5
"""Fewest repeats of a row whose percentiles are used."""


@dataclass(frozen=True)
class FaultModel:
    """How devices fail and vary; by default they do neither."""

    mtbf_hours: float = math.inf
    """Mean time between failures of one device; the times are exponential."""
    detection_seconds: float = 0.0
    """Detection latency: from a failure until its task is assigned again."""
    repair_seconds: float = 0.0
    """Time to repair: from a failure until the device is replaced, or all devices continue."""
    slow_share: float = 0.0
    """Probability that a device is slow."""
    slow_factor: float = 1.0
    """Time of a slow device divided by that of another one."""
    relative_times: tuple[float, ...] = (1.0,)
    """Ascending quantiles of times divided by their median; times are drawn between them."""

    def __post_init__(self) -> None:
        """Raise ValueError if a number is out of range."""
        for name in ("mtbf_hours", "slow_factor"):
            if not (number := getattr(self, name)) > 0:
                raise ValueError(f"{name} must be positive, got {number:g}")
        for name in ("detection_seconds", "repair_seconds"):
            if not 0 <= (number := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {number:g}")
        if not 0 <= self.slow_share <= 1:
            raise ValueError(f"slow_share must be in 0..1, got {self.slow_share:g}")
        times = self.relative_times
        if not times or times[0] <= 0 or list(times) != sorted(times):
            raise ValueError("relative_times must be positive and ascending")

    def quantiles(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the relative times at the given probabilities."""
        grid = np.linspace(0, 1, len(self.relative_times))
        return np.asarray(np.interp(probabilities, grid, self.relative_times))


class Attempt(NamedTuple):
    """One attempt of a device at a task; times are seconds from the start."""

    task: int
    device: int
    start: float
    stop: float
    is_finished: bool
    """False if the device failed."""


@dataclass(frozen=True)
class Outcome:
    """Result of one simulated call."""

    seconds: float
    num_failures: int
    lost_seconds: float
    """Computation that was lost, summed over all devices."""
    attempts: tuple[Attempt, ...] = ()
    """Attempts at tasks, in the order in which they ended."""


def simulate_tasks(
    task_seconds: float,
    num_tasks: int,
    num_devices: int,
    faults: FaultModel,
    rng: np.random.Generator,
) -> Outcome:
    """Simulate independent tasks that devices take from one queue until all are finished.

    Args:
        task_seconds: Median time of a task on a device that is not slow.
        num_tasks: Number of tasks; all are ready at the start.
        num_devices: Number of devices; a failed one is replaced after ``repair_seconds``.
        faults: The fault model.
        rng: Source of random numbers.

    Raises:
        OverflowError: Tasks are left after a million failures.

    Example:
        >>> simulate_tasks(2.0, 6, 3, FaultModel(), np.random.default_rng(0)).seconds
        4.0
    """
    return _TaskSimulation(task_seconds, num_tasks, num_devices, faults, rng).run()


class _TaskSimulation:
    """The event loop of :func:`simulate_tasks`."""

    def __init__(
        self,
        task_seconds: float,
        num_tasks: int,
        num_devices: int,
        faults: FaultModel,
        rng: np.random.Generator,
    ):
        self._task_seconds, self._faults, self._rng = task_seconds, faults, rng
        self._todo = deque(range(num_tasks))
        self._num_left = num_tasks
        self._idle: deque[int] = deque()
        self._running: dict[int, tuple[int, float]] = {}
        """Device -> its task and when it started."""
        self._slowness = [1.0] * num_devices
        self._events: list[tuple[float, int, str, int, int]] = []
        """Time, sequence number (breaks ties), kind, device or task, and number of the attempt."""
        self._num_events = 0
        self._num_attempts = [0] * num_devices
        self._attempts: list[Attempt] = []
        self._num_failures = 0
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
            elif kind == "fail":
                self._fail(now, subject)
            elif kind == "assign":
                self._todo.appendleft(subject)
                if self._idle:
                    self._take(now, self._idle.popleft())
            elif kind == "join":
                self._join(now, subject)
        lost = sum(each.stop - each.start for each in self._attempts if not each.is_finished)
        return Outcome(now, self._num_failures, lost, tuple(self._attempts))

    def _join(self, now: float, device: int) -> None:
        is_slow = self._rng.random() < self._faults.slow_share
        self._slowness[device] = self._faults.slow_factor if is_slow else 1.0
        if self._faults.mtbf_hours < math.inf:
            time_to_failure = self._rng.exponential(self._faults.mtbf_hours * _HOUR)
            self._push(now + time_to_failure, "fail", device)
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
            self._drawn = self._faults.quantiles(self._rng.random(_DRAWN_AT_ONCE)).tolist()
        return self._drawn.pop()

    def _fail(self, now: float, device: int) -> None:
        self._num_failures = _count_failure(self._num_failures)
        if device in self._running:
            task = self._end_attempt(now, device, is_finished=False)
            self._push(now + self._faults.detection_seconds, "assign", task)
        else:
            self._idle.remove(device)
        self._push(now + self._faults.repair_seconds, "join", device)

    def _end_attempt(self, now: float, device: int, *, is_finished: bool) -> int:
        task, start = self._running.pop(device)
        self._num_attempts[device] += 1
        self._attempts.append(Attempt(task, device, start, now, is_finished))
        return task

    def _push(self, time: float, kind: str, subject: int, attempt: int = 0) -> None:
        heapq.heappush(self._events, (time, self._num_events, kind, subject, attempt))
        self._num_events += 1


def simulate_steps(
    step_seconds: float,
    num_steps: int,
    num_devices: int,
    faults: FaultModel,
    rng: np.random.Generator,
    *,
    num_saves: int = 0,
) -> Outcome:
    """Simulate steps in which all devices wait for the slowest.

    The first failure stops all devices; after ``repair_seconds`` they continue from the last saved
    state. A ring whose devices wait only for their neighbours waits less than this.

    Args:
        step_seconds: Median time of a step on a device that is not slow.
        num_steps: Number of steps; all devices take every step.
        num_devices: Number of devices; a failed one is replaced during the repair.
        faults: The fault model.
        rng: Source of random numbers.
        num_saves: How often partial outputs are saved, at no cost, at equal distances.

    Raises:
        OverflowError: Steps are left after a million failures.

    Example:
        >>> simulate_steps(0.5, 8, 8, FaultModel(), np.random.default_rng(0)).seconds
        4.0
    """
    marks = np.linspace(0, num_steps, num_saves + 2).round().astype(int)
    failures_per_second = num_devices / (faults.mtbf_hours * _HOUR)
    seconds = lost = 0.0
    num_failures = 0
    num_slow = int(rng.binomial(num_devices, faults.slow_share))
    for steps in np.diff(marks):
        while True:
            longest = _longest(int(steps), num_devices - num_slow, faults, rng)
            if num_slow:
                slowest = faults.slow_factor * _longest(int(steps), num_slow, faults, rng)
                longest = np.maximum(longest, slowest)
            needed = step_seconds * float(longest.sum())
            time_to_failure = (
                rng.exponential(1 / failures_per_second) if failures_per_second else math.inf
            )
            if needed <= time_to_failure:
                seconds += needed
                break
            num_failures = _count_failure(num_failures)
            seconds += time_to_failure + faults.repair_seconds
            lost += num_devices * time_to_failure
    return Outcome(seconds, num_failures, lost)


def _count_failure(num_failures: int) -> int:
    if num_failures == _MAX_FAILURES:
        raise OverflowError(f"not finished after {num_failures} failures")
    return num_failures + 1


def _longest(
    num_steps: int, num_devices: int, faults: FaultModel, rng: np.random.Generator
) -> np.ndarray:
    """Draw the longest relative time of ``num_devices`` devices for every step.

    The largest of n draws is below a quantile with the n-th power of the probability of one draw.
    """
    if not num_devices:
        return np.zeros(num_steps)
    return faults.quantiles(rng.random(num_steps) ** (1 / num_devices))


def read_relative_times(path: str) -> tuple[float, ...]:
    """Read the variation of times from rows of benchmarks.

    The quantiles are the 20th percentile, the median and the 80th percentile of every row with five
    repeats or more, divided by its median. Rarer events do not appear in them.

    Args:
        path: A file of rows.

    Returns:
        Ascending quantiles, see :attr:`FaultModel.relative_times`.

    Raises:
        ValueError: The file has no such rows, or a line is not a row.
    """

    def pick(row: dict[str, Any]) -> list[float]:
        if row["repeats"] < _MIN_REPEATS:
            return []
        return [1.0, *(row[name] / row["median_ms"] for name in ("p20_ms", "p80_ms"))]

    found = measurement.read_rows(path, pick)
    if not found:
        raise ValueError(f"{path} has no rows of {_MIN_REPEATS} repeats or more")
    return tuple(sorted(found))
