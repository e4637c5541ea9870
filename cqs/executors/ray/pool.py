"""The actors of a cluster: started, replaced, ended."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from cqs.executors.ray.actor import ActorInfo, host_name
from cqs.executors.ray.closer import Closer
from cqs.executors.ray.session import find_connection

CONTROL = "control"
"""Calls of this concurrency group are answered while the actor computes."""
_RELEASE_SECONDS = 5.0
"""How long what ended actors held may take to be free again."""


@dataclass
class Actor:
    """An actor as the driver knows it."""

    index: int
    """Never used twice in a pool."""
    handle: Any
    info: ActorInfo | None = None
    """What it said of itself, once it has started."""

    def ping(self) -> Any:
        """Return a reference that is ready when the actor can work."""
        return self.handle.describe.remote()


class ActorPool:
    """Equal actors on a Ray cluster, on as few of its nodes as can hold them."""

    def __init__(
        self,
        ray: Any,
        actor_class: type,
        num_workers: int,
        *,
        use_gpus: bool,
        cpus_per_worker: int,
    ):
        """Reserve room for ``num_workers`` actors and their successors; none is started yet."""
        self.ray = ray
        self._connection = find_connection()
        room = {"GPU": 1} if use_gpus else {"CPU": cpus_per_worker}
        self._room = ray.util.placement_group([room] * num_workers, strategy="PACK")
        self.actors: dict[int, Actor] = {}
        self._num_started = 0
        self._abandoned: list[Any] = []
        self._arguments = use_gpus, cpus_per_worker
        self._remote_class = ray.remote(
            num_cpus=0 if use_gpus else cpus_per_worker,
            num_gpus=int(use_gpus),
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={CONTROL: 1},
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._room
            ),
        )(actor_class)

    @property
    def is_connected(self) -> bool:
        """Whether the connection to Ray is that in which the actors were started."""
        return find_connection() is self._connection

    def check_connected(self) -> None:
        """Raise ValueError if Ray is gone: Ray's next call would start another by itself."""
        if not self.is_connected:
            self.actors.clear()
            self._abandoned.clear()
            raise ValueError(
                "this cluster has lost its connection to Ray, as after ray.shutdown(): open "
                "another cqs.Cluster"
            )

    def start(self, number: int) -> list[Actor]:
        """Begin to start actors; they can be sent work at once."""
        started = []
        for _ in range(number):
            actor = Actor(self._num_started, self._remote_class.remote(*self._arguments))
            self.actors[actor.index] = actor
            self._num_started += 1
            started.append(actor)
        return started

    def remove(self, actor: Actor, *, is_hung: bool) -> None:
        """Let go of an actor, and make sure that it ends if it answers nothing any more."""
        del self.actors[actor.index]
        self.ray.kill(actor.handle, no_restart=True)
        actor.handle = None  # Ray keeps a connection open as long as there is a handle
        if is_hung and actor.info is not None and actor.info.host == host_name():
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor.info.pid, signal.SIGKILL)

    def abandon(self, refs: list[Any]) -> None:
        """Forget results that nobody waits for any more.

        Ray prints the error of a result that was never read, so those are kept until they have
        come, and then read.
        """
        self._abandoned += refs
        if not self._abandoned:
            return
        ready, self._abandoned = self.ray.wait(
            self._abandoned, num_returns=len(self._abandoned), timeout=0
        )
        for ref in ready:
            with contextlib.suppress(Exception):
                self.ray.get(ref)

    def close(self) -> None:
        """End all actors and give back their room, unless they ended with Ray."""
        if not self.is_connected:
            return
        self.abandon([])
        for actor in list(self.actors.values()):
            self.remove(actor, is_hung=False)
        self.ray.util.remove_placement_group(self._room)


def start_pool(
    ray: Any,
    actor_class: type,
    num_workers: int | None,
    use_gpus: bool | None,
    cpus_per_worker: int,
    start_timeout: float,
) -> tuple[ActorPool, int]:
    """Start actors, all or none, and return their pool and number."""
    total = ray.cluster_resources()
    if use_gpus is None:
        use_gpus = total.get("GPU", 0) >= 1
    kind, each = ("GPU", 1) if use_gpus else ("CPU", cpus_per_worker)
    if num_workers is None:
        num_workers = max(int(total.get(kind, 0)) // each, 1)
    deadline = time.monotonic() + _RELEASE_SECONDS
    while (free := ray.available_resources().get(kind, 0)) < num_workers * each:
        if time.monotonic() > deadline:
            raise ValueError(
                f"num_workers={num_workers} needs {num_workers * each} free {kind}s, but the "
                f"cluster has {free:g} of {total.get(kind, 0):g}"
            )
        time.sleep(0.1)
    pool = ActorPool(
        ray, actor_class, num_workers, use_gpus=use_gpus, cpus_per_worker=cpus_per_worker
    )
    try:
        pings = [(actor, actor.ping()) for actor in pool.start(num_workers)]
        for actor, ping in pings:
            actor.info = ray.get(ping, timeout=start_timeout)
    except ray.exceptions.GetTimeoutError:
        Closer(pool.close).close()
        raise ValueError(
            f"a worker did not start within start_timeout={start_timeout:g} s"
        ) from None
    except BaseException:
        Closer(pool.close).close()
        raise
    return pool, num_workers


def actor_failures(ray: Any) -> tuple[type[Exception], ...]:
    """List what says that a machine failed, as opposed to the computation."""
    errors = ray.exceptions
    return (
        errors.RayActorError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
        errors.NodeDiedError,
        errors.WorkerCrashedError,
    )
