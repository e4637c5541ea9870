"""The executor that computes the tasks of a plan on the actors of a cluster."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.ray.blob import Blob
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.pool import ActorPool, Answer, Calls, TaskFailedError, WorkersFailedError
from cqs.executors.ray.tasks.job import Attend, Differentiate
from cqs.executors.ray.tasks.report import RunReport, TaskReport
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Task
from cqs.worker import Worker

_TASKS_IN_FLIGHT = 2
"""Tasks per actor: the actor computes one while Ray fetches the inputs of the next."""


class TaskExecutor:
    """Computes tasks on the actors of a cluster, and merges their results on the driver.

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
        job = Attend(part.problem, part.plan, into)
        answer: Partial = self._compute(job, part.backend, hooks)
        return answer

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        job = Differentiate(part.problem, part.plan, answer, grad_output)
        gradients: Gradients = self._compute(job, part.backend, NO_HOOKS)
        return gradients

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        return part.backend or "chosen by the actors"

    def _compute(self, job: Attend | Differentiate, backend: str | None, hooks: Hooks) -> Any:
        cancelled = hooks.cancelled or threading.Event()
        run = _Run(self._dispatcher.pool, job, backend, hooks.advance, cancelled)

        def rest_and_run() -> Any:
            self._rest(cancelled)
            result, report = run()
            self.reports.append(report)
            return result

        if self._is_in_dispatcher:
            return rest_and_run()
        return self._dispatcher.wait_for(rest_and_run, cancelled)


class _Run:
    """One run of a job: assigns its tasks to actors, and again if an actor fails."""

    def __init__(
        self,
        pool: ActorPool,
        job: Attend | Differentiate,
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
        self._worker = Worker.of(job.problem, backend)
        self._calls = Calls(pool, cancelled)
        """Calls with the index of their task as key; calls of ``describe`` have None."""
        self._tasks = {task.index: task for task in job.plan.tasks if task.steps}
        self._todo = deque(sorted(self._tasks, key=lambda index: -self._tasks[index].live_pairs))
        self._stored: dict[Any, Any] = {}
        """References to token groups in the object store, by side and range; None to the worker."""
        self._awaited = set(pool.actors)
        """Actors for whose start the run waits if no other actor is left."""
        self._attempts: Counter[int] = Counter()
        self._reports: dict[int, TaskReport] = {}
        self._seconds = {"put_seconds": 0.0, "get_seconds": 0.0, "merge_seconds": 0.0}
        self._failures = self._reruns = 0

    def __call__(self) -> tuple[Any, RunReport]:
        """Compute all tasks and merge their results.

        Returns:
            The result of the job, and the measurements of the run.

        Raises:
            CancelledError: ``cancelled`` was set, or the cluster closes.
            WorkersFailedError: All actors failed, and the run does not wait for a replacement.
            TaskFailedError: ``max_attempts`` actors failed while they computed the same task.
            torch.OutOfMemoryError: The GPU of an actor has too little memory for its task.
            ValueError: This process lost its connection to Ray.
            Exception: The computation of a task raised; the run does not repeat it.
        """
        if not self._job.is_empty:
            try:
                with self._calls:
                    self._compute()
            finally:
                self._stored.clear()
        result = self._job.finish()
        return result, RunReport(
            started=self._started,
            seconds=time.perf_counter() - self._start,
            tasks=tuple(self._reports[index] for index in sorted(self._reports)),
            failures=self._failures,
            reruns=self._reruns,
            **self._seconds,
        )

    def _compute(self) -> None:
        """Assign tasks, those with the most live pairs first, until all results have arrived.

        Any actor may compute any task: actors keep no tensors from task to task, and all actors of
        a host read a token group from the same object store.
        """
        for task in self._job.plan.tasks:
            if not task.steps:
                self._job.accept(task, [])
        self._calls.refill()
        self._awaited.update(self._pool.actors)
        with self._clock("put_seconds"):
            self._stored[None] = self._pool.ray.put(self._worker)
        while len(self._reports) < len(self._tasks):
            self._calls.check()
            self._feed()
            for answer in self._calls.collect():
                self._process(answer)

    def _feed(self) -> None:
        """Assign the next tasks to the actors with the shortest queues."""
        queues = self._calls.queues
        ready = [actor for actor, queue in queues.items() if None not in queue.values()]
        if not ready and self._awaited.isdisjoint(queues):
            message = f"all {len(self._pool.actors)} workers failed; tasks "
            message += f"{sorted(set(self._tasks) - set(self._reports))} are not computed"
            for index, failures in self._attempts.most_common(1):
                message += f"; task {index} was running on {failures} of them when they failed"
            raise WorkersFailedError(message)
        while self._todo and ready:
            actor = min(ready, key=lambda actor: len(queues[actor]))
            if len(queues[actor]) >= _TASKS_IN_FLIGHT:
                return
            task = self._tasks[self._todo.popleft()]
            inputs = self._job.compute, self._stored[None], *self._put_groups(task)
            self._calls.add(actor, task.index, "run", task, *inputs)

    def _put_groups(self, task: Task) -> list[Any]:
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
        (index,) = answer.keys
        if answer.error is not None:
            if isinstance(answer.error, torch.OutOfMemoryError):
                _, backend, capacity = answer.error.args
                plan = self._job.plan
                message = explain_shortage(self._job.problem, plan, backend, capacity, index)
                raise torch.OutOfMemoryError(message) from answer.error.__cause__
            raise answer.error
        if index is None:
            return
        self._seconds["get_seconds"] += answer.seconds
        results, self._reports[index] = answer.value
        with self._clock("merge_seconds"):
            tensors = [tuple(blob.tensor() for blob in group) for group in results]
            self._job.accept(self._tasks[index], tensors)
        self._progress(self._job.problem, self._tasks[index].live_pairs)

    def _replace(self, answer: Answer) -> None:
        """Reassign the tasks of a failed actor and start a replacement.

        Ray's out-of-memory monitor may kill several actors at once. Memory is free again after
        that, so the run waits for the replacements even if no other actor is left. It starts none
        after ``max_attempts * num_workers`` failures.
        """
        taken_back = [index for index in answer.keys if index is not None]
        self._failures += 1
        self._reruns += len(taken_back)
        self._todo.extendleft(reversed(taken_back))
        most = self._pool.retry_policy.max_attempts
        if taken_back:  # an actor computes in order, so only the first was running
            self._attempts[taken_back[0]] += 1
            if self._attempts[taken_back[0]] == most:
                raise TaskFailedError(
                    f"task {taken_back[0]} was running on {most} workers when they failed or hung"
                ) from answer.failure
        if self._failures < most * len(self._pool.actors):
            before = set(self._pool.actors)
            self._calls.refill()
            if isinstance(answer.failure, self._pool.ray.exceptions.OutOfMemoryError):
                self._awaited.update(set(self._pool.actors) - before)

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of the block to the field ``part`` of the report."""
        start = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start
