"""The actors of a cluster: their start, their calls, and the detection of failed and hung ones."""

import threading
import time
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from cqs.executors.ray.session import find_connection, find_node
from cqs.version import __version__

CONTROL = "control"
"""Concurrency group of calls that an actor answers while it computes."""
_RELEASE_SECONDS = 5
"""Seconds, an integer, that Ray may take to release the resources of actors that have ended."""
_POLL_SECONDS = 0.1
"""Longest wait for answers before the caller checks for cancellation and timeouts."""
_EARLIER = "earlier"
"""Key of calls of earlier runs."""


class WorkersFailedError(RuntimeError):
    """No worker is left to compute the remaining tasks."""


class TaskFailedError(RuntimeError):
    """As many workers as ``max_attempts`` failed on the same task or shard operation."""


class MemoryNotSharedError(RuntimeError):
    """A process cannot open the memory of another one, as in another container."""


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts, and the number of failures, after which a call gives up."""

    stall_timeout: float
    """Seconds after which an actor that has work and returns no result counts as hung."""
    start_timeout: float
    """Seconds that a new actor may take until it answers."""
    max_attempts: int
    """Number of actors that may fail on one task or operation before the call raises."""


class ActorInfo(NamedTuple):
    """Process, node and device of an actor."""

    pid: int
    """Process id on the actor's host."""
    node: str
    """Id of the actor's Ray node."""
    device: str
    """Device of the actor, ``"cuda"`` or ``"cpu"``."""
    memory: int | None
    """Memory of its GPU in bytes; None without a GPU."""
    version: str
    """Version of cqs on the actor's host."""
    environment: tuple[tuple[str, str], ...]
    """What its reproducible results depend on, see :mod:`cqs.worker.environment`."""


@dataclass(eq=False)
class Actor:
    """The driver's record of an actor."""

    room: Any
    """Placement group with the resources of the actor, which its replacement uses too."""
    handle: Any = None
    """Ray handle of the actor; None before its start and after its removal."""
    info: ActorInfo | None = None
    """Process and device of the actor; None until it has answered, and after its removal."""


class ActorPool:
    """Equal actors on a Ray cluster, packed on as few nodes as possible."""

    def __init__(self, ray: Any, retry_policy: RetryPolicy):
        """Start without actors.

        Args:
            ray: The ray module, connected to a cluster.
            retry_policy: Timeouts and the number of attempts per task.
        """
        self.ray, self.retry_policy = ray, retry_policy
        self.actors: list[Actor] = []
        """Actors by their place in the pool. Those that start first are sorted by node."""
        self.num_workers = 0
        """Number of actors that there should be; any thread may set it."""
        self.closing = threading.Event()
        """Set when the cluster closes: calls then raise CancelledError."""
        self.own_node = find_node()
        """Id of the Ray node of this process; None for a Ray Client."""
        self.obstacle = ""
        """Why processes of one host cannot access each other's memory; empty if they can."""
        self.shared_memories: dict[str, Any] = {}
        """Memory of this process that actors access, by device."""
        self.has_stale_memory = False
        """Whether actors may have memory open that nobody else has, and are to close it."""
        self._connection = find_connection()
        self._room: Any = None
        self.nodes: set[str] = set()
        """Ids of the nodes on which actors have run."""
        self._abandoned: dict[Any, Actor | None] = {}
        """References to unfinished results that are not needed, and actors that must end them."""

    def start(
        self,
        actor_class: type,
        num_workers: int | None,
        use_gpus: bool | None,
        cpus_per_worker: int | None,
    ) -> None:
        """Reserve resources for the actors and their replacements, and start the actors.

        Args:
            actor_class: Class of the actors, not decorated by ``ray.remote``.
            num_workers: Number of actors that run at the same time; ``None`` means as many as the
                cluster has GPUs or cores for.
            use_gpus: Reserve one GPU for each actor instead of CPU cores; ``None`` means true if
                the cluster has GPUs.
            cpus_per_worker: CPU cores of each actor without a GPU, and threads of every actor.

        Raises:
            ValueError: The cluster has too few free GPUs or cores.
            TimeoutError: An actor did not answer within ``start_timeout``.
            ray.exceptions.RayError: An actor failed.
        """
        ray, total = self.ray, self.ray.cluster_resources()
        if use_gpus is None:
            use_gpus = total.get("GPU", 0) >= 1
        if cpus_per_worker is None:
            cpus_per_worker = max(int(total.get("CPU", 0) // total["GPU"]), 1) if use_gpus else 1
        kind, per_worker = ("GPU", 1) if use_gpus else ("CPU", cpus_per_worker)
        self.num_workers = num_workers or max(int(total.get(kind, 0)) // per_worker, 1)
        self._resources, self._arguments = {kind: per_worker}, (use_gpus, cpus_per_worker)
        self._room = self._reserve(self.num_workers)
        if not self._room.wait(_RELEASE_SECONDS):
            raise ValueError(
                f"num_workers must be at most the workers that fit the free {kind}s, got "
                f"{self.num_workers}, which require {self.num_workers * per_worker}: the cluster "
                f"has {ray.available_resources().get(kind, 0):g} free of {total.get(kind, 0):g}"
            )
        self._remote_class = ray.remote(
            num_cpus=0 if use_gpus else cpus_per_worker,
            num_gpus=int(use_gpus),
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={CONTROL: 1},
        )(actor_class)
        self.grow()
        failure = self.fill(threading.Event())
        if failure is not None:
            raise failure
        self.actors.sort(key=lambda actor: actor.info.node if actor.info else "")

    def grow(self) -> None:
        """Reserve resources for actors that are missing; :meth:`Calls.refill` starts them.

        The first actors share a placement group, which stays reserved. Others have one each.
        """
        while len(self.actors) < self.num_workers:
            number = sum(actor.room is self._room for actor in self.actors)
            room = self._room if number < self._room.bundle_count else self._reserve(1)
            self.actors.append(Actor(room))

    def shrink(self, number: int) -> None:
        """Kill actors beyond a number, which have no work, and release resources of their own.

        Actors that have started are the last to be killed.
        """
        self.actors.sort(key=lambda actor: actor.info is None)
        for actor in self.actors[number:]:
            self.remove(actor)
            if actor.room is not self._room:
                self.ray.util.remove_placement_group(actor.room)
        del self.actors[number:]
        self.nodes = {info.node for info in self.infos}

    def _reserve(self, number: int) -> Any:
        """Return a placement group with the resources of a number of actors."""
        return self.ray.util.placement_group([self._resources] * number, strategy="PACK")

    def restart(self, actor: Actor) -> Actor:
        """Start an actor with the resources of another one; it executes calls when it is up."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(actor.room)
        starter = self._remote_class.options(scheduling_strategy=strategy)
        return Actor(actor.room, starter.remote(*self._arguments))

    def fill(self, cancelled: threading.Event) -> Exception | None:
        """Start missing actors and wait until all actors answer; return a failure of one of them.

        Raises:
            CancelledError: ``cancelled`` was set, or the cluster closes.
        """
        failure: Exception | None = None
        with Calls(self, cancelled) as calls:
            calls.refill()
            while calls:
                for answer in calls.collect():
                    failure = answer.failure or answer.error or failure
        return failure

    @property
    def infos(self) -> list[ActorInfo]:
        """Processes and devices of the actors that have started."""
        return [info for actor in self.actors if (info := actor.info) is not None]

    def check_environments(self, environments: Set[Any]) -> None:
        """Raise ValueError if results of different actors are not bitwise reproducible."""
        if len(environments) > 1:
            one, other, *_ = map(set, environments)
            raise ValueError(
                f"reproducible calls require equal devices and libraries, got {sorted(one ^ other)}"
            )

    @property
    def is_connected(self) -> bool:
        """Whether this process still has the Ray connection in which the actors were started."""
        return find_connection() is self._connection

    def check_connected(self) -> None:
        """Raise ValueError if Ray is disconnected: its next call would start another Ray."""
        if not self.is_connected:
            for actor in self.actors:
                actor.handle = actor.info = None
            self._abandoned.clear()
            raise ValueError(
                "this cluster has lost its connection to Ray, as after ray.shutdown(): open "
                "another cqs.Cluster"
            )

    def remove(self, actor: Actor) -> None:
        """Kill an actor, also one that hangs; do nothing if it was removed before."""
        if actor.handle is not None:
            self.ray.kill(actor.handle, no_restart=True)
            self.has_stale_memory = True
        actor.handle = actor.info = None  # a handle keeps a connection of Ray open

    def drop_memory(self, *devices: str) -> None:
        """Drop memory that actors access; they close it after the next run."""
        for device in devices:
            self.has_stale_memory |= self.shared_memories.pop(device, None) is not None

    def abandon(self, results: Mapping[Any, Actor | None]) -> None:
        """Discard results that are no longer needed.

        Ray prints the error of a result that was never read. The pool therefore keeps unfinished
        references, and reads them in a later call.

        Args:
            results: References to the results, each with the actor if that must end the
                computation before memory is shared again.
        """
        self._abandoned.update(results)
        if not (self._abandoned and self.is_connected):
            return
        refs = list(self._abandoned)
        for ref in self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
            del self._abandoned[ref]
            with suppress(Exception):
                self.ray.get(ref)

    def take_abandoned(self) -> dict[Any, Actor]:
        """Return computations that must end, and their actors; nobody else waits for them now."""
        taken = {ref: actor for ref, actor in self._abandoned.items() if actor is not None}
        self._abandoned = dict.fromkeys(self._abandoned.keys() - taken)
        return taken

    def close(self) -> None:
        """Kill all actors and release their resources, if the connection to Ray still exists."""
        if self.is_connected:
            self.abandon({})
            self.shrink(0)
            if self._room is not None:
                self.ray.util.remove_placement_group(self._room)
            if self.shared_memories and (refs := list(self._abandoned)):
                # Actors may write to it until they have ended.
                self.ray.wait(refs, num_returns=len(refs), timeout=_RELEASE_SECONDS)
        self.shared_memories.clear()


class Answer(NamedTuple):
    """The end of a call, or of all calls on an actor that has failed."""

    actor: Actor
    keys: list[Any]
    """Key of the call; of a failed actor, the keys of all its calls in their order."""
    value: Any = None
    """Return value of the method."""
    error: Exception | None = None
    """Exception that the method raised; its cause has the remote traceback."""
    failure: Exception | None = None
    """Failure of the actor, which has been removed from the pool; TimeoutError if it hung."""
    info: ActorInfo | None = None
    """Process and device of the actor that failed; None if it had not started."""
    seconds: float = 0.0
    """Time to get the value."""


class Calls:
    """Pending calls on actors, in a ``with`` block at whose end their results are discarded.

    An actor executes its calls one after another, also those whose results are discarded. Ray could
    cancel them, but the actor waits 30 seconds for the number of a call that was cancelled before
    it was sent, and is then lost.
    """

    def __init__(self, pool: ActorPool, cancelled: threading.Event):
        """Start without calls.

        Args:
            pool: The pool of the actors.
            cancelled: Event that makes waits end with CancelledError, as the closing of the cluster
                does.
        """
        self._pool, self._ray, self.cancelled = pool, pool.ray, cancelled
        self.start = time.monotonic()
        self.timeout = pool.retry_policy.stall_timeout
        """Seconds after which an actor that has started and does not answer counts as hung."""
        self.queues: dict[Actor, dict[Any, Any]] = {}
        """For each actor, the keys of pending calls by their Ray references, in order."""
        self._last_sign: dict[Actor, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool.is_connected:
            for actor, queue in self.queues.items():
                waits = {ref: None if key is None else actor for ref, key in queue.items()}
                self._pool.abandon(waits)
        for queue in self.queues.values():  # tracebacks refer to it, and results fill Ray's store
            queue.clear()

    def __bool__(self) -> bool:
        """Return whether calls are pending."""
        return any(self.queues.values())

    def adopt(self) -> bool:
        """Add earlier calls that must end; return whether calls are pending."""
        for ref, actor in self._pool.take_abandoned().items():
            self.queues.setdefault(actor, {})[ref] = _EARLIER
            self._last_sign.setdefault(actor, time.monotonic())
        return bool(self)

    def add(self, actor: Actor, key: Any, method: str, *arguments: Any) -> None:
        """Call a method of an actor.

        Args:
            actor: The actor.
            key: Identifies the call in its answer.
            method: Name of the method.
            arguments: Arguments of the method; those that are Ray references are replaced by their
                objects.
        """
        queue = self.queues.setdefault(actor, {})
        if not queue:
            self._last_sign[actor] = time.monotonic()
        queue[getattr(actor.handle, method).remote(*arguments)] = key

    def refill(self) -> None:
        """Start missing actors; call ``describe`` with key None on all that had no calls here."""
        pool = self._pool
        pool.actors[:] = [
            pool.restart(actor) if actor.handle is None else actor for actor in pool.actors
        ]
        for actor in pool.actors:
            if actor not in self.queues:
                self.add(actor, None, "describe")

    def check(self) -> None:
        """Raise CancelledError or ValueError if the call must end; Ray may then be shut down."""
        if self.cancelled.is_set() or self._pool.closing.is_set():
            raise CancelledError
        self._pool.check_connected()

    def collect(self) -> Iterator[Answer]:
        """Wait at most 0.1 s for an answer; yield all that have arrived, failures and hung actors.

        Raises:
            CancelledError: The call was cancelled, or the cluster closed.
            ValueError: This process lost its connection to Ray.
        """
        self.check()
        actors = {ref: actor for actor, queue in self.queues.items() for ref in queue}
        refs: list[Any] = list(actors)
        ready = self._ray.wait(refs, num_returns=1, timeout=_POLL_SECONDS)[0]
        if ready and len(refs) > 1:
            ready = self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        ref, now = None, time.monotonic()  # the caller of an answer may run user code for long
        try:
            for ref in ready:
                self.check()  # the caller of the previous answer may have run user code
                if ref in self.queues.get(actors[ref], ()):
                    yield self._get(ref, actors[ref])
        finally:
            refs, ready, ref, actors = [], [], None, {}  # a traceback refers to these variables
        start_timeout = self._pool.retry_policy.start_timeout
        for actor, queue in list(self.queues.items()):
            limit = start_timeout if actor.info is None else self.timeout
            if queue and now - self._last_sign[actor] > limit:
                message = f"a worker is silent for {limit:g} s: see start_timeout, stall_timeout"
                yield self.fail(actor, TimeoutError(message))

    def _get(self, ref: Any, actor: Actor) -> Answer:
        """Return the answer of a call that has ended; remove its actor if that has failed."""
        start, errors = time.perf_counter(), self._ray.exceptions
        value: Any = None
        raised: Exception | None = None
        try:
            value = self._ray.get(ref)
        except errors.RayTaskError as error:
            raised = error.cause
            with suppress(Exception):  # some exceptions have read-only attributes
                raised.__cause__ = error.with_traceback(None)
        except errors.UnserializableException as error:
            raised = error
        except errors.RayError as error:  # the actor, its host or the result is lost
            return self.fail(actor, error.with_traceback(None))
        self._last_sign[actor] = time.monotonic()
        key = self.queues[actor].pop(ref)
        if isinstance(value, ActorInfo) and value.version != __version__:
            raised = ValueError(
                f"cqs must have the driver's version {__version__} on all Ray nodes, got "
                f"{value.version} on node {value.node}: install cqs-attention=={__version__} there"
            )
        elif isinstance(value, ActorInfo):
            actor.info = value
            self._pool.nodes.add(value.node)
        seconds = time.perf_counter() - start
        return Answer(actor, [key], value, raised, seconds=seconds)

    def fail(self, actor: Actor, failure: Exception) -> Answer:
        """Remove a failed or hung actor from the pool, and its calls."""
        queue, info = self.queues.pop(actor, {}), actor.info
        self._pool.remove(actor)
        self._pool.abandon(dict.fromkeys(queue, actor))
        return Answer(actor, list(queue.values()), failure=failure, info=info)
