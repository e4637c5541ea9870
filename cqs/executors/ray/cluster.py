"""A cluster of Ray actors that compute attention."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from cqs.arguments import as_bool, as_integer, to_float, to_integer, with_advice
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
from cqs.executors.ray.job import Attend, Differentiate
from cqs.executors.ray.pool import ActorPool, start_pool
from cqs.executors.ray.progress import progress_callback
from cqs.executors.ray.report import RunReport
from cqs.executors.ray.run import RetryPolicy, Run
from cqs.executors.ray.shard_producer import AttendShards, LoadShard, MakeShard, ShardProducer
from cqs.executors.ray.sharded import Sharded
from cqs.executors.ray.worker_group import WorkerGroup
from cqs.executors.shortage import fewest_tasks
from cqs.executors.streaming.budget import parse_budget
from cqs.partial import AttentionOutput, Gradients, Partial
from cqs.patterns import Pattern
from cqs.problem import Problem, ProblemOptions, check_problem, draw_seed
from cqs.scheduler import Kind, Plan
from cqs.worker import Worker

_Found = TypeVar("_Found")

_PREDICTABLE = 0.95
"""Fraction of a memory budget that the prediction may fill, which leaves room for its error."""


class Cluster:
    """Workers on a Ray cluster: one per GPU, or on CPU cores if the cluster has no GPU.

    Without ``address``, the workers run on the Ray cluster to which this process is connected. If
    there is none, a private Ray starts on this machine. A private Ray has no dashboard and sends no
    usage statistics, authenticates requests by a random token, and keeps its files in a directory
    closed to other users. :meth:`close` shuts down a private Ray, but no other.

    Ray executes any code that its clients send: connect to clusters in trusted networks only.

    Example::

        with cqs.Cluster(num_workers=4) as cluster:
            output = cluster.attention(query, key, value, is_causal=True, num_tasks=13)
    """

    actor_class: type = TaskActor
    """Class of the actors, not decorated by ``ray.remote``."""

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
            num_workers: Number of actors. ``None`` means one per GPU. Without GPUs it means one per
                core of this machine (private Ray), or per ``cpus_per_worker`` cores of the cluster.
            address: Address of a running Ray cluster: ``"auto"``, ``"host:port"`` or
                ``"ray://host:port"``. ``None`` uses the current connection or a private Ray.
            use_gpus: Reserve one GPU for each actor; ``None`` means true if the cluster has GPUs.
            cpus_per_worker: CPU cores and threads of each CPU actor. ``None`` divides the cores of
                this machine among the actors of a private Ray, and means 1 on other clusters.
            object_store_memory: Size of a private Ray's object store in bytes; ``None`` lets Ray
                choose. Ray spills objects to disk if the store is full.
            stall_timeout: Seconds after which a worker that has work and returns no result counts
                as hung and is killed. It must exceed the duration of the longest task.
            start_timeout: Seconds that the start of an actor may take.
            max_attempts: Number of workers that may fail on one task before the call raises.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A number is out of range, no cluster answers at ``address``, too few GPUs or
                cores are free, a worker does not start within ``start_timeout``, or another Cluster
                of this process has a private Ray.
            NotImplementedError: Ray is not installed, or ``grpcio`` for ``ray://`` addresses.
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
            self._group = WorkerGroup(self._pool, self._retry_policy, self._closing)
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
        """Stop the workers, cancel pending calls, and shut down a private Ray.

        Returns after the cluster is closed. If an exception interrupts the wait, the cluster still
        closes. A progress function returns at once; the cluster closes after its run has ended.
        """
        if is_dispatcher():  # the run of this thread must end first
            self._close()
        else:
            self._closer.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have started, in order of their start."""
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
        plan: Kind | str | None = ...,
        backend: str | None = ...,
        return_lse: bool = ...,
        verify: bool = ...,
        progress: bool | Callable[[int, int], None] = ...,
    ) -> Tensor | AttentionOutput: ...

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
        plan: Kind | str | None = ...,
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
        plan: Kind | str | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> Tensor | AttentionOutput | Sharded:
        """Compute exact attention on the workers; see :func:`cqs.attention`.

        Tensors are sent to the workers through the object store, and the result is returned to this
        process. The shards of a sharded sequence stay on the workers. They exchange the inputs of
        their tasks as in :func:`cqs.distributed.attention`, and each keeps the output for its own
        queries.

        Args:
            query: ``[batch, num_heads, seqlen_q, head_dim]``, or a :class:`Sharded` sequence whose
                shards are query, key and value.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``; None for a sharded sequence.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``; None for a sharded sequence.
            is_causal: Query i attends to keys up to ``i + seqlen_kv - seqlen_q``.
            pattern: Query-key pairs that attend, see :func:`cqs.attention`.
            scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            dropout_p: Probability that an attention weight is zeroed, see :func:`cqs.attention`.
            seed: Random seed of the dropout mask; ``None`` draws one.
            num_tasks: Number of tasks, any positive integer; ``None`` means one per worker. A
                sharded sequence always has one task per worker.
            memory_budget: Most bytes of memory that a task may hold in the forward pass, by
                prediction; an integer or text such as ``"8GiB"``. It chooses ``num_tasks``. Not
                supported for sharded sequences.
            head_parallel: Head-parallel degree of a sharded sequence, see
                :func:`cqs.distributed.attention`. Tensors support only ``"auto"``.
            plan: Kind of the plan, see ``kind`` of :func:`cqs.make_plan`; ``None`` means quorums.
                Of a sharded sequence, see :func:`cqs.distributed.attention`.
            backend: Name of a backend; ``None`` lets each worker choose its fastest.
            return_lse: Also return the log-sum-exp of every query.
            verify: Recompute sampled rows in float64 and raise if they deviate. Not supported for
                sharded sequences.
            progress: True draws a progress bar; a function is called with (finished tasks, all
                tasks). Not supported for sharded sequences.

        Returns:
            ``output``, or ``(output, lse)`` with ``return_lse``. ``output`` has shape ``[batch,
            num_heads, seqlen_q, value_dim]``, ``lse`` ``[batch, num_heads, seqlen_q]``. A sharded
            sequence returns a :class:`Sharded` sequence, sharded like its queries and without
            gradients. GPUs may still compute it; see ``Sharded.wait``.

        Raises:
            TypeError: An argument has the wrong type, or is not supported for the kind of sequence.
            ValueError: An argument has a wrong value, see :func:`cqs.attention`; the cluster is
                closed; or a sharded sequence belongs to another cluster.
            NotImplementedError: The named backend does not support the tensors.
            torch.OutOfMemoryError: The GPU of a worker has too little memory for its task.
            WorkersFailedError: All workers failed; for a sharded sequence, no replacement for a
                failed worker could be started.
            TaskFailedError: ``max_attempts`` workers failed on the same task.
            VerificationError: ``verify`` found a row that deviates by more than its bound.
        """
        options = ProblemOptions(
            is_causal=is_causal, pattern=pattern, scale=scale, dropout_p=dropout_p, seed=seed
        )
        if isinstance(query, Sharded):
            if not (
                key is value is num_tasks is memory_budget is None and verify is progress is False
            ):
                raise TypeError(
                    "a sharded sequence does not support key, value, num_tasks, memory_budget, "
                    "verify or progress: leave them out"
                )
            if (number := len(query.shapes[0])) != 3:
                raise ValueError(
                    f"query must be a sharded sequence of query, key and value, got {number} "
                    "tensors in each shard"
                )
            if dropout_p and seed is None:
                options["seed"] = draw_seed()  # repeated shards need the same dropout mask
            distributed_options = {
                **options,
                "head_parallel": head_parallel,
                "plan": plan,
                "backend": backend,
                "return_lse": return_lse,
            }
            return self.make_shards(AttendShards(distributed_options), [query])
        if head_parallel != "auto":
            raise TypeError(
                f"head_parallel must be 'auto' for tensors, got {head_parallel!r}: pass a sharded "
                "sequence to choose a degree"
            )
        if key is None or value is None:
            raise TypeError("key and value must be tensors unless query is a sharded sequence")
        problem = check_problem(query, key, value, **options)
        if memory_budget is not None:
            if num_tasks is not None:
                raise ValueError(
                    f"num_tasks must be None if memory_budget chooses it, got {num_tasks}"
                )
            num_tasks = self._tasks_within(problem, backend, memory_budget)
        answer = attend_on(
            lambda: nullcontext(self),
            problem,
            num_tasks=num_tasks,
            plan=plan,
            backend=backend,
            verify=verify,
            progress=progress,
        )
        return answer.to_result(return_lse)

    def shard(self, *tensors: Tensor, dim: int = 2) -> Sharded:
        """Split tensors into contiguous parts, one for each worker, and send them to the workers.

        Args:
            tensors: Tensors of equal or different shapes, usually query, key and value. Copies stay
                in the object store; lost shards are restored from them.
            dim: Dimension that is split; the lengths of the parts differ by at most one.

        Returns:
            The sharded sequence; rank 0 has the first part.

        Raises:
            TypeError: There are no tensors, or an argument is not a tensor.
            ValueError: A tensor has no dimension ``dim`` or requires gradients, which sharded
                sequences do not support, or the cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they loaded shards.
        """
        self._check_alive()
        if not tensors:
            raise TypeError("tensors must be one tensor or several, got none")
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors[{number}] must be a tensor, got {type(tensor).__name__}")
            _check_needs_no_gradient(f"tensors[{number}]", tensor)
            dim = to_integer(dim, "dim must be an integer")
            if not -tensor.ndim <= dim < tensor.ndim:
                raise ValueError(
                    f"dim must be a dimension of tensors[{number}], whose shape is "
                    f"{tuple(tensor.shape)}, got {dim}"
                )
        parts = [tensor.tensor_split(self._group.num_ranks, dim) for tensor in tensors]
        return self.make_shards(LoadShard(), parts=tuple(zip(*parts, strict=True)))

    def make_sharded(self, function: Callable[[int, int], Any]) -> Sharded:
        """Make a sharded sequence on the workers; no tensor passes through this process.

        Args:
            function: Called on each worker as ``function(rank, num_ranks)``. It returns the tensors
                of the rank's shard, usually query, key and value. Shards are contiguous, rank 0 has
                the first tokens, and their lengths may differ. If a shard is lost, another worker
                calls the function again; the tensors must be bitwise identical.

        Returns:
            The sharded sequence.

        Raises:
            TypeError: ``function`` is not callable, or it does not return tensors.
            ValueError: Shards have different numbers of tensors, or the cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they called the function.
            Exception: The function raised; a note on the exception names the rank.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
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
        plan: Kind | str | None = None,
        backend: str | None = None,
        return_lse: bool = False,
        verify: bool = False,
        progress: bool | Callable[[int, int], None] = False,
    ) -> AttentionFuture:
        """Start :meth:`attention` and return at once; a cluster executes calls one after another.

        The arguments are those of :meth:`attention`. Do not write to the tensors until the future
        is done, because the run reads them in the background. A pattern must be the same for all
        heads.

        Returns:
            The future result, without gradients.

        Raises:
            ValueError: An argument has a wrong value, or the cluster is closed. Also if gradients
                are enabled and a tensor requires them: detach it, or call :meth:`attention`.
            TypeError: An argument has the wrong type.
            NotImplementedError: The pattern differs by head.
        """
        self._check_alive()
        options = ProblemOptions(
            is_causal=is_causal, pattern=pattern, scale=scale, dropout_p=dropout_p, seed=seed
        )
        problem = check_problem(query, key, value, **options)
        for name in ("query", "key", "value"):
            _check_needs_no_gradient(name, getattr(problem, name))
        if problem.differs_by_head:
            raise NotImplementedError(
                f"pattern must be the same for all heads, got {pattern!r}: call attention, which "
                "supports one pattern per head"
            )
        return self.submit_plan(
            problem,
            self.make_plan(problem, num_tasks, plan),
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
        """Start the computation of a checked problem by a given plan, and return at once.

        Args:
            problem: The checked problem.
            plan: A plan for the sequence lengths of the problem.
            backend: Name of a backend; ``None`` lets each worker choose its fastest.
            answer: CPU tensors for output and LSE; ``None`` allocates them.
            return_lse: :meth:`AttentionFuture.result` also returns the LSE.
            verify: Recompute sampled rows in float64 and raise if they deviate.
            progress: True draws a progress bar; a function is called with (finished tasks, all
                tasks).

        Raises:
            ValueError: The cluster is closed.
            TypeError: ``progress`` is neither a bool nor a function.
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

        Args:
            problem: The checked problem.
            plan: The plan of the forward pass.
            answer: Output and LSE of the forward pass.
            grad_output: Gradient of the output, of the same shape.
            backend: Name of a backend; ``None`` lets each worker choose its fastest.
            report: Called with the measurements of the run.

        Returns:
            Gradients on the device of the query; errors are those of :meth:`attention`.
        """
        self._check_alive()
        job = Differentiate(problem, plan, answer, grad_output)
        run = self._make_run(job, plan, backend, verify=False, progress=False)
        gradients: Gradients = wait_or_cancel(self._dispatch_run(run), run.cancelled)
        if report is not None:
            assert run.report is not None
            report(run.report)
        return gradients

    def make_plan(self, problem: Problem, num_tasks: int | None, plan: Kind | str | None) -> Plan:
        """Make a plan; ``num_tasks`` of ``None`` means one task per worker."""
        default = self._retry_policy.num_workers
        return problem.make_plan(default if num_tasks is None else num_tasks, plan)

    def _tasks_within(self, problem: Problem, backend: str | None, budget: int | str) -> int:
        """Return the fewest tasks for which the prediction of each is within a memory budget.

        Raises:
            ValueError: The budget is ``"auto"``, malformed, or too small for any number of tasks.
        """
        if budget == "auto":
            raise ValueError(
                "memory_budget must be a number of bytes on a cluster, got 'auto': the memory of "
                "workers may differ"
            )
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
                raise ValueError(
                    "memory_budget must hold the smallest possible task, "
                    f"got {num_bytes} bytes: raise it"
                )
            most = max(most, found[0])
        return most

    def make_shards(
        self,
        producer: ShardProducer,
        sources: Sequence[Sharded] = (),
        parts: tuple[tuple[Tensor, ...], ...] = (),
    ) -> Sharded:
        """Make a sharded sequence.

        GPUs may still compute its shards at return, but nothing that was requested earlier.

        Args:
            producer: Makes the shard of each rank.
            sources: Sequences of this cluster whose shards are the first inputs of the producer.
            parts: For each rank, additional input tensors of the producer.

        Raises:
            TypeError: A source is not a :class:`Sharded`.
            ValueError: A source belongs to another cluster, or this cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Failures made an operation fail ``max_attempts`` times.
            Exception: The producer raised; a note on the exception names the rank.
        """
        self._check_alive()
        for source in sources:
            if not isinstance(source, Sharded):
                raise TypeError(
                    f"others must be sharded sequences, got {type(source).__name__}: make one with "
                    "Cluster.shard"
                )
            if source.cluster is not self:
                raise ValueError(
                    f"sharded sequences must belong to this cluster, got {source!r} of another"
                )

        def make(cancelled: threading.Event) -> Sharded:
            operation = self._group.begin(
                producer, tuple(source.operation for source in sources), parts
            )
            self._group.make(operation, cancelled)
            return Sharded(self, operation, self._group.forget)

        return self._wait_for(make)

    def wait_for_shards(self, sharded: Sharded) -> None:
        """Wait until the GPUs have computed all shards; see ``Sharded.wait``."""
        self._wait_for(partial(self._group.finish, sharded.operation))

    def fetch_shards(self, sharded: Sharded) -> list[tuple[Tensor, ...]]:
        """Return the CPU tensors of each shard, in rank order.

        The tensors must not be written to: they may be shared with other processes.
        """
        shards = self._wait_for(partial(self._group.fetch, sharded.operation))
        return [tuple(blob.tensor() for blob in shard) for shard in shards]

    def replicate_shards(self, sharded: Sharded) -> None:
        """Copy shards into the object store; see :meth:`Sharded.replicate`."""
        self._wait_for(partial(self._group.replicate, sharded.operation))

    def _wait_for(self, work: Callable[[threading.Event], _Found]) -> _Found:
        """Execute ``work`` in the dispatcher thread and wait for its result."""
        self._check_alive()
        check_may_wait()
        cancelled = threading.Event()
        return wait_or_cancel(self._dispatch(partial(work, cancelled)), cancelled)

    def _dispatch_run(self, run: Run) -> "Future[Any]":
        """Start a run in the dispatcher thread, after the actors have left collective calls."""

        def rest_and_run() -> Any:
            self._group.rest(run.cancelled)
            return run()

        return self._dispatch(rest_and_run)

    def _dispatch(self, work: Callable[[], _Found]) -> "Future[_Found]":
        """Free the forgotten shards, then execute ``work``, both in the dispatcher thread."""

        def sweep_and_work() -> _Found:
            self._group.sweep()
            return work()

        try:
            return self._dispatcher.submit(sweep_and_work)
        except RuntimeError:  # another thread has closed the cluster
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
            raise ValueError("this cluster is closed: open another cqs.Cluster")
        if os.getpid() != self._pid:
            raise ValueError(
                f"this cluster belongs to process {self._pid}, not {os.getpid()}: open a "
                "cqs.Cluster in this process"
            )
        self._pool.check_connected()


def _check_needs_no_gradient(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that requires gradients, if autograd records."""
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
    """Close a cluster: its runs, its actors and a private Ray. A forked process closes nothing."""
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
