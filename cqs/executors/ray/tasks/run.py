"""The driver loop of one call: assigns tasks to actors and re-executes tasks of failed actors."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import torch

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import Actor, ActorPool, actor_failures
from cqs.executors.ray.tasks.job import Attend, Differentiate
from cqs.executors.ray.tasks.report import RunReport, TaskReport
from cqs.executors.shortage import explain_shortage
from cqs.problem import Problem
from cqs.scheduler import Plan, Task
from cqs.worker import Worker

_POLL_SECONDS = 0.1
"""Longest wait for results before the loop checks for cancellation and timeouts."""
_TASKS_IN_FLIGHT = 2
"""Tasks per actor: the actor computes one while Ray fetches the inputs of the next."""


class WorkersFailedError(RuntimeError):
    """No worker is left to compute the remaining tasks."""


class TaskFailedError(RuntimeError):
    """As many workers as ``max_attempts`` failed on the same task or shard operation."""


@dataclass(frozen=True)
class RetryPolicy:
    """After how many failures, and after how long a silence, a run gives up."""

    num_workers: int
    """Number of actors at the start of a run."""
    stall_timeout: float
    """Seconds after which an actor that has work and returns no result counts as hung."""
    start_timeout: float
    """Seconds that a new actor may take until it answers."""
    max_attempts: int
    """Number of actors that may fail on one task before the run raises."""


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
        self._cancelled, self._closing = cancelled, closing
        self._tasks = {task.index: task for task in plan.tasks if task.steps}
        self._queries: dict[range, Any] = {}
        self._keys: dict[range, Any] = {}
        """References to token groups in the object store, by token range."""
        self._shared_worker: Any = None
        """Reference to the worker, stored once for all tasks: its pattern may be large."""
        self._in_flight: dict[Any, tuple[Actor, int]] = {}
        self._queues: dict[int, deque[Any]] = {}
        """By actor index, references to pending results in the order of computation."""
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
        self._pings = {actor.ping(): actor for actor in self._pool.actors.values()}
        self._originals = set(self._pool.actors)
        self._last_sign = dict.fromkeys(self._originals, time.monotonic())
        with self._clock("put"):
            self._shared_worker = self._ray.put(self._worker)
        try:
            while len(self._reports) < len(self._tasks):
                if self._cancelled.is_set() or self._closing.is_set():
                    raise CancelledError
                self._pool.check_connected()
                self._feed()
                self._collect()
                self._remove_hung()
        finally:
            if self._pool.is_connected:
                for ref in self._in_flight:
                    self._ray.cancel(ref, force=False)
                self._pool.abandon(list(self._in_flight))

    def _feed(self) -> None:
        """Assign the next tasks to the actors with the shortest queues."""
        if not self._queues and not any(a.index in self._originals for a in self._pings.values()):
            raise WorkersFailedError(
                f"all {self._retry_policy.num_workers} workers failed; "
                f"tasks {sorted(self._unfinished())} are not computed{self._worst_task()}"
            )
        while self._todo and self._queues:
            index = min(self._queues, key=lambda index: len(self._queues[index]))
            if len(self._queues[index]) >= _TASKS_IN_FLIGHT:
                return
            actor = self._pool.actors[index]
            task = self._tasks[self._todo.popleft()]
            groups = self._put_groups(task)
            ref = actor.handle.run.remote(task, self._job.compute, self._shared_worker, *groups)
            if not self._queues[index]:
                self._last_sign[index] = time.monotonic()
            self._queues[index].append(ref)
            self._in_flight[ref] = actor, task.index

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

    def _collect(self) -> None:
        """Wait up to ``_POLL_SECONDS`` for an answer or failure, and process all that are ready."""
        refs = [*self._in_flight, *self._pings]
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=_POLL_SECONDS)
        if ready and len(refs) > 1:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in self._pings:
                self._greet(ref)
            elif ref in self._in_flight:
                self._accept(ref)

    def _greet(self, ping: Any) -> None:
        actor = self._pings.pop(ping)
        try:
            actor.info = self._ray.get(ping)
        except actor_failures(self._ray) as error:
            self._remove_failed(actor, is_oom_kill=self._is_oom_kill(error))
            return
        self._queues[actor.index] = deque()

    def _accept(self, ref: Any) -> None:
        actor, index = self._in_flight[ref]
        try:
            with self._clock("get"):
                results, report = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # raised by the task: no retry
            raise self._explain(error.cause, index) from error
        except actor_failures(self._ray) as error:
            self._remove_failed(actor, is_oom_kill=self._is_oom_kill(error))
            return
        del self._in_flight[ref]
        self._queues[actor.index].remove(ref)
        self._last_sign[actor.index] = time.monotonic()
        with self._clock("merge"):
            tensors = [tuple(blob.tensor() for blob in group) for group in results]
            self._job.accept(self._tasks[index], tensors)
        self._reports[index] = report
        self._progress(self._job.problem, self._tasks[index].live_pairs)

    def _explain(self, error: Exception, index: int) -> Exception:
        """Add the problem, plan and predicted memory to an out-of-memory error of an actor."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        _, backend, capacity = error.args
        problem, plan = self._job.problem, self._plan
        return torch.OutOfMemoryError(explain_shortage(problem, plan, backend, capacity, index))

    def _remove_hung(self) -> None:
        now = time.monotonic()
        owing = [self._pool.actors[index] for index, queue in self._queues.items() if queue]
        for actor in [*owing, *self._pings.values()]:
            timeout = self._retry_policy.stall_timeout
            if actor.info is None:
                timeout = max(timeout, self._retry_policy.start_timeout)
            if now - self._last_sign[actor.index] > timeout:
                self._remove_failed(actor, is_hung=True)

    def _remove_failed(
        self, actor: Actor, *, is_hung: bool = False, is_oom_kill: bool = False
    ) -> None:
        """Reassign the tasks of a failed actor and start a replacement.

        Ray's out-of-memory monitor may kill several actors at once. Memory is free again after
        that, so the run waits for the replacements even if no other actor is left. It stops
        waiting after ``max_attempts * num_workers`` failures.
        """
        queue = self._queues.pop(actor.index, deque())
        taken_back = [self._in_flight.pop(ref)[1] for ref in queue]
        self._pings = {ping: other for ping, other in self._pings.items() if other is not actor}
        self._pool.remove(actor, is_hung=is_hung)
        self._failures += 1
        self._reruns += len(taken_back)
        self._todo.extendleft(reversed(taken_back))
        if taken_back:  # an actor computes in order, so only the first was running
            suspect = taken_back[0]
            self._attempts[suspect] += 1
            if self._attempts[suspect] >= self._retry_policy.max_attempts:
                raise TaskFailedError(
                    f"task {suspect} was running on {self._attempts[suspect]} workers when they "
                    "failed or hung"
                )
        if actor.index in self._originals:
            (replacement,) = self._pool.start(1)
            self._pings[replacement.ping()] = replacement
            self._last_sign[replacement.index] = time.monotonic()
            if (
                is_oom_kill
                and self._failures
                < self._retry_policy.max_attempts * self._retry_policy.num_workers
            ):
                self._originals.add(replacement.index)

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of the block to the seconds of ``part`` in the report."""
        start = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start  # type: ignore[assignment]

    def _is_oom_kill(self, error: Exception) -> bool:
        return isinstance(error, self._ray.exceptions.OutOfMemoryError)

    def _unfinished(self) -> set[int]:
        return set(self._tasks) - set(self._reports)

    def _worst_task(self) -> str:
        """Return the end of an error message: the task on which most actors failed."""
        if not self._attempts:
            return ""
        task, failures = self._attempts.most_common(1)[0]
        return f"; task {task} was running on {failures} of them when they failed"
