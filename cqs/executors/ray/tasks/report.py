"""Time, memory and traffic of a run on a cluster, per task and in total."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

_SUMMED = ("put_seconds", "get_seconds", "merge_seconds", "failures", "reruns")
"""Measurements of which those of a call are the sums over its runs."""


@dataclass(frozen=True)
class TaskReport:
    """Measurements of one task by its actor."""

    index: int
    """Index of the task in the plan; each part of a problem with per-head patterns has a plan."""
    pid: int
    """Process id of the actor."""
    device: str
    """Device of the actor, such as ``"cuda"`` or ``"cpu"``."""
    backend: str
    """Name of the backend that computed the task."""
    started: float
    """Start of the computation, in seconds since the epoch by the clock of the actor's host."""
    seconds: float
    """Duration of the computation, without fetching inputs and returning results."""
    peak_bytes: int
    """Peak memory in bytes: inputs and all allocations on the actor's device."""
    bytes_in: int
    """Bytes of the token groups that the task read."""
    bytes_out: int
    """Bytes of the results of the task, kept by its actor or returned."""


@dataclass(frozen=True)
class RunReport:
    """Measurements of one call of a cluster.

    ``before_seconds + slowest_seconds + between_seconds + after_seconds == seconds``. The time of
    the driver (put, get) and of merges is part of these and mostly overlaps with computation.
    """

    started: float
    """Start of the call, in seconds since the epoch by the clock of the driver's host."""
    seconds: float
    """Duration of the call, until the result is complete."""
    put_seconds: float
    """Time in which the driver put token groups into the object store."""
    get_seconds: float
    """Time in which the driver got merged results from the object store and wrote them."""
    merge_seconds: float
    """Time in which actors merged partial results, summed over the actors."""
    tasks: tuple[TaskReport, ...]
    """Reports of all tasks that are not empty, in the order of parts and indices."""
    failures: int
    """Number of actors that failed or hung during the run."""
    reruns: int
    """Number of tasks that were taken from failed actors and assigned again."""

    @classmethod
    def join(cls, runs: Sequence[Self]) -> Self:
        """Return the report of a call of one or several runs, one after another."""
        first, last = runs[0], runs[-1]
        return cls(
            started=first.started,
            seconds=last.started - first.started + last.seconds,
            tasks=tuple(task for run in runs for task in run.tasks),
            **{name: sum(getattr(run, name) for run in runs) for name in _SUMMED},
        )

    @property
    def slowest(self) -> tuple[TaskReport, ...]:
        """Tasks of the process with the longest total computation, in order of their start."""
        by_process: dict[int, list[TaskReport]] = defaultdict(list)
        for task in self.tasks:
            by_process[task.pid].append(task)
        longest = max(by_process.values(), key=_computation, default=[])
        return tuple(sorted(longest, key=lambda task: task.started))

    @property
    def slowest_seconds(self) -> float:
        """Total computation time of the slowest process, in seconds."""
        return _computation(self.slowest)

    @property
    def before_seconds(self) -> float:
        """Seconds until the slowest process began to compute: planning, put, first fetch."""
        return self.slowest[0].started - self.started if self.tasks else self.seconds

    @property
    def between_seconds(self) -> float:
        """Seconds between the tasks of the slowest process: fetching inputs, returning results."""
        gaps = (b.started - a.started - a.seconds for a, b in pairwise(self.slowest))
        return sum(gaps, 0.0)

    @property
    def after_seconds(self) -> float:
        """Seconds after the last task of the slowest process: returning results, last merges."""
        return self.seconds - self.before_seconds - self.slowest_seconds - self.between_seconds

    @property
    def overhead(self) -> float:
        """Fraction of ``seconds`` that is not computation of the slowest process, 0 to 1."""
        return 1 - self.slowest_seconds / self.seconds


def _computation(tasks: Sequence[TaskReport]) -> float:
    return sum(task.seconds for task in tasks)
