"""Tasks on the actors of a Ray cluster; the only module that imports Ray.

Every token group is put into the object store once and fetched by its holders alone. A task is a
pure function of its groups, so the loop in :class:`_Run` may compute it again anywhere: actors are
never restarted or retried by Ray (``max_restarts=0``, ``max_task_retries=0``), which makes the
death of one final, and each task's first result counts.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cqs.executors.actor import ActorInfo, TaskActor, host_name
from cqs.executors.blob import Blob
from cqs.executors.report import RunReport, TaskReport
from cqs.partial import Partial
from cqs.problem import Problem, check_problem
from cqs.scheduler import Plan
from cqs.tiler import Tiler
from cqs.verify import verify_rows
from cqs.worker import check_backend_name

_POLL_SECONDS = 0.1
_DISPATCHER = "cqs-dispatcher"
_TASKS_IN_FLIGHT = 2
"""Per actor: one computes while the groups of the next are fetched."""


class WorkersDiedError(RuntimeError):
    """No worker is left to compute the remaining tasks."""


class TaskFailedError(RuntimeError):
    """A task was running on several workers when each of them died."""


class Cluster:
    """Workers on a Ray cluster, one per GPU where it has any, else on CPU cores.

    Without ``address`` it uses the Ray that this process is connected to, or else starts a private
    one on this machine: no dashboard, no usage statistics, requests authenticated by a random
    token, files in a directory closed to other users. Only what it started is shut down.

    Ray runs whatever its clients send: connect to clusters in trusted networks only.

    Example::

        with cqs.Cluster(num_workers=4) as cluster:
            output = cluster.attention(query, key, value, is_causal=True, num_workers=13)
    """

    actor_class: type = TaskActor
    """The plain class whose remote instances compute tasks."""

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        address: str | None = None,
        use_gpus: bool | None = None,
        cpus_per_worker: int | None = None,
        object_store_memory: int | None = None,
        stall_timeout: float = 600.0,
        start_timeout: float = 120.0,
        max_attempts: int = 3,
    ):
        """Start the workers and wait until they answer.

        Args:
            num_workers: Number of actors; ``None`` means one per GPU, or without GPUs one per
                core of this machine.
            address: Address of a running cluster, as for ``ray.init``: ``"auto"``,
                ``"host:port"`` or ``"ray://host:port"``.
            use_gpus: Pin each actor to a GPU of its own; ``None`` means if the cluster has GPUs.
            cpus_per_worker: Cores (and threads) of each CPU actor; ``None`` shares out this
                machine's cores in a private cluster and means 1 elsewhere.
            object_store_memory: Bytes of a private cluster's object store; ``None`` lets Ray
                choose. What does not fit is spilled to disk.
            stall_timeout: Seconds after which a worker that has work and delivers nothing counts as
                hung and is killed; must exceed the longest task.
            start_timeout: Seconds that starting an actor may take.
            max_attempts: How many workers may die computing one task before the call fails.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if a number is out of range, no cluster answers at ``address``, or the
                cluster has not enough free GPUs or cores.
            NotImplementedError: if Ray is not installed.
        """
        for name, number in (
            ("num_workers", num_workers),
            ("cpus_per_worker", cpus_per_worker),
            ("object_store_memory", object_store_memory),
            ("max_attempts", max_attempts),
        ):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise TypeError(f"{name} must be an integer, got {number!r}")
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        for name, seconds in (("stall_timeout", stall_timeout), ("start_timeout", start_timeout)):
            if not isinstance(seconds, int | float) or isinstance(seconds, bool):
                raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
            if not seconds > 0:
                raise ValueError(f"{name} must be positive, got {seconds}")
        if address is not None and not isinstance(address, str):
            raise TypeError(f"address must be a string, got {address!r}")
        self._stall_timeout, self._start_timeout = float(stall_timeout), float(start_timeout)
        self._max_attempts = max_attempts
        self._actors: dict[int, _Actor] = {}
        self._num_started = 0
        self._closing = threading.Event()
        self._dispatcher = ThreadPoolExecutor(1, thread_name_prefix=_DISPATCHER)
        if address is None and not _is_connected():
            num_gpus = 0 if use_gpus is False else torch.cuda.device_count()
            num_workers = num_workers or num_gpus or _num_cores()
            cpus_per_worker = cpus_per_worker or max(_num_cores() // num_workers, 1)
            self._ray, disconnect = _start_private_ray(
                num_workers * cpus_per_worker, num_gpus, object_store_memory
            )
        else:
            self._ray, disconnect = _connect(address)
        self._close = weakref.finalize(
            self, _close, self._ray, self._closing, self._dispatcher, self._actors, disconnect
        )
        try:
            self._num_workers = self._start_all(num_workers, use_gpus, cpus_per_worker or 1)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, and Ray if this cluster started it. Pending calls are cancelled."""
        self._close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have started, in the order in which they did."""
        return tuple(a.info.pid for a in list(self._actors.values()) if a.info is not None)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        num_workers: int | None = None,
        interest_set: Iterable[int] | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute exact attention on the workers; see :func:`cqs.attention`.

        Args:
            query: ``[batch, num_heads, seqlen_q, head_dim]``.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
            is_causal: Query i sees the keys up to ``i + seqlen_kv - seqlen_q``.
            scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            num_workers: Number of tasks, any number; ``None`` means one per actor.
            interest_set: See :func:`cqs.make_plan`.
            backend: Name of a backend, or ``None`` for the best of each worker.
            return_lse: Also return the log of the softmax denominators.
            verify: Recompute sampled rows in float64 and raise if they disagree.
            progress: True draws a progress bar; a function is called with (tasks done, tasks in
                all).

        Raises:
            TypeError: as :func:`cqs.attention`.
            ValueError: as :func:`cqs.attention`, and if the cluster is closed.
            NotImplementedError: as :func:`cqs.attention`.
            WorkersDiedError: if all workers are dead.
            TaskFailedError: if a task kills every worker that it meets.
        """
        future = self.submit(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            num_workers=num_workers,
            interest_set=interest_set,
            backend=backend,
            return_lse=return_lse,
            verify=verify,
            progress=progress,
        )
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        num_workers: int | None = None,
        interest_set: Iterable[int] | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> "AttentionFuture":
        """Start :meth:`attention` and return at once; calls run one after another.

        The tensors have been read when this returns (unless ``verify`` is set, which reads them
        again at the end) and may be reused.
        """
        if not self._close.alive:
            raise ValueError("this cluster is closed")
        start = time.perf_counter()
        problem = check_problem(query, key, value, is_causal=is_causal, scale=scale)
        check_backend_name(backend)
        if num_workers is None:
            num_workers = self._num_workers
        plan = problem.make_plan(num_workers, interest_set)
        run = _Run(self, problem, plan, backend, verify, _progress_callback(progress), start)
        return AttentionFuture(self._dispatcher.submit(run), run, return_lse)

    def _start_all(
        self, num_workers: int | None, use_gpus: bool | None, cpus_per_worker: int
    ) -> int:
        """Start the workers, all or none, and return their number."""
        total = self._ray.cluster_resources()
        if use_gpus is None:
            use_gpus = total.get("GPU", 0) >= 1
        kind, each = ("GPU", 1) if use_gpus else ("CPU", cpus_per_worker)
        if num_workers is None:
            num_workers = max(int(total.get(kind, 0)) // each, 1)
        deadline = time.monotonic() + 5  # what actors that just ended held comes back late
        while (free := self._ray.available_resources().get(kind, 0)) < num_workers * each:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"num_workers={num_workers} needs {num_workers * each} free {kind}s, but the "
                    f"cluster has {free:g} of {total.get(kind, 0):g}"
                )
            time.sleep(_POLL_SECONDS)
        self._remote_class = self._ray.remote(
            num_cpus=0 if use_gpus else each,
            num_gpus=int(use_gpus),
            max_restarts=0,
            max_task_retries=0,
        )(self.actor_class)
        self._actor_arguments = use_gpus, cpus_per_worker
        pings = [(actor, actor.ping()) for actor in self._start_actors(num_workers)]
        for actor, ping in pings:
            try:
                actor.info = self._ray.get(ping, timeout=self._start_timeout)
            except self._ray.exceptions.GetTimeoutError:
                raise ValueError(
                    f"a worker did not start within start_timeout={self._start_timeout:g} s"
                ) from None
        return num_workers

    def _start_actors(self, number: int) -> list["_Actor"]:
        started = []
        for _ in range(number):
            actor = _Actor(self._num_started, self._remote_class.remote(*self._actor_arguments))
            self._actors[actor.index] = actor
            self._num_started += 1
            started.append(actor)
        return started

    def _remove_actor(self, actor: "_Actor", *, is_hung: bool) -> None:
        """Let go of an actor, and make sure that it ends if it answers nothing any more."""
        del self._actors[actor.index]
        self._ray.kill(actor.handle, no_restart=True)
        if is_hung and actor.info is not None and actor.info.host == host_name():
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor.info.pid, signal.SIGKILL)


class AttentionFuture:
    """The answer of :meth:`Cluster.submit`, now or later."""

    def __init__(self, future: "Future[Partial]", run: "_Run", return_lse: bool):
        """Wrap the run's future."""
        self._future, self._run, self._return_lse = future, run, return_lse

    def result(self, timeout: float | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Wait for the answer: ``output``, or ``(output, lse)`` with ``return_lse``.

        Raises:
            TimeoutError: if it is not there after ``timeout`` seconds; the run goes on.
            concurrent.futures.CancelledError: if it was cancelled.
        """
        answer = self._future.result(timeout)
        return (answer.output, answer.lse) if self._return_lse else answer.output

    def cancel(self) -> bool:
        """Give up; False if it was too late. Tasks that are running finish unseen."""
        self._run.cancelled.set()
        return self._future.cancel() or not self._future.done()

    def done(self) -> bool:
        """Say whether the run has ended, in whatever way."""
        return self._future.done()

    @property
    def report(self) -> RunReport:
        """What the run took; waits for its end."""
        self._future.result()
        assert self._run.report is not None
        return self._run.report


@dataclass
class _Actor:
    """An actor as the driver knows it."""

    index: int
    handle: Any
    info: ActorInfo | None = None

    def ping(self) -> Any:
        return self.handle.describe.remote()


class _Run:
    """One call on the actors of a cluster; runs in its dispatcher thread."""

    def __init__(
        self,
        cluster: Cluster,
        problem: Problem,
        plan: Plan,
        backend: str | None,
        verify: bool,
        progress: Callable[[int, int], None],
        start: float,
    ):
        """Put every token group into the object store, once."""
        self.cancelled = threading.Event()
        self.report: RunReport | None = None
        self._cluster, self._ray = cluster, cluster._ray
        self._problem, self._plan = problem, plan
        self._backend, self._verify, self._progress = backend, verify, progress
        self._start, self._merge_seconds = start, 0.0
        self._deaths = self._reruns = 0
        self._reports: dict[int, TaskReport] = {}
        self._attempts: Counter[int] = Counter()
        self._in_flight: dict[Any, tuple[_Actor, int]] = {}
        self._queues: dict[int, deque[Any]] = {}
        """Actor -> the results it owes, in the order in which it computes them."""
        tasks = plan.tasks if problem.query.numel() else ()
        self._tasks = {task.worker: task for task in tasks if task.steps}
        held_queries = {tokens for task in self._tasks.values() for tokens in task.held_queries}
        held_keys = {tokens for task in self._tasks.values() for tokens in task.held_keys}
        put_start = time.perf_counter()
        self._queries = {
            tokens: self._ray.put(Blob(_rows(problem.query, tokens))) for tokens in held_queries
        }
        self._keys = {
            tokens: self._ray.put(
                (Blob(_rows(problem.key, tokens)), Blob(_rows(problem.value, tokens)))
            )
            for tokens in held_keys
        }
        self._put_seconds = time.perf_counter() - put_start

    def __call__(self) -> Partial:
        """Compute all tasks, merge them and return the answer."""
        try:
            answer = self._compute()
        finally:
            self._queries.clear()
            self._keys.clear()
        answer = Partial(*(tensor.to(self._problem.query.device) for tensor in answer))
        seconds = time.perf_counter() - self._start
        self.report = RunReport(
            seconds=seconds,
            put_seconds=self._put_seconds,
            merge_seconds=self._merge_seconds,
            tasks=tuple(self._reports[worker] for worker in sorted(self._reports)),
            deaths=self._deaths,
            reruns=self._reruns,
        )
        if self._verify:
            verify_rows(self._problem, answer)
        return answer

    def _compute(self) -> Partial:
        answer = _empty_cpu_answer(self._problem)
        if not answer.output.numel():
            return answer
        tiler = Tiler(self._plan, *answer)
        for worker in set(range(self._plan.num_workers)) - set(self._tasks):
            tiler.add(worker, [])
        largest_first = sorted(self._tasks.values(), key=lambda task: -task.live_pairs)
        self._todo = deque(task.worker for task in largest_first)
        self._cluster._start_actors(self._cluster._num_workers - len(self._cluster._actors))
        self._pings = {actor.ping(): actor for actor in self._cluster._actors.values()}
        self._originals = set(self._cluster._actors)
        self._last_sign = dict.fromkeys(self._originals, time.monotonic())
        try:
            while len(self._reports) < len(self._tasks):
                if self.cancelled.is_set() or self._cluster._closing.is_set():
                    raise CancelledError
                self._feed()
                self._collect(tiler)
                self._bury_the_hung()
        finally:
            for ref in self._in_flight:
                self._ray.cancel(ref, force=False)
        return tiler.finish()

    def _feed(self) -> None:
        """Hand the next tasks to the actors that owe least."""
        if not self._queues and not any(a.index in self._originals for a in self._pings.values()):
            raise WorkersDiedError(
                f"all {len(self._originals)} workers died; tasks {sorted(self._unfinished())} are "
                f"not computed{self._blame()}"
            )
        while self._todo and self._queues:
            index = min(self._queues, key=lambda index: len(self._queues[index]))
            if len(self._queues[index]) >= _TASKS_IN_FLIGHT:
                return
            actor = self._cluster._actors[index]
            task = self._tasks[self._todo.popleft()]
            ref = actor.handle.run.remote(
                task,
                self._problem.scale,
                self._backend,
                *(self._queries[tokens] for tokens in task.held_queries),
                *(self._keys[tokens] for tokens in task.held_keys),
            )
            if not self._queues[index]:
                self._last_sign[index] = time.monotonic()
            self._queues[index].append(ref)
            self._in_flight[ref] = actor, task.worker

    def _collect(self, tiler: Tiler) -> None:
        """Wait for a sign of life or death and deal with all that have come."""
        refs = [*self._in_flight, *self._pings]
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=_POLL_SECONDS)
        if ready and len(refs) > 1:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in self._pings:
                self._greet(ref)
            elif ref in self._in_flight:
                self._accept(ref, tiler)

    def _greet(self, ping: Any) -> None:
        actor = self._pings.pop(ping)
        try:
            actor.info = self._ray.get(ping)
        except self._deaths_of_actors:
            self._bury(actor)
            return
        self._queues[actor.index] = deque()

    def _accept(self, ref: Any, tiler: Tiler) -> None:
        actor, worker = self._in_flight[ref]
        try:
            results, report = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError:  # the computation itself failed: no re-run
            raise
        except self._deaths_of_actors:
            self._bury(actor)
            return
        del self._in_flight[ref]
        self._queues[actor.index].remove(ref)
        self._last_sign[actor.index] = time.monotonic()
        start = time.perf_counter()
        tiler.add(worker, [Partial(output.tensor(), lse.tensor()) for output, lse in results])
        self._merge_seconds += time.perf_counter() - start
        self._reports[worker] = report
        self._progress(len(self._reports), len(self._tasks))

    def _bury_the_hung(self) -> None:
        now = time.monotonic()
        owing = [self._cluster._actors[index] for index, queue in self._queues.items() if queue]
        for actor in [*owing, *self._pings.values()]:
            timeout = self._cluster._stall_timeout
            if actor.info is None:
                timeout = max(timeout, self._cluster._start_timeout)
            if now - self._last_sign[actor.index] > timeout:
                self._bury(actor, is_hung=True)

    def _bury(self, actor: _Actor, *, is_hung: bool = False) -> None:
        """Take back an actor's tasks and start another in its place."""
        queue = self._queues.pop(actor.index, deque())
        taken_back = [self._in_flight.pop(ref)[1] for ref in queue]
        self._pings = {ping: other for ping, other in self._pings.items() if other is not actor}
        self._cluster._remove_actor(actor, is_hung=is_hung)
        self._deaths += 1
        self._reruns += len(taken_back)
        self._todo.extendleft(reversed(taken_back))
        if taken_back:  # an actor computes in order: it died of the first, if of any
            suspect = taken_back[0]
            self._attempts[suspect] += 1
            if self._attempts[suspect] >= self._cluster._max_attempts:
                raise TaskFailedError(
                    f"task {suspect} was running on {self._attempts[suspect]} workers when they "
                    "died or hung"
                )
        if actor.index in self._originals:
            (replacement,) = self._cluster._start_actors(1)
            self._pings[replacement.ping()] = replacement
            self._last_sign[replacement.index] = time.monotonic()

    def _unfinished(self) -> set[int]:
        return set(self._tasks) - set(self._reports)

    def _blame(self) -> str:
        if not self._attempts:
            return ""
        task, deaths = self._attempts.most_common(1)[0]
        return f"; task {task} was running on {deaths} of them when they died"

    @property
    def _deaths_of_actors(self) -> tuple[type[Exception], ...]:
        """What says that a machine failed, as opposed to the computation."""
        errors = self._ray.exceptions
        return (
            errors.RayActorError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
            errors.NodeDiedError,
            errors.WorkerCrashedError,
        )


def _rows(tensor: Tensor, tokens: range) -> Tensor:
    return tensor[:, :, tokens.start : tokens.stop]


def _empty_cpu_answer(problem: Problem) -> Partial:
    return Partial(*(torch.empty_like(part, device="cpu") for part in problem.empty_answer()))


def _progress_callback(
    progress: bool | Callable[[int, int], None],
) -> Callable[[int, int], None]:
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be a bool or a function, got {progress!r}")
    bar: tqdm | None = None

    def draw(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, unit="task")
        bar.update(1)
        if done == total:
            bar.close()

    return draw if progress else lambda done, total: None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise NotImplementedError(
            f"a Cluster needs Ray: pip install 'cqs[ray]' ({error})"
        ) from error
    return ray


def _is_connected() -> bool:
    return "ray" in sys.modules and bool(_import_ray().is_initialized())


def _connect(address: str | None) -> tuple[Any, Callable[[], None]]:
    """Connect to a running cluster, or join the connection that this process has."""
    ray = _import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray is connected already: leave out address, got {address!r}")
        return ray, lambda: None
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"no Ray cluster answers at address {address!r}: {error}") from error
    return ray, ray.shutdown


def _start_private_ray(
    num_cpus: int, num_gpus: int, object_store_memory: int | None
) -> tuple[Any, Callable[[], None]]:
    """Start Ray on this machine for this process alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A new local Ray turns authentication on by itself; given no token it would write one to the
    # home directory, readable by all.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = _import_ray()
    folder = tempfile.mkdtemp(prefix="cqs-")  # Ray opens its own folder to all, so it gets a child

    def stop() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            object_store_memory=object_store_memory,
            _node_ip_address="127.0.0.1",
            _temp_dir=os.path.join(folder, "ray"),
        )
    except BaseException:
        stop()
        raise
    return ray, stop


def _close(
    ray: Any,
    closing: threading.Event,
    dispatcher: ThreadPoolExecutor,
    actors: dict[int, _Actor],
    disconnect: Callable[[], None],
) -> None:
    """End a cluster: its runs, its actors, its Ray."""
    closing.set()
    from_dispatcher = threading.current_thread().name.startswith(_DISPATCHER)
    dispatcher.shutdown(wait=not from_dispatcher, cancel_futures=True)
    if ray.is_initialized():
        for actor in actors.values():
            ray.kill(actor.handle, no_restart=True)
    actors.clear()
    disconnect()
