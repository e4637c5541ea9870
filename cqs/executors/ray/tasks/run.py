"""The driver loop of one call: assigns tasks to actors and re-executes tasks of failed actors."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.failures import Answer, Calls, RetryPolicy, WorkersFailedError
from cqs.executors.ray.pool import Actor, ActorPool
from cqs.executors.ray.tasks.job import Attend, Differentiate
from cqs.executors.ray.tasks.report import RunReport, TaskReport
from cqs.executors.shortage import explain_shortage
from cqs.problem import Problem
from cqs.scheduler import Plan, Task
from cqs.worker import Worker

_TASKS_IN_FLIGHT = 2
"""Tasks per actor: the actor computes one while Ray fetches the inputs of the next."""


class Run:
    """One run of a plan on a pool of actors; the dispatcher thread calls it once."""

    def __init__(
        self,
        pool: ActorPool,
        retry_policy: RetryPolicy,
        job: Attend | Differentiate,
        plan: Plan,
        *,
        worker: Worker,
        progress: Callable[[Problem, int], None],
        cancelled: threading.Event,
        closing: threading.Event,
    ):
        """Store the arguments; send nothing to the actors.

        Args:
            pool: Actors that compute the tasks.
            retry_policy: Timeouts and the number of attempts per task.
            job: Forward or backward pass of a checked problem.
            plan: Plan for the sequence lengths of the problem.
            worker: Settings and backend of the computation, sent to every actor.
            progress: Called with the problem and the live pairs of a task after every task.
            cancelled: Event that makes the run stop.
            closing: Set when the cluster closes; the run then stops too.
        """
        self._started, self._start = time.time(), time.perf_counter()
        self._pool, self._ray, self._retry_policy = pool, pool.ray, retry_policy
        self._job, self._plan, self._worker, self._progress = job, plan, worker, progress
        self._calls = Calls(pool, cancelled.is_set, closing)
        """Calls with the index of their task as key; pings have None."""
        self._tasks = {task.index: task for task in plan.tasks if task.steps}
        self._queries: dict[range, Any] = {}
        self._keys: dict[range, Any] = {}
        """References to token groups in the object store, by token range."""
        self._shared_worker: Any = None
        """Reference to the worker, stored once for all tasks: its pattern may be large."""
        self._starting: set[int] = set()
        """Indices of actors that have not yet answered a ping."""
        self._ready: list[int] = []
        """Indices of actors that have."""
        self._attempts: Counter[int] = Counter()
        self._reports: dict[int, TaskReport] = {}
        self._seconds: Counter[str] = Counter()
        self._failures = self._reruns = 0

    def __call__(self) -> tuple[Any, RunReport]:
        """Compute all tasks and merge their results.

        Returns:
            The result of the job, and the measurements of the run.

        Raises:
            CancelledError: ``cancelled`` or ``closing`` was set.
            WorkersFailedError: All actors failed, and the run does not wait for a replacement.
            TaskFailedError: ``max_attempts`` actors failed while they computed the same task.
            torch.OutOfMemoryError: The GPU of an actor has too little memory for its task.
            ValueError: This process lost its connection to Ray.
            Exception: The computation of a task raised; the run does not repeat it.
        """
        try:
            if not self._job.is_empty:
                self._compute()
        finally:
            self._queries.clear()
            self._keys.clear()
            self._shared_worker = None
        result = self._job.finish()
        return result, RunReport(
            started=self._started,
            seconds=time.perf_counter() - self._start,
            put_seconds=self._seconds["put"],
            get_seconds=self._seconds["get"],
            merge_seconds=self._seconds["merge"],
            tasks=tuple(self._reports[index] for index in sorted(self._reports)),
            failures=self._failures,
            reruns=self._reruns,
        )

    def _compute(self) -> None:
        """Assign tasks, those with the most live pairs first, until all results have arrived.

        Any actor may compute any task: actors keep no tensors from task to task, and all actors of
        a host read a token group from the same object store.
        """
        for task in self._plan.tasks:
            if task.index not in self._tasks:
                self._job.accept(task, [])
        largest_first = sorted(self._tasks.values(), key=lambda task: -task.live_pairs)
        self._todo = deque(task.index for task in largest_first)
        self._pool.abandon([])
        self._pool.start(self._retry_policy.num_workers - len(self._pool.actors))
        self._originals = set(self._pool.actors)
        for actor in self._pool.actors.values():
            self._ping(actor)
        with self._clock("put"):
            self._shared_worker = self._ray.put(self._worker)
        try:
            while len(self._reports) < len(self._tasks):
                self._calls.check()
                self._feed()
                for answer in self._calls.collect():
                    self._process(answer)
                for actor in self._calls.find_hung(self._retry_policy):
                    self._replace(self._calls.fail(actor, TimeoutError(), is_hung=True))
        finally:
            if self._pool.is_connected:
                for queue in self._calls.queues.values():
                    for ref, index in queue.items():
                        if index is not None:
                            self._ray.cancel(ref, force=False)
                self._calls.abandon()

    def _ping(self, actor: Actor) -> None:
        self._calls.add(actor, None, actor.ping())
        self._starting.add(actor.index)

    def _feed(self) -> None:
        """Assign the next tasks to the actors with the shortest queues."""
        if not self._ready and self._starting.isdisjoint(self._originals):
            raise WorkersFailedError(
                f"all {self._retry_policy.num_workers} workers failed; "
                f"tasks {sorted(self._unfinished())} are not computed{self._worst_task()}"
            )
        queues = self._calls.queues
        while self._todo and self._ready:
            actor = self._pool.actors[min(self._ready, key=lambda index: len(queues[index]))]
            if len(queues[actor.index]) >= _TASKS_IN_FLIGHT:
                return
            task = self._tasks[self._todo.popleft()]
            groups = self._put_groups(task)
            ref = actor.handle.run.remote(task, self._job.compute, self._shared_worker, *groups)
            self._calls.add(actor, task.index, ref)

    def _put_groups(self, task: Task) -> list[Any]:
        """Return references to the token groups of a task; put new groups into the object store."""
        sides = [
            (self._job.of_queries, task.held_queries, self._queries),
            (self._job.of_keys, task.held_keys, self._keys),
        ]
        with self._clock("put"):
            for tensors, ranges, stored in sides:
                for tokens in ranges:
                    if tokens not in stored:
                        part = slice(tokens.start, tokens.stop)
                        group = tuple(Blob(tensor[:, :, part]) for tensor in tensors)
                        stored[tokens] = self._ray.put(group)
        return [stored[tokens] for _, ranges, stored in sides for tokens in ranges]

    def _process(self, answer: Answer) -> None:
        """Accept an answer; an error of a task is raised, because a repetition would not help."""
        if answer.failure is not None:
            self._replace(answer)
            return
        (index,) = answer.keys
        if answer.error is not None:
            raise self._explain(answer.error, index) from answer.error.__cause__
        if index is None:
            answer.actor.info = answer.value
            self._starting.discard(answer.actor.index)
            self._ready.append(answer.actor.index)
            return
        self._seconds["get"] += answer.seconds  # type: ignore[assignment]
        results, self._reports[index] = answer.value
        with self._clock("merge"):
            tensors = [tuple(blob.tensor() for blob in group) for group in results]
            self._job.accept(self._tasks[index], tensors)
        self._progress(self._job.problem, self._tasks[index].live_pairs)

    def _explain(self, error: Exception, index: int) -> Exception:
        """Add the problem, plan and predicted memory to an out-of-memory error of an actor."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        _, backend, capacity = error.args
        problem, plan = self._job.problem, self._plan
        return torch.OutOfMemoryError(explain_shortage(problem, plan, backend, capacity, index))

    def _replace(self, answer: Answer) -> None:
        """Reassign the tasks of a failed actor and start a replacement.

        Ray's out-of-memory monitor may kill several actors at once. Memory is free again after
        that, so the run waits for the replacements even if no other actor is left. It stops
        waiting after ``max_attempts * num_workers`` failures.
        """
        actor = answer.actor
        self._starting.discard(actor.index)
        if actor.index in self._ready:
            self._ready.remove(actor.index)
        taken_back = [index for index in answer.keys if index is not None]
        self._failures += 1
        self._reruns += len(taken_back)
        self._todo.extendleft(reversed(taken_back))
        if taken_back:  # an actor computes in order, so only the first was running
            self._retry_policy.count(
                self._attempts,
                taken_back[0],
                lambda number: (
                    f"task {taken_back[0]} was running on {number} workers when they failed or hung"
                ),
            )
        if actor.index in self._originals:
            (replacement,) = self._pool.start(1)
            self._ping(replacement)
            most = self._retry_policy.max_attempts * self._retry_policy.num_workers
            is_oom_kill = isinstance(answer.failure, self._ray.exceptions.OutOfMemoryError)
            if is_oom_kill and self._failures < most:
                self._originals.add(replacement.index)

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of the block to the seconds of ``part`` in the report."""
        start = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start  # type: ignore[assignment]

    def _unfinished(self) -> set[int]:
        return set(self._tasks) - set(self._reports)

    def _worst_task(self) -> str:
        """Return the end of an error message: the task on which most actors failed."""
        if not self._attempts:
            return ""
        task, failures = self._attempts.most_common(1)[0]
        return f"; task {task} was running on {failures} of them when they failed"
