"""Time, memory and traffic of a run on a cluster, per task and in total."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

_SUMMED = ("put_seconds", "get_seconds", "reruns", "rerun_seconds")
"""Measurements of which those of a call are the sums over its runs."""


@dataclass(frozen=True)
class TaskReport:
    """Measurements of one task by its actor."""

    index: int
    """Index of the task in the plan; each part of a problem with per-head patterns has a plan."""
    pid: int
    """Process id of the actor."""
    node: str
    """Id of the actor's Ray node. Processes of different nodes may have the same pid."""
    device: str
    """Device of the actor, such as ``"cuda"`` or ``"cpu"``."""
    backend: str
    """Name of the backend that computed the task."""
    load_seconds: float
    """Time to bring the task's inputs to the device: copies to a GPU, or almost none."""
    started: float
    """Start of the computation, in seconds since the epoch by the clock of the actor's host."""
    seconds: float
    """Duration of the computation, without fetching inputs and returning results."""
    peak_bytes: int
    """Peak bytes of its inputs and allocations, without tokens that a GPU keeps for other tasks."""
    bytes_in: int
    """Bytes of the token groups that the task read."""
    bytes_out: int
    """Bytes of the results of the task, in its actor's memory or in the object store."""


class MergeReport(NamedTuple):
    """Measurements of one call in which an actor merged groups."""

    pid: int
    """Process id of the actor."""
    node: str
    """Id of the actor's Ray node."""
    started: float
    """Start of the merge, in seconds since the epoch by the clock of the actor's host."""
    seconds: float
    """Time to read the parts, merge them, and write results to shared memory."""
    unload_seconds: float
    """Time to copy the results for the object store, almost none with shared memory."""


class WorkerFailure(NamedTuple):
    """An actor that failed or hung during a run."""

    pid: int | None
    """Process id of the actor; None if it had not started."""
    node: str | None
    """Id of the actor's Ray node; None if it had not started."""
    noticed: float
    """Time at which the driver noticed it, in seconds since the epoch by the clock of its host."""
    lost_tasks: tuple[int, ...]
    """Indices of the tasks that were assigned again: unfinished ones, and those whose partial
    outputs the actor still held."""


@dataclass(frozen=True)
class RunReport:
    """Measurements of one call of a cluster, or of one of its runs."""

    started: float
    """Start, in seconds since the epoch by the clock of the driver's host."""
    seconds: float
    """Duration, until the result is complete."""
    transport: str
    """``"shared memory"`` or ``"object store"``, through which tensors of the driver passed to the
    actors, with the reason for the store if there is one."""
    put_seconds: float
    """Time in which the driver copied tokens of tensors of the host for the actors, which compute
    others meanwhile."""
    get_seconds: float
    """Time in which the driver got merged results and wrote them; on a GPU it launches copies."""
    tasks: tuple[TaskReport, ...]
    """Reports of all tasks that are not empty, in the order of parts and indices."""
    merges: tuple[MergeReport, ...]
    """Reports of all merges, in the order of their ends."""
    failures: tuple[WorkerFailure, ...]
    """The actors that failed or hung during the run, in the order in which that was noticed."""
    reruns: int
    """Number of tasks that were computed again, because an actor failed or a part was lost."""
    rerun_seconds: float
    """Time in which actors computed these tasks again."""

    @classmethod
    def join(cls, runs: Sequence[Self]) -> Self:
        """Return the report of a call of one or several runs, one after another."""
        first, last = runs[0], runs[-1]
        return cls(
            started=first.started,
            transport=first.transport,
            seconds=last.started - first.started + last.seconds,
            tasks=tuple(task for run in runs for task in run.tasks),
            merges=tuple(merge for run in runs for merge in run.merges),
            failures=tuple(failure for run in runs for failure in run.failures),
            **{name: sum(getattr(run, name) for run in runs) for name in _SUMMED},
        )

    def __repr__(self) -> str:
        return (
            f"<RunReport {self.seconds:.3g} s: {len(self.tasks)} tasks on "
            f"{len(self.by_process)} workers, "
            f"slowest worker {self.slowest['compute']:.3g} s, overhead {self.overhead:.0%}, "
            f"{len(self.failures)} failures, {self.reruns} reruns>"
        )

    @property
    def by_process(self) -> dict[tuple[str, int], tuple[TaskReport, ...]]:
        """Tasks by node and pid of their process, in order of their start."""
        processes: dict[tuple[str, int], tuple[TaskReport, ...]] = defaultdict(tuple)
        for task in sorted(self.tasks, key=lambda task: task.started):
            processes[task.node, task.pid] += (task,)
        return dict(processes)

    @property
    def slowest(self) -> dict[str, float]:
        """Seconds of the process with the longest computation, which add up to those of the call.

        ``"load"`` is the time in which it brought inputs to its device, ``"compute"`` that of
        tasks, ``"merge"`` that of merges, and ``"unload"`` that of copies for the object store. In
        the rest, ``"waiting"``, it waits for the driver, for Ray and for other processes.
        """
        processes = self.by_process.values()
        tasks = max(processes, key=lambda tasks: sum(task.seconds for task in tasks), default=())
        merges = self.merges_of(tasks[0]) if tasks else []
        parts = {
            "load": sum(task.load_seconds for task in tasks),
            "compute": sum(task.seconds for task in tasks),
            "merge": sum(merge.seconds for merge in merges),
            "unload": sum(merge.unload_seconds for merge in merges),
        }
        return parts | {"waiting": self.seconds - sum(parts.values())}

    @property
    def overhead(self) -> float:
        """Fraction of ``seconds`` that is not computation of the slowest process, 0 to 1."""
        return 1 - self.slowest["compute"] / self.seconds

    def merges_of(self, task: TaskReport) -> list[MergeReport]:
        """Return the merges of the process that computed a task."""
        process = task.node, task.pid
        return [merge for merge in self.merges if (merge.node, merge.pid) == process]
