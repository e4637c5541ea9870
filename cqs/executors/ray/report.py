"""What a run on a cluster took: seconds and bytes, by task and in all."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskReport:
    """One task, as its worker measured it."""

    worker: int
    """Index of the task in the plan."""
    pid: int
    """Process that computed it."""
    device: str
    seconds: float
    """Computation alone, without fetching groups or returning results."""
    peak_bytes: int
    """Most bytes held at once: the groups and everything allocated for them."""
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class RunReport:
    """One call of a cluster."""

    seconds: float
    """From the call to the answer."""
    put_seconds: float
    """Putting the token groups into the object store."""
    merge_seconds: float
    """Merging partial results; overlaps with computation."""
    tasks: tuple[TaskReport, ...]
    """By worker."""
    deaths: int
    """Workers that died or hung during the run."""
    reruns: int
    """Tasks that had to be computed again elsewhere."""

    @property
    def slowest_seconds(self) -> float:
        """Computation of the process that computed longest."""
        by_process: Counter[int] = Counter()
        for task in self.tasks:
            by_process[task.pid] += task.seconds  # type: ignore[assignment]
        return max(by_process.values(), default=0.0)

    @property
    def waiting_seconds(self) -> float:
        """What is neither putting nor the slowest computation: fetch, return, merge, idling."""
        return max(self.seconds - self.put_seconds - self.slowest_seconds, 0.0)

    @property
    def overhead(self) -> float:
        """Share of the run that is not the slowest process's computation."""
        return 1 - self.slowest_seconds / self.seconds if self.seconds else 0.0
