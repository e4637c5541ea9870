"""One run of a job: its tasks and merges are assigned to actors, and again if an actor fails."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, NamedTuple

import torch

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import (
    Actor,
    ActorPool,
    Answer,
    Calls,
    MemoryNotSharedError,
    TaskFailedError,
    WorkersFailedError,
)
from cqs.executors.ray.tasks.job import GROUP_BYTES, Group, Job, MergeCall, TaskCall
from cqs.executors.ray.tasks.outbox import Outbox
from cqs.executors.ray.tasks.report import MergeReport, RunReport, TaskReport, WorkerFailure
from cqs.executors.shortage import explain_shortage
from cqs.problem import Problem
from cqs.worker.units import WORKERS

_CALLS_IN_FLIGHT = 2
"""Calls with tasks per actor: it computes one while Ray fetches the inputs of the next."""
_CALL_SECONDS = 0.05
"""Seconds of computation that fill a call with several tasks, many times a call's overhead."""
_NOTICE_SECONDS = 0.1
"""Time in which Ray notices that an actor has failed whose parts cannot be read."""
_NUMBERS = count()
"""Numbers of the runs of this process."""


class _Part(NamedTuple):
    """Results of a task for a group, which are tokens whose results are merged together."""

    holder: Actor
    """The actor that has them."""
    place: Any
    """Where other actors find them, see :class:`MergeCall`."""


@dataclass(eq=False)
class _Merge:
    """The merge of one group, and the parts that exist."""

    group: Group
    """The group."""
    tasks: list[int]
    """Tasks whose parts it needs, in the order of the merge."""
    owner: Actor | None = None
    """The actor that merges now, if one does."""
    parts: dict[int, _Part] = field(default_factory=dict)
    """The parts that exist, by task."""
    num_losses: int = 0
    """Number of times that the owner could not read a part."""

    @property
    def is_ready(self) -> bool:
        """Whether all parts exist, and no actor merges them."""
        return self.owner is None and len(self.parts) == len(self.tasks)


@dataclass(eq=False)
class _MergeBatch:
    """Merges that one call of an actor computes."""

    merges: list[_Merge]
    """The merges."""
    num_bytes: int = 0
    """Size of their results."""


class Run:
    """One run of a job: assigns its tasks and merges to actors, and again if an actor fails.

    The results of a task stay with the actor that has computed them, in memory that other actors
    read or in the object store. The actor with the fewest calls merges them.
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
        self._worker = WORKERS[job.problem.is_reproducible].of(job.problem, backend)
        if (terms := self._worker.terms) is not None:  # each task gets its own bias
            self._worker = replace(self._worker, terms=replace(terms, bias=None, sums=(), read=()))
        self._outbox = Outbox(pool, job, next(_NUMBERS))
        self._calls = Calls(pool, cancelled)
        """Calls whose keys are lists of task calls or merge batches, or None for ``describe``."""
        self._tasks = {task.index: task for task in job.plan.tasks if task.steps}
        self._todo = deque(sorted(self._tasks, key=lambda index: -self._tasks[index].live_pairs))
        self._merges = {group: _Merge(group, tasks) for group, tasks in job.tasks_of.items()}
        """Merges that are not finished."""
        self._attempts: Counter[_Merge | int] = Counter()
        """Number of actors that failed while they merged a group, or computed a task."""
        self._reports: dict[int, TaskReport] = {}
        self._sums: dict[int, list[Blob]] = {}
        """Gradients of the leaves of the score terms by task."""
        self._merge_reports: list[MergeReport] = []
        self._get_seconds = 0.0
        self._failures: list[WorkerFailure] = []
        self.environments: set[tuple[tuple[str, str], ...]] = set()
        """Environments of the actors that have computed tasks or merges."""
        self._lost: list[int] = []
        """Tasks that were assigned again, each as often as that."""
        self._rerun_seconds = 0.0

    def __call__(self) -> RunReport:
        """Compute all tasks, merge their results and write them to the tensors of the job.

        Returns:
            The measurements of the run.

        Raises:
            CancelledError: ``cancelled`` was set, or the cluster closes.
            WorkersFailedError: All actors failed, and no replacement has started.
            TaskFailedError: ``max_attempts`` actors failed while they computed the same task, or
                merged the same group.
            torch.OutOfMemoryError: The GPU of an actor has too little memory for its task.
            MemoryNotSharedError: An actor cannot access memory of another process.
            ray.exceptions.ObjectLostError: Parts in the object store were lost too often.
            ValueError: This process lost its connection to Ray.
            Exception: The computation of a task raised; the run does not repeat it.
        """
        if self._merges:
            try:
                with self._calls:
                    self._compute()
                    self._job.synchronize()
                for index in sorted(self._sums):  # in the order of the tasks, whoever failed
                    sums = [blob.tensor() for blob in self._sums[index]]
                    self._job.add_sums(self._tasks[index], sums)
            finally:
                self._end()
        return RunReport(
            started=self._started,
            seconds=time.perf_counter() - self._start,
            transport=self._outbox.transport,
            put_seconds=self._outbox.put_seconds,
            get_seconds=self._get_seconds,
            tasks=tuple(self._reports[index] for index in sorted(self._reports)),
            merges=tuple(self._merge_reports),
            failures=tuple(self._failures),
            reruns=len(self._lost),
            rerun_seconds=self._rerun_seconds,
        )

    def _compute(self) -> None:
        """Assign tasks, those with the most live pairs first, until all groups are merged.

        Any actor may compute any task. Calls of earlier runs access shared memory: it is shared
        again when they have ended.
        """
        with Calls(self._pool, self._calls.cancelled) as calls:
            while calls.adopt():
                list(calls.collect())  # removes actors that hang
        self._outbox.share()
        self._calls.refill()
        self._settings = self._outbox.put_settings(self._worker)
        self._feed()
        if not self._job.problem.query.is_cuda:
            self._job.touch_results()
        while self._merges:
            self._calls.check()
            if len(self._pool.actors) < self._pool.num_workers:
                self._pool.grow()
                self._calls.refill()
            self._feed()
            for _ in map(self._process, self._calls.collect()):  # no variable keeps an answer
                pass

    def _end(self) -> None:
        """Let GPUs free inputs and parts, and after a failure also the memory that they share.

        Objects in the store are released, although an exception's traceback may refer to this run.
        """
        self._outbox.clear(bool(self._merges or self._failures))
        self._settings = None
        for merge in self._merges.values():
            merge.parts.clear()
        if not self._pool.is_connected:
            return
        closes = self._pool.has_stale_memory
        actors = [actor for actor in self._calls.queues if actor.info is not None]
        for actor in actors:
            if closes or self._merges or actor.info is not None and actor.info.device != "cpu":
                self._pool.abandon({actor.handle.forget.remote(closes): actor})
        self._pool.has_stale_memory = closes and len(actors) < len(self._pool.infos)

    def _feed(self) -> None:
        """Assign the next tasks, then merges whose parts exist, to actors with the fewest calls."""
        queues = self._calls.queues
        started = [actor for actor in queues if actor.info and self._outbox.reaches(actor.info)]
        if not started and all(actor.info for actor in queues):
            if queues:  # all are on other hosts
                raise MemoryNotSharedError("no worker is left on the host of shared memory")
            message = f"all {len(self._pool.actors)} workers failed; tasks "
            message += f"{sorted(set(self._tasks) - set(self._reports))} are not computed"
            for work, failures in self._attempts.most_common(1):
                message += f"; {_name_of(work)} was running on {failures} of them when they failed"
            raise WorkersFailedError(message)
        self._assign_merges(started)
        while started and self._todo:
            actor = min(started, key=self._count_tasks)
            if self._count_tasks(actor) >= _CALLS_IN_FLIGHT:
                break
            self._assign_tasks(actor)
        self._assign_merges(started)

    def _count_tasks(self, actor: Actor) -> int:
        """Return the number of pending calls of an actor with tasks."""
        return sum(isinstance(work, list) for work in self._calls.queues[actor].values())

    def _assign_tasks(self, actor: Actor) -> None:
        """Let an actor compute the next tasks: several in one call if they are short."""
        number = 1
        if self._reports:
            average = sum(report.seconds for report in self._reports.values()) / len(self._reports)
            share = -(-len(self._todo) // len(self._pool.actors))
            number = max(1, min(share, int(_CALL_SECONDS / average)))
        work: list[TaskCall] = []
        while len(work) < number and self._todo:
            index = self._todo[0]
            if work and self._attempts.keys() & {index, work[0].task.index}:
                break  # a task that was running when an actor failed is computed alone
            self._todo.popleft()
            groups = [group for group in self._job.groups_of[index] if self._lacks(group, index)]
            task = self._tasks[index]
            work.append(TaskCall(task, groups, self._job.bias_of(task)))
        # First the tensors of queries, or references to them, then those of keys.
        num_queries, sent = self._outbox.put([call.task for call in work])
        self._calls.add(actor, work, "run", self._settings, work, num_queries, *sent)

    def _lacks(self, group: Group, index: int) -> bool:
        """Return whether the merge of a group lacks the part of a task."""
        merge = self._merges.get(group)
        return merge is not None and index not in merge.parts

    def _assign_merges(self, started: list[Actor]) -> None:
        """Let actors merge the groups whose parts exist, in calls with results of limited size.

        While an actor has two calls with tasks, merges wait, to be sent together before a third.
        """
        is_on_gpu, queues = self._outbox.is_on_gpu, self._calls.queues
        if self._todo and is_on_gpu:  # nobody reads a result before all are complete
            return
        most_bytes = math.inf if is_on_gpu else GROUP_BYTES  # of results that the driver reads
        free = [actor for actor in started if self._count_tasks(actor) < _CALLS_IN_FLIGHT]
        calls: dict[Actor, list[_MergeBatch]] = {actor: [] for actor in free}

        def count_work(actor: Actor) -> tuple[int, int]:
            return len(queues[actor]), sum(batch.num_bytes for batch in calls[actor])

        for merge in [merge for merge in self._merges.values() if free and merge.is_ready]:
            merge.owner = min(free, key=count_work)
            batches, size = calls[merge.owner], self._job.num_bytes(merge.group)
            if not batches or batches[-1].num_bytes + size > most_bytes:
                batches.append(_MergeBatch([]))
            batches[-1].merges.append(merge)
            batches[-1].num_bytes += size
        for owner, work in ((owner, work) for owner, batches in calls.items() for work in batches):
            sent = [
                MergeCall(m.group, [m.parts[i].place for i in m.tasks], m in self._attempts)
                for m in work.merges
            ]
            self._calls.add(owner, work, "merge", self._settings, sent)

    def _process(self, answer: Answer) -> None:
        """Accept an answer; an error of a task is raised, because a repetition would not help."""
        work, info = (answer.keys[0] if answer.keys else None), answer.actor.info
        if work is not None and info is not None:
            self.environments.add(info.environment)
        if answer.failure is not None:
            self._replace(answer)
        elif isinstance(work, _MergeBatch):
            self._finish_merges(work, answer)
        elif isinstance(answer.error, torch.OutOfMemoryError):
            _, index, backend, capacity = answer.error.args
            message = explain_shortage(self._job.problem, self._job.plan, backend, capacity, index)
            raise torch.OutOfMemoryError(message) from answer.error.__cause__
        elif answer.error is not None:
            raise answer.error
        elif work is not None:
            self._finish_tasks(work, answer)

    def _finish_tasks(self, work: list[TaskCall], answer: Answer) -> None:
        """Record the parts of an answer, and the progress of tasks computed for the first time."""
        finished = []
        for call, (report, sums, parts) in zip(work, answer.value, strict=True):
            index = call.task.index
            if index not in self._reports:
                finished.append(index)
                self._sums[index] = sums
            self._reports[index] = report
            self._rerun_seconds += report.seconds if index in self._lost else 0.0
            for group in self._job.groups_of[index]:
                if not self._lacks(group, index):
                    continue
                if group in parts:
                    self._merges[group].parts[index] = _Part(answer.actor, parts[group])
                else:  # lost since the task was assigned
                    self._repeat([index])
            parts.clear()  # no answer keeps references: tracebacks refer to it
        for index in finished:
            self._progress(self._job.problem, self._tasks[index].live_pairs)  # may raise

    def _finish_merges(self, work: _MergeBatch, answer: Answer) -> None:
        """Write the results of merges, or repeat tasks whose parts could not be read."""
        errors = self._pool.ray.exceptions
        if isinstance(answer.error, MemoryNotSharedError | errors.ObjectLostError):
            for holder in {part.holder for m in work.merges for part in m.parts.values()}:
                if holder.handle is not None:  # which of them has failed?
                    self._calls.add(holder, None, "describe")
            time.sleep(_NOTICE_SECONDS)
            for merge in work.merges:
                merge.num_losses += 1
                if merge.num_losses > 10 * self._pool.retry_policy.max_attempts:
                    raise answer.error
                self._repeat(self._drop_parts(merge))
            return
        if answer.error is not None:
            raise answer.error
        report, merged = answer.value
        self._merge_reports.append(report)
        start = time.perf_counter()
        for merge, blobs in zip(work.merges, merged, strict=True):
            results = [blob.tensor() for blob in blobs] or self._outbox.merged(merge.group)
            self._job.accept(merge.group, results)
            del self._merges[merge.group]
        self._get_seconds += answer.seconds + time.perf_counter() - start

    def _drop_parts(self, merge: _Merge) -> list[int]:
        """Record that nobody merges a group; return the tasks whose parts failed actors had."""
        lost = [index for index, part in merge.parts.items() if part.holder.handle is None]
        for index in lost:
            del merge.parts[index]
        merge.owner = None
        return lost

    def _replace(self, answer: Answer) -> None:
        """Reassign the calls and the kept parts of a failed actor, and start a replacement.

        It starts none after ``max_attempts * num_workers`` failures, nor if no actor is up and this
        one did not start in time, which counts as no failure: it may have had no room.
        """
        pending = [key for key in answer.keys if key is not None]
        lost = [call.task.index for work in pending if isinstance(work, list) for call in work]
        for merge in self._merges.values():
            if merge.owner in (None, answer.actor):  # otherwise it is merged now
                lost += self._drop_parts(merge)
        pid, node = (None, None) if answer.info is None else answer.info[:2]
        failure = WorkerFailure(pid, node, time.time(), self._repeat(lost))
        is_late = answer.info is None and isinstance(answer.failure, TimeoutError)
        if not is_late:
            self._failures.append(failure)
        most = self._pool.retry_policy.max_attempts
        for work in answer.keys[:1]:  # an actor computes in order, so only the first was running
            if work is None:
                continue
            is_merge = isinstance(work, _MergeBatch)
            keys = work.merges if is_merge else [call.task.index for call in work]
            self._attempts.update(keys)
            worst = max(keys, key=self._attempts.__getitem__)
            if self._attempts[worst] == most:
                raise TaskFailedError(
                    f"{_name_of(worst)} was running on {most} workers when they failed or hung"
                ) from answer.failure
        is_up = any(actor.info for actor in self._calls.queues)
        if is_up if is_late else len(self._failures) < most * len(self._pool.actors):
            self._calls.refill()

    def _repeat(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Assign tasks again, before all others; one at an actor follows if its parts are lost.

        Returns:
            The tasks that were not assigned already, those with the most live pairs first.
        """
        queued = chain.from_iterable(queue.values() for queue in self._calls.queues.values())
        running = [call.task.index for work in queued if isinstance(work, list) for call in work]
        new = set(indices).difference(self._todo, running)
        lost = sorted(new, key=lambda index: -self._tasks[index].live_pairs)
        self._lost += lost
        self._todo.extendleft(reversed(lost))
        return tuple(lost)


def _name_of(work: _Merge | int) -> str:
    return f"task {work}" if isinstance(work, int) else f"the merge of {work.group.tokens}"
