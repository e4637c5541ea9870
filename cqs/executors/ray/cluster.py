"""A cluster of workers: its life, and the calls on it."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from cqs.advice import with_advice
from cqs.executors.ray import session
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.closer import Closer
from cqs.executors.ray.differentiable import attend_on
from cqs.executors.ray.future import (
    DISPATCHER,
    AttentionFuture,
    check_may_wait,
    is_dispatcher,
    wait_or_cancel,
)
from cqs.executors.ray.group import Group
from cqs.executors.ray.job import Attend, Differentiate
from cqs.executors.ray.pool import ActorPool, start_pool
from cqs.executors.ray.progress import progress_callback
from cqs.executors.ray.report import RunReport
from cqs.executors.ray.run import RetryPolicy, Run
from cqs.executors.ray.shard_producer import AttendShards, LoadShard, MakeShard, ShardProducer
from cqs.executors.ray.sharded import Sharded
from cqs.executors.shortage import fewest_tasks
from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem, draw_seed
from cqs.scheduler import Plan
from cqs.scheduler.arguments import as_bool, as_integer, to_float, to_integer
from cqs.streaming.budget import parse_budget
from cqs.worker import Worker

_Found = TypeVar("_Found")

_PREDICTABLE = 0.95
"""Share of a budget that predictions may fill: they are right to some percent."""


class Cluster:
    """Workers on a Ray cluster, one per GPU where it has any, else on CPU cores.

    Without ``address`` it uses the Ray that this process is connected to, or else starts a private
    one on this machine: no dashboard, no usage statistics, requests authenticated by a random
    token, files in a directory closed to other users. Only what it started is shut down.

    Ray runs whatever its clients send: connect to clusters in trusted networks only.

    Example::

        with cqs.Cluster(num_workers=4) as cluster:
            output = cluster.attention(query, key, value, is_causal=True, num_tasks=13)
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
            ValueError: if a number is out of range, no cluster answers at ``address``, the cluster
                has not enough free GPUs or cores, or another Cluster of this process has a private
                Ray.
            NotImplementedError: if Ray, or what it needs for ``ray://``, is not installed.
        """
        num_workers = _positive_or_none("num_workers", num_workers)
        cpus_per_worker = _positive_or_none("cpus_per_worker", cpus_per_worker)
        object_store_memory = _positive_or_none("object_store_memory", object_store_memory)
        max_attempts = as_integer("max_attempts", max_attempts, 1)
        stall_timeout = _as_seconds("stall_timeout", stall_timeout)
        start_timeout = _as_seconds("start_timeout", start_timeout)
        if use_gpus is not None:
            use_gpus = as_bool("use_gpus", use_gpus, "a bool or None")
        if address is not None and not isinstance(address, str):
            raise TypeError(f"address must be a string, got {address!r}")
        self._closing = threading.Event()
        self._pid = os.getpid()
        with ExitStack() as stack:
            with session.interrupts_deferred(), session.LOCK:
                if address is None and not session.is_connected():
                    num_gpus = 0 if use_gpus is False else torch.cuda.device_count()
                    num_workers = num_workers or num_gpus or session.num_cores()
                    cpus_per_worker = cpus_per_worker or max(session.num_cores() // num_workers, 1)
                    ray, disconnect = session.start_private_ray(
                        num_workers * cpus_per_worker, num_gpus, object_store_memory
                    )
                else:
                    ray, disconnect = session.connect(address)
                stack.callback(Closer(disconnect).close)
            self._pool, num_workers = start_pool(
                ray,
                self.actor_class,
                num_workers,
                use_gpus,
                cpus_per_worker or 1,
                start_timeout,
            )
            self._retry_policy = RetryPolicy(
                num_workers, stall_timeout, start_timeout, max_attempts
            )
            self._group = Group(self._pool, self._retry_policy, self._closing)
            self._dispatcher = ThreadPoolExecutor(1, thread_name_prefix=DISPATCHER)
            self._close = weakref.finalize(
                self, _close, self._pid, self._closing, self._dispatcher, self._pool, disconnect
            )
            self._closer = Closer(self._close)
            stack.pop_all()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, and Ray if this cluster started it. Pending calls are cancelled.

        Whoever calls it waits until the cluster is closed. If the wait is interrupted, the cluster
        is closed all the same.
        """
        if is_dispatcher():  # must end before the cluster
            self._close()
        else:
            self._closer.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have started, in the order in which they did."""
        actors = list(self._pool.actors.values())
        return tuple(actor.info.pid for actor in actors if actor.info is not None)

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = ...,
        pattern: Pattern | None = ...,
        scale: float | None = ...,
        dropout_p: float = ...,
        seed: int | None = ...,
        num_tasks: int | None = ...,
        memory_budget: int | str | None = ...,
        interest_set: Iterable[int] | None = ...,
        backend: str | None = ...,
        return_lse: bool = ...,
        verify: bool = ...,
        progress: bool | Callable[[int, int], None] = ...,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    @overload
    def attention(
        self,
        query: Sharded,
        *,
        is_causal: bool = ...,
        pattern: Pattern | None = ...,
        scale: float | None = ...,
        dropout_p: float = ...,
        seed: int | None = ...,
        head_parallel: int | str = ...,
        interest_set: Iterable[int] | None = ...,
        backend: str | None = ...,
        return_lse: bool = ...,
    ) -> Sharded: ...

    @with_advice
    def attention(
        self,
        query: Tensor | Sharded,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        is_causal: bool = False,
        pattern: Pattern | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        num_tasks: int | None = None,
        memory_budget: int | str | None = None,
        head_parallel: int | str = "auto",
        interest_set: Iterable[int] | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> Tensor | tuple[Tensor, Tensor] | Sharded:
        """Compute exact attention on the workers; see :func:`cqs.attention`.

        A sharded sequence stays on the workers: they send each other what their tasks need, as in
        :func:`cqs.distributed.attention`, and each keeps the answer for its own queries.

        Args:
            query: ``[batch, num_heads, seqlen_q, head_dim]``; or a sharded sequence whose shards
                are query, key and value.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
            is_causal: Query i sees the keys up to ``i + seqlen_kv - seqlen_q``.
            pattern: Which pairs attend, see :func:`cqs.attention`.
            scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            dropout_p: Chance that a probability is zeroed, see :func:`cqs.attention`.
            seed: For dropout.
            num_tasks: Number of tasks, any number; ``None`` means one per actor. Shards have one
                task each.
            memory_budget: Bytes, or text such as ``"8GiB"``: cut into as many tasks as it takes for
                none to hold more, in the forward pass by prediction. Not of shards.
            head_parallel: Of shards, see :func:`cqs.distributed.attention`.
            interest_set: See :func:`cqs.make_plan`; of shards, see
                :func:`cqs.distributed.attention`.
            backend: Name of a backend, or ``None`` for the best of each worker.
            return_lse: Also return the log of the softmax denominators.
            verify: Recompute sampled rows in float64 and raise if they disagree; not of shards.
            progress: True draws a progress bar; a function is called with (tasks done, tasks in
                all). Not of shards.

        Returns:
            ``output``, with ``return_lse`` also ``lse``; of a sharded sequence, sharded like its
            queries and without gradients, and GPUs may still be at work on it.

        Raises:
            TypeError: as :func:`cqs.attention`, and for options that the kind of sequence has not.
            ValueError: as :func:`cqs.attention`, and if the cluster is closed or a sharded sequence
                is of another.
            NotImplementedError: as :func:`cqs.attention`.
            torch.OutOfMemoryError: as :func:`cqs.attention`.
            WorkersFailedError: if all workers are dead; with shards, if none could be started in
                the place of one that died.
            TaskFailedError: if a task kills every worker that it meets.
        """
        if isinstance(query, Sharded):
            if not (
                key is value is num_tasks is memory_budget is None and verify is progress is False
            ):
                raise TypeError(
                    "a sharded sequence brings key and value and has one task for each worker: "
                    "num_tasks, memory_budget, verify and progress do not apply"
                )
            if (number := len(query.shapes[0])) != 3:
                raise ValueError(
                    f"attention needs shards of query, key and value, got {number} tensors"
                )
            if dropout_p and seed is None:
                seed = draw_seed()  # lost shards are made again with the same
            options = {
                "is_causal": is_causal,
                "pattern": pattern,
                "scale": scale,
                "dropout_p": dropout_p,
                "seed": seed,
                "head_parallel": head_parallel,
                "interest_set": None if interest_set is None else tuple(interest_set),
                "backend": backend,
                "return_lse": return_lse,
            }
            return self.make_shards(AttendShards(options), [query])
        if head_parallel != "auto":
            raise TypeError("head_parallel is for sharded sequences")
        if key is None or value is None:
            raise TypeError("attention takes query, key and value, or one sharded sequence")
        problem = check_problem(
            query,
            key,
            value,
            is_causal=is_causal,
            pattern=pattern,
            scale=scale,
            dropout_p=dropout_p,
            seed=seed,
        )
        if memory_budget is not None:
            if num_tasks is not None:
                raise ValueError("num_tasks and memory_budget both choose the number of tasks")
            num_tasks = self._tasks_within(problem, backend, memory_budget)
        answer = attend_on(
            lambda: nullcontext(self),
            problem,
            num_tasks=num_tasks,
            interest_set=interest_set,
            backend=backend,
            verify=verify,
            progress=progress,
        )
        return (answer.output, answer.lse) if return_lse else answer.output

    def shard(self, *tensors: Tensor, dim: int = 2) -> Sharded:
        """Cut tensors into contiguous parts, one for each worker, and put them there.

        Args:
            tensors: Usually query, key and value. Copies remain in the object store, from which
                lost shards are taken.
            dim: The dimension that is cut: into equal parts, up to one.

        Raises:
            TypeError: if there are no tensors, or what is passed is none.
            ValueError: if a tensor has no dimension ``dim`` or requires gradients, which sharded
                sequences do not record, or the cluster is closed.
            WorkersFailedError: as :meth:`attention`.
            TaskFailedError: likewise.
        """
        self._check_alive()
        if not tensors:
            raise TypeError("shard takes one tensor or several")
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"shard takes tensors, got {type(tensor).__name__}")
            _check_needs_no_gradient(f"tensors[{number}]", tensor)
            dim = to_integer(dim, "dim must be an integer")
            if not -tensor.ndim <= dim < tensor.ndim:
                raise ValueError(f"no dimension {dim} in shape {tuple(tensor.shape)}")
        parts = [tensor.tensor_split(self._group.num_ranks, dim) for tensor in tensors]
        return self.make_shards(LoadShard(), parts=tuple(zip(*parts, strict=True)))

    def make_sharded(self, function: Callable[[int, int], Any]) -> Sharded:
        """Make a sharded sequence on the workers; nothing of it passes through this process.

        Args:
            function: Called on each worker as ``function(rank, num_ranks)``; returns the tensors of
                that rank's shard, usually query, key and value. Shards are contiguous, rank 0 has
                the first tokens; they may differ in length. For a shard that is lost it is called
                again, on another worker, and must return the same.

        Raises:
            TypeError: if ``function``, or what it returns, is of the wrong type.
            ValueError: if shards have different numbers of tensors, or the cluster is closed.
            WorkersFailedError: as :meth:`attention`.
            TaskFailedError: likewise.
            Exception: what the function raises, with a note that names the rank.
        """
        if not callable(function):
            raise TypeError(f"make_sharded takes a function, got {function!r}")
        return self.make_shards(MakeShard(function))

    @with_advice
    def submit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        pattern: Pattern | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        num_tasks: int | None = None,
        interest_set: Iterable[int] | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> AttentionFuture:
        """Start :meth:`attention` and return at once; calls run one after another.

        The tensors are read while the run goes on: leave them as they are until it is done. A
        pattern must be the same for all heads.

        Raises:
            ValueError: as :meth:`attention`, and if gradients are enabled and a tensor requires
                them. The future does not record gradients: detach the tensors, or call
                :meth:`attention`.
            TypeError: as :meth:`attention`.
            NotImplementedError: as :meth:`attention`, and for patterns that differ by head.
        """
        self._check_alive()
        problem = check_problem(
            query,
            key,
            value,
            is_causal=is_causal,
            pattern=pattern,
            scale=scale,
            dropout_p=dropout_p,
            seed=seed,
        )
        for name in ("query", "key", "value"):
            _check_needs_no_gradient(name, getattr(problem, name))
        if problem.differs_by_head:
            raise NotImplementedError(f"submit takes one pattern for all heads, got {pattern!r}")
        return self.submit_plan(
            problem,
            self.make_plan(problem, num_tasks, interest_set),
            backend=backend,
            return_lse=return_lse,
            verify=verify,
            progress=progress,
        )

    def submit_plan(
        self,
        problem: Problem,
        plan: Plan,
        *,
        backend: str | None = None,
        answer: Partial | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> AttentionFuture:
        """Start to compute a checked problem by a plan of its lengths, and return at once.

        Args:
            problem: As for :func:`cqs.executors.local.run_local`.
            plan: Likewise.
            backend: See :meth:`attention`, as for the other options.
            answer: CPU tensors to write to; ``None`` allocates the answer.
            return_lse: See :meth:`attention`.
            verify: See :meth:`attention`.
            progress: See :meth:`attention`.
        """
        self._check_alive()
        run = self._make_run(Attend(problem, plan, answer), plan, backend, verify, progress)
        return AttentionFuture(self, self._dispatch_run(run), run, return_lse)

    def differentiate_plan(
        self,
        problem: Problem,
        plan: Plan,
        answer: Partial,
        grad_output: Tensor,
        *,
        backend: str | None = None,
        report: Callable[[RunReport], None] | None = None,
    ) -> Gradients:
        """Compute the gradients of a checked problem by the plan of its forward pass.

        Arguments as for :func:`cqs.executors.local.run_local_backward`; ``report`` is called with
        what the run took.
        """
        self._check_alive()
        job = Differentiate(problem, plan, answer, grad_output)
        run = self._make_run(job, plan, backend, verify=False, progress=False)
        gradients: Gradients = wait_or_cancel(self._dispatch_run(run), run.cancelled)
        if report is not None:
            assert run.report is not None
            report(run.report)
        return gradients

    def make_plan(
        self, problem: Problem, num_tasks: int | None, interest_set: Iterable[int] | None
    ) -> Plan:
        """Plan a problem; ``num_tasks`` of ``None`` means a task for each worker."""
        default = self._retry_policy.num_workers
        return problem.make_plan(default if num_tasks is None else num_tasks, interest_set)

    def _tasks_within(self, problem: Problem, backend: str | None, budget: int | str) -> int:
        """Return the number of tasks of which none takes more than a budget."""
        if budget == "auto":
            raise ValueError("memory_budget must be a number of bytes: workers may differ")
        num_bytes = parse_budget(budget, torch.device("cpu"))
        infos = (actor.info for actor in list(self._pool.actors.values()))
        on_gpus = any(info is not None and info.device.startswith("cuda") for info in infos)
        most = 1
        for _, part in problem.parts():
            found = fewest_tasks(
                part,
                backend or ("triton" if on_gpus else "cpu"),
                _PREDICTABLE * num_bytes,
                at_least=self._retry_policy.num_workers,
            )
            if found is None:
                raise ValueError(f"a memory budget of {num_bytes} bytes is too small for any task")
            most = max(most, found[0])
        return most

    def make_shards(
        self,
        producer: ShardProducer,
        sources: Sequence[Sharded] = (),
        parts: tuple[tuple[Tensor, ...], ...] = (),
    ) -> Sharded:
        """Make a sharded sequence; GPUs may still be at work on it, and on nothing older.

        Args:
            producer: How its shards are made.
            sources: Sequences of this cluster whose shards the producer is given.
            parts: For each rank, tensors that it is given after them.
        """
        self._check_alive()
        for source in sources:
            if not isinstance(source, Sharded):
                raise TypeError(f"expected a sharded sequence, got {type(source).__name__}")
            if source.cluster is not self:
                raise ValueError(f"{source!r} belongs to another cluster")

        def make(cancelled: threading.Event) -> Sharded:
            step = self._group.begin(producer, tuple(source.step for source in sources), parts)
            self._group.make(step, cancelled)
            return Sharded(self, step, self._group.forget)

        return self._wait_for(make)

    def wait_for_shards(self, sharded: Sharded) -> None:
        """Wait until shards are there; see :meth:`Sharded.wait`."""
        self._wait_for(partial(self._group.finish, sharded.step))

    def fetch_shards(self, sharded: Sharded) -> list[tuple[Tensor, ...]]:
        """Return the tensors of each shard, which must not be written to."""
        shards = self._wait_for(partial(self._group.fetch, sharded.step))
        return [tuple(blob.tensor() for blob in shard) for shard in shards]

    def replicate_shards(self, sharded: Sharded) -> None:
        """Copy shards into the object store; see :meth:`Sharded.replicate`."""
        self._wait_for(partial(self._group.replicate, sharded.step))

    def _wait_for(self, work: Callable[[threading.Event], _Found]) -> _Found:
        """Have the dispatcher work, unless it is cancelled, and wait until it has."""
        self._check_alive()
        check_may_wait()
        cancelled = threading.Event()
        return wait_or_cancel(self._dispatch(partial(work, cancelled)), cancelled)

    def _dispatch_run(self, run: Run) -> "Future[Any]":
        """Have the dispatcher run tasks, for which actors must not wait for each other."""

        def rest_and_run() -> Any:
            self._group.rest(run.cancelled)
            return run()

        return self._dispatch(rest_and_run)

    def _dispatch(self, work: Callable[[], _Found]) -> "Future[_Found]":
        """Have the dispatcher free what was forgotten, then work."""

        def sweep_and_work() -> _Found:
            self._group.sweep()
            return work()

        try:
            return self._dispatcher.submit(sweep_and_work)
        except RuntimeError:  # closed a moment ago
            self._check_alive()
            raise

    def _make_run(
        self,
        job: Attend | Differentiate,
        plan: Plan,
        backend: str | None,
        verify: bool,
        progress: bool | Callable[[int, int], None],
    ) -> Run:
        return Run(
            self._pool,
            self._retry_policy,
            job,
            plan,
            worker=Worker.of(job.problem, backend),
            verify=verify,
            progress=progress_callback(progress),
            closing=self._closing,
        )

    def _check_alive(self) -> None:
        if not self._close.alive:
            raise ValueError("this cluster is closed")
        if os.getpid() != self._pid:
            raise ValueError(f"this cluster belongs to process {self._pid}, not {os.getpid()}")
        self._pool.check_connected()


def _check_needs_no_gradient(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose gradient autograd would lack after the call."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            f"{name} must not require gradients, got requires_grad=True: pass it detached, or call "
            "cluster.attention(query, key, value), which is differentiable"
        )


def _positive_or_none(name: str, number: int | None) -> int | None:
    return None if number is None else as_integer(name, number, 1)


def _as_seconds(name: str, seconds: float) -> float:
    number = to_float(seconds, f"{name} must be a number of seconds")
    if not number > 0:
        raise ValueError(f"{name} must be positive, got {seconds}")
    return number


def _close(
    pid: int,
    closing: threading.Event,
    dispatcher: ThreadPoolExecutor,
    pool: ActorPool,
    disconnect: Callable[[], None],
) -> None:
    """End a cluster: its runs, its actors, its Ray; a forked copy of it ends nothing."""
    if os.getpid() != pid:
        return
    closing.set()
    if is_dispatcher():  # closed by a progress function: the run must end first
        arguments = pid, closing, dispatcher, pool, disconnect
        threading.Thread(target=_close, args=arguments).start()
        return
    dispatcher.shutdown(wait=True, cancel_futures=True)
    try:
        pool.close()
    finally:
        disconnect()
