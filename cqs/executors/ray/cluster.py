"""A cluster of Ray actors that compute attention."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn, Self, Unpack

import torch
from torch import Tensor

from cqs.arguments import as_bool, as_integer, to_float, to_integer, with_advice
from cqs.executors.contract import Report, attend, check_progress
from cqs.executors.distributed.strategy import Strategy
from cqs.executors.ray import session
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.future import AttentionFuture
from cqs.executors.ray.pool import ActorPool, RetryPolicy
from cqs.executors.ray.shards.group import WorkerGroup
from cqs.executors.ray.shards.operation import ShardProducer, Split, attend_shards, load_shard
from cqs.executors.ray.shards.sharded import Sharded
from cqs.executors.ray.tasks.executor import TaskExecutor
from cqs.partial import AttentionOutput, Partial
from cqs.problem import Problem, check_problem, draw_seed
from cqs.problem.options import AttentionOptions, problem_options
from cqs.problem.scores import Scores, check_is_scores, find_reads
from cqs.problem.tensors import autocast
from cqs.scheduler import Kind
from cqs.uncompiled import uncompiled
from cqs.worker.backends import check_backend_name


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
            cpus_per_worker: CPU cores and threads of each CPU actor, or threads of each GPU actor.
                ``None`` divides the cores among the actors of a private Ray or the GPUs of another
                cluster, and means 1 for CPU actors of another cluster.
            object_store_memory: Size of a private Ray's object store in bytes; ``None`` lets Ray
                choose. Ray spills objects to disk if the store is full.
            stall_timeout: Seconds after which a worker that has work and returns no result counts
                as hung and is killed. It must exceed the duration of the longest task.
            start_timeout: Seconds that the start of an actor may take.
            max_attempts: Number of workers that may fail on one task before the call raises.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A number is out of range, no cluster answers at ``address``, or too few GPUs
                or cores are free. Also if a worker has another version of cqs, or another Cluster
                of this process has a private Ray.
            TimeoutError: A worker did not start within ``start_timeout``.
            NotImplementedError: Ray is not installed, or ``grpcio`` for ``ray://`` addresses.
        """
        num_workers = _positive_or_none("num_workers", num_workers)
        cpus_per_worker = _positive_or_none("cpus_per_worker", cpus_per_worker)
        object_store_memory = _positive_or_none("object_store_memory", object_store_memory)
        retry_policy = RetryPolicy(
            _as_seconds("stall_timeout", stall_timeout),
            _as_seconds("start_timeout", start_timeout),
            as_integer("max_attempts", max_attempts, 1),
        )
        if use_gpus is not None:
            use_gpus = as_bool("use_gpus", use_gpus, "a bool or None")
        if address is not None and not isinstance(address, str):
            raise TypeError(f"address must be a string, got {address!r}")
        resolved = None
        if address is not None and not session.is_connected():
            resolved = session.find_address(address)  # here signals interrupt it
        with ExitStack() as stack:
            with session.interrupts_deferred(), session.LOCK, ExitStack() as connection:
                if address is None and not session.is_connected():
                    num_gpus = 0 if use_gpus is False else torch.cuda.device_count()
                    num_workers = num_workers or num_gpus or session.num_cores()
                    cpus_per_worker = cpus_per_worker or max(session.num_cores() // num_workers, 1)
                    num_cpus = max(num_workers * cpus_per_worker, session.num_cores())
                    ray = session.start_private_ray(
                        num_cpus, num_gpus, object_store_memory, connection
                    )
                else:
                    ray = session.connect(address, resolved, connection)
                self._pool = ActorPool(ray, retry_policy)
                self._dispatcher = Dispatcher(self._pool, connection.pop_all())
                stack.callback(self._dispatcher.close)
            self._pool.start(self.actor_class, num_workers, use_gpus, cpus_per_worker)
            stack.pop_all()
        self._group = WorkerGroup(self._dispatcher)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pool, infos = self._pool, self._pool.infos
        devices = "/".join(sorted({info.device for info in infos})) or "no device"
        state = "closed" if pool.closing.is_set() else f"{len(infos)} running on {devices}"
        return f"<cqs.Cluster: {pool.num_workers} workers, {state}, {len(pool.nodes)} nodes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Cluster cannot be sent to another process: open one in the task or actor that uses "
            "it, without an address"
        )

    def close(self) -> None:
        """Stop the workers, cancel pending calls, and shut down a private Ray.

        Returns after the cluster is closed. If an exception interrupts the wait, the cluster still
        closes. A progress function returns at once; the cluster closes after its run has ended.
        """
        self._dispatcher.close()

    def scale(self, num_workers: int) -> None:
        """Set the number of workers, also during a call, and return at once.

        New workers take tasks of the running call as soon as they have started. Those that are too
        many end after it and all submitted calls: no worker is stopped that has work. Workers that
        find no room wait for it, for example until Ray's autoscaler has added a machine.

        Args:
            num_workers: Number of workers, at least 1.

        Raises:
            TypeError: ``num_workers`` is not an integer.
            ValueError: It is less than 1, the cluster is closed, or a sharded sequence exists: its
                shards belong to a number of workers.
        """
        num_workers = as_integer("num_workers", num_workers, 1)
        self._dispatcher.check_open()
        if self._group.sequences:
            raise ValueError(
                "num_workers must not change while sharded sequences exist, whose shards belong to "
                f"the workers, got {len(self._group.sequences)}: delete them first"
            )
        self._pool.num_workers = num_workers
        self._dispatcher.submit(self._group.resize, Future())

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that have started; ranks of a sharded sequence in order."""
        return tuple(info.pid for info in self._pool.infos)

    @uncompiled
    @with_advice
    def attention(
        self,
        query: Tensor | Sharded,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        plan: Kind | str | None = None,
        strategy: Strategy | None = None,
        progress: Report = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Compute exact attention on the workers; see :func:`cqs.attention`.

        Tensors are copied once, to memory that the workers read and write the result to: of this
        host, or of their GPU if all workers are on GPUs of this host. With workers on other hosts
        they pass through the object store. Each worker merges the partial outputs of some queries.

        The shards of a sharded sequence stay on the workers. They exchange the inputs of their
        tasks as in :func:`cqs.distributed.attention`, and each keeps the output for its own
        queries.

        Args:
            query: ``[batch, num_heads, seqlen_q, head_dim]``, or a :class:`Sharded` sequence whose
                shards are query, key and value.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``; None for a sharded sequence.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``; None for a sharded sequence.
            plan: Kind of the plan, see ``kind`` of :func:`cqs.make_plan`; ``None`` means quorums.
                That of a sharded sequence is an option of ``strategy``.
            strategy: How the workers of a sharded sequence divide the call. Tensors support only
                ``None``.
            progress: True draws a progress bar; a function is called as ``progress(pairs_done,
                pairs_total)``, live pairs of all heads. Not supported for sharded sequences.
            **options: See :class:`cqs.problem.options.AttentionOptions`. With ``verify`` sampled
                rows are recomputed on this process, or for a sharded sequence on all workers.

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
            WorkersFailedError: No replacement for a failed worker could be started, and no other
                worker is left; for a sharded sequence, also if others are left.
            TaskFailedError: ``max_attempts`` workers failed on the same task.
            VerificationError: ``verify`` found a row that deviates by more than its bound.
        """
        if isinstance(query, Sharded):
            if not (key is value is plan is None and progress is False):
                raise TypeError(
                    "a sharded sequence does not support key, value, plan or progress: "
                    "leave them out, and pass strategy=Strategy(plan=...) to choose a plan"
                )
            return self._attend_shards(query, strategy, options)
        if strategy is not None:
            raise TypeError(
                f"strategy must be None for tensors, got {strategy!r}: pass a sharded sequence"
            )
        if key is None or value is None:
            raise TypeError("key and value must be tensors unless query is a sharded sequence")
        problem = check_problem(*autocast(query, key, value), **problem_options(options))
        return_lse = as_bool("return_lse", options.get("return_lse", False))
        compute = self._bind(self.make_executor(), problem, plan, progress, options)
        return compute().to_result(return_lse)

    def _attend_shards(
        self, query: Sharded, strategy: Strategy | None, options: AttentionOptions
    ) -> Sharded:
        """Compute attention over shards on the workers."""
        if (number := len(query.shapes[0])) != 3:
            raise ValueError(
                f"query must be a sharded sequence of query, key and value, got {number} "
                "tensors in each shard"
            )
        parts: Split | None = None
        if (scores := options.get("scores")) is not None:
            check_is_scores(scores)
            _check_scores_need_no_gradient(scores)
            if scores.bias is not None:
                parts = partial(_bias_of_ranks, scores.bias, query)
                options = {**options, "scores": replace(scores, bias=None)}
        if options.get("dropout_p") and options.get("seed") is None:
            options = {**options, "seed": draw_seed()}  # repeated shards need the same mask
        autocasts = {
            device: torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        }
        attend_rank = partial(attend_shards, {**options, "strategy": strategy}, autocasts)
        is_early = not options.get("verify", False)
        producer = ShardProducer("attention", attend_rank, is_collective=True, is_early=is_early)
        return Sharded.make(self._group, producer, [query], parts)

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
        self._dispatcher.check_open()
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

        def split(number: int) -> list[tuple[Tensor, ...]]:
            parts = [tensor.tensor_split(number, dim) for tensor in tensors]
            return list(zip(*parts, strict=True))

        return Sharded.make(self._group, ShardProducer("shard", load_shard), parts=split)

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
        return Sharded.make(self._group, ShardProducer("make_sharded", function))

    @uncompiled
    @with_advice
    def submit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        plan: Kind | str | None = None,
        progress: Report = False,
        **options: Unpack[AttentionOptions],
    ) -> AttentionFuture:
        """Start :meth:`attention` and return at once; a cluster executes calls one after another.

        The arguments are those of :meth:`attention`. All tensors are copied before it returns,
        except those that a score function reads.

        Returns:
            The future result, without gradients.

        Raises:
            ValueError: An argument has a wrong value, or the cluster is closed. Also if gradients
                are enabled and a tensor requires them: detach it, or call :meth:`attention`.
            TypeError: An argument has the wrong type.
        """
        self._dispatcher.check_open()
        problem = check_problem(*autocast(query, key, value), **problem_options(options))
        for name in ("query", "key", "value"):
            _check_needs_no_gradient(name, getattr(problem, name))
        terms = problem.terms and _with_copies(problem.terms, "alibi_slopes", "bias")
        problem = replace(_with_copies(problem, "query", "key", "value", "sinks"), terms=terms)
        if (scores := options.get("scores")) is not None:
            _check_scores_need_no_gradient(scores)
        return_lse = as_bool("return_lse", options.get("return_lse", False))
        cancelled, executor = threading.Event(), self.make_executor(is_in_dispatcher=True)
        compute = self._bind(executor, problem, plan, progress, options, cancelled)
        event = torch.cuda.current_stream(query.device).record_event() if query.is_cuda else None

        def compute_when_ready() -> Tensor | AttentionOutput:
            if event is not None:
                event.synchronize()
            return compute().to_result(return_lse)

        future = AttentionFuture(executor, cancelled)
        self._dispatcher.submit(compute_when_ready, future)
        return future

    def make_executor(self, *, is_in_dispatcher: bool = False) -> TaskExecutor:
        """Return an executor of one call; see :class:`cqs.executors.contract.Executor`."""
        return TaskExecutor(self._dispatcher, self._group.rest, is_in_dispatcher=is_in_dispatcher)

    def _bind(
        self,
        executor: TaskExecutor,
        problem: Problem,
        plan: Kind | str | None,
        progress: Report,
        options: AttentionOptions,
        cancelled: threading.Event | None = None,
    ) -> Callable[[], Partial]:
        """Check the options of a call before it starts; return the function that computes it.

        Args:
            executor: Computes the problem.
            problem: The checked problem.
            plan: Kind of the plan of each part of the problem.
            progress: Draws or receives the progress.
            options: The options of the call.
            cancelled: Event that makes the executor stop.
        """
        check_backend_name(backend := options.get("backend"))
        check_progress(progress)
        number = problem.num_tasks
        number = executor.choose_num_tasks(problem) if number is None else number
        make_plan = methodcaller("make_plan", number, plan)
        for _, part in problem.parts():
            make_plan(part)
        return partial(
            attend,
            executor,
            problem,
            make_plan,
            backend=backend,
            verify=as_bool("verify", options.get("verify", False)),
            progress=progress,
            cancelled=cancelled,
        )


def _with_copies(value: Any, *names: str) -> Any:
    """Return a dataclass with copies of some tensors, each of which may be ``None``."""
    tensors = {name: tensor for name in names if (tensor := getattr(value, name)) is not None}
    return replace(value, **{name: tensor.clone() for name, tensor in tensors.items()})


def _check_needs_no_gradient(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that requires gradients, if autograd records."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            f"{name} must not require gradients, got requires_grad=True: pass it detached, or call "
            "cluster.attention(query, key, value), which is differentiable"
        )


def _check_scores_need_no_gradient(scores: Scores) -> None:
    reads = find_reads(scores.score_mod, torch.empty(0, dtype=torch.float32, device="cpu"))
    for tensor in () if reads is None else reads.leaves:
        _check_needs_no_gradient("a tensor of scores.score_mod", tensor)
    for name in ("sinks", "bias", "alibi_slopes"):
        if (tensor := getattr(scores, name)) is not None:
            _check_needs_no_gradient(f"scores.{name}", tensor)


def _bias_of_ranks(bias: Tensor, query: Sharded, num_ranks: int) -> Sequence[tuple[Tensor, ...]]:
    """Return the rows of a bias of each rank's queries, or its one row for all."""
    if bias.ndim < 2 or bias.shape[-2] == 1:
        return [(bias,)] * num_ranks
    lengths = [shapes[0][2] for shapes in query.shapes]
    if bias.shape[-2] != sum(lengths):
        raise ValueError(
            f"scores.bias must have 1 row or one of each of {sum(lengths)} queries, got "
            f"{bias.shape[-2]}"
        )
    return [(rows,) for rows in bias.split(lengths, dim=-2)]


def _positive_or_none(name: str, number: int | None) -> int | None:
    return None if number is None else as_integer(name, number, 1)


def _as_seconds(name: str, seconds: float) -> float:
    number = to_float(seconds, f"{name} must be a number of seconds")
    if not number > 0:
        raise ValueError(f"{name} must be positive, got {seconds}")
    return number
