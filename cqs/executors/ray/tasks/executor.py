"""The executor that computes the tasks of a plan on the actors of a cluster."""

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.ray.blob import Blob
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.pool import (
    Actor,
    ActorPool,
    Answer,
    Calls,
    TaskFailedError,
    WorkersFailedError,
)
from cqs.executors.ray.tasks.job import Group, Job
from cqs.executors.ray.tasks.report import RunReport, TaskReport
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Task
from cqs.worker import Worker

_TASKS_IN_FLIGHT = 2
"""Tasks per actor: the actor computes one while Ray fetches the inputs of the next."""
_NUMBERS = itertools.count()
"""Numbers of the runs of this process."""


class TaskExecutor:
    """Computes tasks on the actors of a cluster, which merge their results.

    One executor serves one call. Cancelled runs raise CancelledError; see also
    :meth:`cqs.Cluster.attention`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        rest: Callable[[threading.Event], None],
        *,
        is_in_dispatcher: bool,
    ):
        """Start without reports.

        Args:
            dispatcher: Thread that talks to the actors.
            rest: Waits until all actors are free for tasks, or an event is set.
            is_in_dispatcher: Whether the dispatcher thread calls this executor. Otherwise runs are
                passed to that thread.
        """
        self._dispatcher, self._rest = dispatcher, rest
        self._is_in_dispatcher = is_in_dispatcher
        self.num_tasks = len(dispatcher.pool.actors)
        self.reports: list[RunReport] = []
        """Measurements of each run, in order."""

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`."""
        answer = into or part.problem.empty_answer()
        job = Job.forward(part.problem, part.plan, answer)
        self._compute(job, part.backend, hooks)
        return answer

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        problem = part.problem
        tensors = problem.query, problem.key, problem.value
        gradients = Gradients(*map(torch.zeros_like, tensors))
        job = Job.backward(problem, part.plan, answer, grad_output, gradients)
        self._compute(job, part.backend, NO_HOOKS)
        return gradients

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        return part.backend or "chosen by the actors"

    def _compute(self, job: Job, backend: str | None, hooks: Hooks) -> None:
        cancelled = hooks.cancelled or threading.Event()
        run = _Run(self._dispatcher.pool, job, backend, hooks.advance, cancelled)

        def rest_and_run() -> None:
            self._rest(cancelled)
            self.reports.append(run())

        if self._is_in_dispatcher:
            rest_and_run()
        else:
            self._dispatcher.wait_for(rest_and_run, cancelled)


@dataclass(eq=False)
class _Merge:
    """The merge of one group: who does it, and which parts exist."""

    group: Group
    """The group."""
    tasks: list[int]
    """Tasks whose parts it needs, in the order of the merge."""
    owner: Actor | None = None
    """The actor that merges; None if none has a part, or it has failed."""
    kept: set[int] = field(default_factory=set)
    """Tasks whose parts the owner keeps."""
    returned: dict[int, Any] = field(default_factory=dict)
    """Ray references to parts that other actors have computed, by task."""

    @property
    def is_ready(self) -> bool:
        """Whether all parts exist."""
        return len(self.kept) + len(self.returned) == len(self.tasks)


class _Run:
    """One run of a job: assigns its tasks and merges to actors, and again if an actor fails.

    A group is merged by the actor to which its first task was assigned. That actor keeps its own
    parts; those of other actors stay in the object store until the merge has succeeded.
    """

    def __init__(
        self,
        pool: ActorPool,
        job: Job,
        backend: str | None,
        progress: Callable[[Problem, int], None],
        cancelled: threading.Event,
    ):
        """Store the arguments; send nothing to the actors.

        Args:
            pool: Actors that compute the tasks.
            job: Forward or backward pass of a checked problem.
            backend: Name of a backend; ``None`` lets each actor choose its fastest.
            progress: Called with the problem and the live pairs of a task after every task.
            cancelled: Event that makes the run stop.
        """
        self._started, self._start = time.time(), time.perf_counter()
        self._pool, self._job, self._progress = pool, job, progress
        self._number = next(_NUMBERS)
        self._worker = Worker.of(job.problem, backend)
        self._calls = Calls(pool, cancelled)
        """Calls with the index of a task, or a merge, as key; calls of ``describe`` have None."""
        self._tasks = {task.index: task for task in job.plan.tasks if task.steps}
        self._todo = deque(sorted(self._tasks, key=lambda index: -self._tasks[index].live_pairs))
        self._merges = {group: _Merge(group, tasks) for group, tasks in job.tasks_of.items()}
        """Merges that are not finished."""
        self._ready: dict[_Merge, None] = {}
        """Merges with all parts that are not assigned to an actor, in order."""
        self._running: dict[int, tuple[list[Group], dict[Group, Any]]] = {}
        """For each task at an actor, the groups whose parts it keeps, and references to others."""
        self._stored: dict[Any, Any] = {}
        """References to token groups in the object store, by side and range; None to the worker."""
        self._awaited = set(pool.actors)
        """Actors for whose start the run waits if no other actor is left."""
        self._attempts: Counter[Any] = Counter()
        self._reports: dict[int, TaskReport] = {}
        self._seconds = {"put_seconds": 0.0, "get_seconds": 0.0, "merge_seconds": 0.0}
        self._failures = self._reruns = 0

    def __call__(self) -> RunReport:
        """Compute all tasks, merge their results and write them to the tensors of the job.

        Returns:
            The measurements of the run.

        Raises:
            CancelledError: ``cancelled`` was set, or the cluster closes.
            WorkersFailedError: All actors failed, and no replacement has started.
            TaskFailedError: ``max_attempts`` actors failed while they computed the same task.
            torch.OutOfMemoryError: The GPU of an actor has too little memory for its task.
            ValueError: This process lost its connection to Ray.
            Exception: The computation of a task raised; the run does not repeat it.
        """
        if self._merges:
            try:
                with self._calls:
                    self._compute()
            finally:
                self._stored.clear()
        return RunReport(
            started=self._started,
            seconds=time.perf_counter() - self._start,
            tasks=tuple(self._reports[index] for index in sorted(self._reports)),
            failures=self._failures,
            reruns=self._reruns,
            **self._seconds,
        )

    def _compute(self) -> None:
        """Assign tasks, those with the most live pairs first, until all groups are merged.

        Any actor may compute any task: actors keep no inputs from task to task, and all actors of a
        host read a token group from the same object store.
        """
        self._calls.refill()
        self._awaited.update(self._pool.actors)
        with self._clock("put_seconds"):
            self._stored[None] = self._pool.ray.put(self._worker)
        while self._merges:
            self._calls.check()
            self._feed()
            for answer in self._calls.collect():
                self._process(answer)

    def _feed(self) -> None:
        """Assign merges to their owners, and the next tasks to the actors with the fewest calls."""
        queues = self._calls.queues
        idle = [actor for actor, queue in queues.items() if None not in queue.values()]
        if not idle and self._awaited.isdisjoint(queues):
            message = f"all {len(self._pool.actors)} workers failed; tasks "
            message += f"{sorted(set(self._tasks) - set(self._reports))} are not computed"
            for work, failures in self._attempts.most_common(1):
                message += f"; {_name(work)} was running on {failures} of them when they failed"
            raise WorkersFailedError(message)
        if not idle:
            return
        for merge in self._ready:
            owner = merge.owner or min(idle, key=lambda actor: len(queues[actor]))
            self._assign_merge(merge, owner)
        self._ready.clear()
        while self._todo:
            actor = min(idle, key=lambda actor: len(queues[actor]))
            if len(queues[actor]) >= _TASKS_IN_FLIGHT:
                return
            self._assign_task(self._tasks[self._todo.popleft()], actor)

    def _assign_task(self, task: Task, actor: Actor) -> None:
        """Let an actor compute a task; it keeps the parts that it merges, and returns others."""
        kept: list[Group] = []
        returned: list[Group] = []
        for group in self._job.groups(task):
            merge = self._merges.get(group)
            if merge is None or task.index in merge.kept or task.index in merge.returned:
                continue
            merge.owner = merge.owner or actor
            (kept if merge.owner is actor else returned).append(group)
        arguments = task, self._job.of_pass, self._stored[None], returned, kept
        references = self._calls.add(
            actor,
            task.index,
            "run",
            self._number,
            *arguments,
            *self._put_inputs(task),
            num_returns=1 + len(returned),
        )
        self._running[task.index] = kept, dict(zip(returned, references, strict=True))

    def _assign_merge(self, merge: _Merge, owner: Actor) -> None:
        merge.owner = owner
        arguments = merge.group, self._job.of_pass, self._job.problem.query.dtype
        others = list(merge.returned)
        self._calls.add(
            owner,
            merge,
            "merge",
            self._number,
            *arguments,
            merge.tasks,
            others,
            *merge.returned.values(),
        )

    def _put_inputs(self, task: Task) -> list[Any]:
        """Return references to the token groups of a task; put new groups into the object store."""
        found = []
        sides = (self._job.of_queries, task.held_queries), (self._job.of_keys, task.held_keys)
        with self._clock("put_seconds"):
            for side, (tensors, ranges) in enumerate(sides):
                for tokens in ranges:
                    if (side, tokens) not in self._stored:
                        part = slice(tokens.start, tokens.stop)
                        group = tuple(Blob(tensor[:, :, part]) for tensor in tensors)
                        self._stored[side, tokens] = self._pool.ray.put(group)
                    found.append(self._stored[side, tokens])
        return found

    def _process(self, answer: Answer) -> None:
        """Accept an answer; an error of a task is raised, because a repetition would not help."""
        if answer.failure is not None:
            self._replace(answer)
            return
        (key,) = answer.keys
        if isinstance(key, _Merge):
            self._finish_merge(key, answer)
            return
        if answer.error is not None:
            if isinstance(answer.error, torch.OutOfMemoryError):
                _, backend, capacity = answer.error.args
                plan = self._job.plan
                message = explain_shortage(self._job.problem, plan, backend, capacity, key)
                raise torch.OutOfMemoryError(message) from answer.error.__cause__
            raise answer.error
        if key is None:
            return
        is_new = key not in self._reports
        self._reports[key] = answer.value
        kept, returned = self._running.pop(key)
        for group in self._job.groups(self._tasks[key]):
            merge = self._merges.get(group)
            if merge is None or key in merge.kept or key in merge.returned:
                continue
            if group in returned:
                merge.returned[key] = returned[group]
            elif group in kept:
                merge.kept.add(key)
            else:  # lost since the task was assigned
                self._repeat([key])
            if merge.is_ready:
                self._ready[merge] = None
        if is_new:
            self._progress(self._job.problem, self._tasks[key].live_pairs)

    def _finish_merge(self, merge: _Merge, answer: Answer) -> None:
        """Write the result of a merge, or repeat tasks whose parts were lost with their node."""
        if isinstance(answer.error, self._pool.ray.exceptions.ObjectLostError):
            self._repeat(merge.returned)
            merge.returned.clear()
            return
        if answer.error is not None:
            raise answer.error
        seconds, merged = answer.value
        self._seconds["get_seconds"] += answer.seconds
        self._seconds["merge_seconds"] += seconds
        with self._clock("get_seconds"):
            self._job.accept(merge.group, [blob.tensor() for blob in merged])
        del self._merges[merge.group]

    def _replace(self, answer: Answer) -> None:
        """Reassign what a failed actor had to do or had kept, and start a replacement.

        If no other actor is left, the run waits for the replacement, unless it replaces an actor
        that did not start in time. It starts none after ``max_attempts * num_workers`` failures.
        """
        pending = [key for key in answer.keys if key is not None]
        lost = [key for key in pending if not isinstance(key, _Merge)]
        for index in lost:
            self._pool.abandon(list(self._running.pop(index)[1].values()))
        for merge in self._merges.values():
            if merge.owner is answer.actor:
                merge.owner = None
                lost += merge.kept
                merge.kept.clear()
                self._ready.pop(merge, None)
                if merge.is_ready:
                    self._ready[merge] = None
        self._failures += 1
        self._repeat(lost)
        most = self._pool.retry_policy.max_attempts
        if pending:  # an actor computes in order, so only the first was running
            self._attempts[pending[0]] += 1
            if self._attempts[pending[0]] == most:
                raise TaskFailedError(
                    f"{_name(pending[0])} was running on {most} workers when they failed or hung"
                ) from answer.failure
        if self._failures < most * len(self._pool.actors):
            before = set(self._pool.actors)
            self._calls.refill()
            if pending or not isinstance(answer.failure, TimeoutError):
                self._awaited.update(set(self._pool.actors) - before)

    def _repeat(self, indices: Iterable[int]) -> None:
        """Assign tasks again, before all others; one at an actor follows if its parts are lost."""
        new = set(indices).difference(self._todo, self._running)
        lost = sorted(new, key=lambda index: -self._tasks[index].live_pairs)
        self._reruns += len(lost)
        self._todo.extendleft(reversed(lost))

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of the block to the field ``part`` of the report."""
        start = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start


def _name(work: int | _Merge) -> str:
    return f"the merge of {work.group.tokens}" if isinstance(work, _Merge) else f"task {work}"
