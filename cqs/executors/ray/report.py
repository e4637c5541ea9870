"""What a run on a cluster took: seconds and bytes, by task and in all."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class TaskReport:
    """One task, as its actor measured it."""

    index: int
    """Index of the task in the plan."""
    pid: int
    """Process that computed it."""
    device: str
    backend: str
    """Name of the one that computed it."""
    started: float
    """When the computation began, in seconds since the epoch by the actor's clock."""
    seconds: float
    """Computation alone, without fetching groups or returning results."""
    peak_bytes: int
    """Most bytes held at once: the groups and everything allocated for them."""
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class RunReport:
    """One call of a cluster.

    ``before_seconds + slowest_seconds + between_seconds + after_seconds == seconds``. The driver's
    work (put, get, merge) is among the others and mostly overlaps with computation.
    """

    started: float
    """When the call began, in seconds since the epoch."""
    seconds: float
    """From the call to the answer."""
    put_seconds: float
    """The driver put token groups into the object store."""
    get_seconds: float
    """The driver got results from there."""
    merge_seconds: float
    """The driver merged partial results."""
    tasks: tuple[TaskReport, ...]
    """In order of their index."""
    deaths: int
    """Actors that died or hung during the run."""
    reruns: int
    """Tasks that were taken from dead actors and handed out again."""

    @property
    def slowest(self) -> tuple[TaskReport, ...]:
        """The tasks of the process that computed longest, in order of time."""
        by_process: dict[int, list[TaskReport]] = defaultdict(list)
        for task in self.tasks:
            by_process[task.pid].append(task)
        longest = max(by_process.values(), key=_computation, default=[])
        return tuple(sorted(longest, key=lambda task: task.started))

    @property
    def slowest_seconds(self) -> float:
        """Computation of the process that computed longest."""
        return _computation(self.slowest)

    @property
    def before_seconds(self) -> float:
        """Until that process began to compute: planning, putting and fetching the first groups."""
        return self.slowest[0].started - self.started if self.tasks else self.seconds

    @property
    def between_seconds(self) -> float:
        """Between its tasks: fetching groups, returning results."""
        gaps = (b.started - a.started - a.seconds for a, b in pairwise(self.slowest))
        return sum(gaps, 0.0)

    @property
    def after_seconds(self) -> float:
        """After its last task: returning the result, waiting for others, the last merges."""
        return self.seconds - self.before_seconds - self.slowest_seconds - self.between_seconds

    @property
    def overhead(self) -> float:
        """Share of the run that is not the slowest process's computation."""
        return 1 - self.slowest_seconds / self.seconds


def _computation(tasks: "list[TaskReport] | tuple[TaskReport, ...]") -> float:
    return sum(task.seconds for task in tasks)
