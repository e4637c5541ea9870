"""One call on the actors of a cluster: the loop that hands out tasks and survives deaths."""

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
from cqs.executors.ray.job import Attend, Differentiate
from cqs.executors.ray.pool import Actor, ActorPool, actor_failures
from cqs.executors.ray.report import RunReport, TaskReport
from cqs.executors.shortage import explain_shortage
from cqs.partial import Partial
from cqs.scheduler import Plan, Task
from cqs.verify import verify_rows
from cqs.worker import Worker

_POLL_SECONDS = 0.1
_TASKS_IN_FLIGHT = 2
"""Per actor: one computes while the groups of the next are fetched."""


class WorkersFailedError(RuntimeError):
    """No worker is left to compute the remaining tasks."""


class TaskFailedError(RuntimeError):
    """A task was running on several workers when each of them died."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to give up on an actor, and on a task."""

    num_workers: int
    """Actors that a run starts with."""
    stall_timeout: float
    """Seconds in which an actor that has work must deliver something."""
    start_timeout: float
    """Seconds in which a new actor must answer."""
    max_attempts: int
    """Actors that may die of one task."""


class Run:
    """Computes one problem on a pool of actors; called once, in the cluster's dispatcher thread."""

    def __init__(
        self,
        pool: ActorPool,
        retry_policy: RetryPolicy,
        job: Attend | Differentiate,
        plan: Plan,
        *,
        worker: Worker,
        verify: bool,
        progress: Callable[[int, int], None],
        closing: threading.Event,
    ):
        """Prepare; nothing is sent before the call."""
        self._started, self._start = time.time(), time.perf_counter()
        self.cancelled = threading.Event()
        self._in_inference_mode = torch.is_inference_mode_enabled()
        self.report: RunReport | None = None
        self._pool, self._ray, self._retry_policy = pool, pool.ray, retry_policy
        self._job, self._plan, self._closing = job, plan, closing
        self._worker, self._verify, self._progress = worker, verify, progress
        self._tasks = {task.index: task for task in plan.tasks if task.steps}
        self._queries: dict[range, Any] = {}
        self._keys: dict[range, Any] = {}
        """Token groups in the object store."""
        self._shared_worker: Any = None
        """There too, once for all tasks: its pattern may be large."""
        self._in_flight: dict[Any, tuple[Actor, int]] = {}
        self._queues: dict[int, deque[Any]] = {}
        """Actor -> the results it owes, in the order in which it computes them."""
        self._attempts: Counter[int] = Counter()
        self._reports: dict[int, TaskReport] = {}
        self._seconds: Counter[str] = Counter()
        self._failures = self._reruns = 0

    def __call__(self) -> Any:
        """Compute all tasks, combine their results and return what the job makes of them."""
        with torch.inference_mode(self._in_inference_mode):  # the caller's, in another thread
            return self._run()

    def _run(self) -> Any:
        try:
            if not self._job.is_empty:
                self._compute()
        finally:
            self._queries.clear()
            self._keys.clear()
            self._shared_worker = None
        result = self._job.finish()
        self.report = RunReport(
            started=self._started,
            seconds=time.perf_counter() - self._start,
            put_seconds=self._seconds["put"],
            get_seconds=self._seconds["get"],
            merge_seconds=self._seconds["merge"],
            tasks=tuple(self._reports[index] for index in sorted(self._reports)),
            deaths=self._failures,
            reruns=self._reruns,
        )
        if self._verify and isinstance(result, Partial):
            verify_rows(self._job.problem, result)
        return result

    def _compute(self) -> None:
        """Hand out tasks, those with most live pairs first, until all results are there.

        Actors keep nothing from task to task, and the store lends a group to every task of a host,
        so it does not matter who gets which.
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
                if self.cancelled.is_set() or self._closing.is_set():
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
        """Hand the next tasks to the actors that owe least."""
        if not self._queues and not any(a.index in self._originals for a in self._pings.values()):
            raise WorkersFailedError(
                f"all {self._retry_policy.num_workers} workers died; "
                f"tasks {sorted(self._unfinished())} are not computed{self._count_failure()}"
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
        """Return references to the groups of a task; those that are new are put into the store."""
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
        """Wait for a sign of life or death and deal with all that have come."""
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
        except self._ray.exceptions.RayTaskError as error:  # the computation itself: no re-run
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
        self._progress(len(self._reports), len(self._tasks))

    def _explain(self, error: Exception, index: int) -> Exception:
        """Add to an actor's error what the driver knows about it."""
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
        """Take back an actor's tasks and start another in its place.

        Ray's memory monitor shoots several actors at once. Memory comes back, so the run waits for
        what replaces them even if nobody else is left, within reason.
        """
        queue = self._queues.pop(actor.index, deque())
        taken_back = [self._in_flight.pop(ref)[1] for ref in queue]
        self._pings = {ping: other for ping, other in self._pings.items() if other is not actor}
        self._pool.remove(actor, is_hung=is_hung)
        self._failures += 1
        self._reruns += len(taken_back)
        self._todo.extendleft(reversed(taken_back))
        if taken_back:  # an actor computes in order: it died of the first, if of any
            suspect = taken_back[0]
            self._attempts[suspect] += 1
            if self._attempts[suspect] >= self._retry_policy.max_attempts:
                raise TaskFailedError(
                    f"task {suspect} was running on {self._attempts[suspect]} workers when they "
                    "died or hung"
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
        """Add the time of a block to a part of the report."""
        start = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start  # type: ignore[assignment]

    def _is_oom_kill(self, error: Exception) -> bool:
        return isinstance(error, self._ray.exceptions.OutOfMemoryError)

    def _unfinished(self) -> set[int]:
        return set(self._tasks) - set(self._reports)

    def _count_failure(self) -> str:
        if not self._attempts:
            return ""
        task, deaths = self._attempts.most_common(1)[0]
        return f"; task {task} was running on {deaths} of them when they died"
