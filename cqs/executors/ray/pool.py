"""The actors of a cluster: their start, replacement and end."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from cqs.executors.ray.actor_info import ActorInfo, host_name
from cqs.executors.ray.closer import Closer
from cqs.executors.ray.session import find_connection

CONTROL = "control"
"""Concurrency group of calls that an actor answers while it computes."""
_RELEASE_SECONDS = 5.0
"""Seconds that Ray may take to release the resources of actors that have ended."""


@dataclass
class Actor:
    """The driver's record of an actor."""

    index: int
    """Index of the actor, unique among all actors that the pool has started."""
    handle: Any
    """Ray handle of the actor; None after its removal."""
    info: ActorInfo | None = None
    """Process, host and device of the actor; None until it has answered."""

    def ping(self) -> Any:
        """Return a Ray reference to the actor's :attr:`info`, ready when it has started."""
        return self.handle.describe.remote()


class ActorPool:
    """Equal actors on a Ray cluster, packed on as few nodes as possible."""

    def __init__(
        self,
        ray: Any,
        actor_class: type,
        num_workers: int,
        *,
        use_gpus: bool,
        cpus_per_worker: int,
    ):
        """Reserve resources for the actors and their replacements, and start none.

        Args:
            ray: The ray module, connected to a cluster.
            actor_class: Class of the actors, not decorated by ``ray.remote``.
            num_workers: Number of actors that run at the same time.
            use_gpus: Reserve one GPU for each actor instead of CPU cores.
            cpus_per_worker: CPU cores of each actor without a GPU, and threads of every actor.
        """
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
        """Whether this process still has the Ray connection in which the actors were started."""
        return find_connection() is self._connection

    def check_connected(self) -> None:
        """Raise ValueError if Ray is disconnected: its next call would start another Ray."""
        if not self.is_connected:
            self.actors.clear()
            self._abandoned.clear()
            raise ValueError(
                "this cluster has lost its connection to Ray, as after ray.shutdown(): open "
                "another cqs.Cluster"
            )

    def start(self, number: int) -> list[Actor]:
        """Start actors without waiting; calls on them are queued until they have started."""
        started = []
        for _ in range(number):
            actor = Actor(self._num_started, self._remote_class.remote(*self._arguments))
            self.actors[actor.index] = actor
            self._num_started += 1
            started.append(actor)
        return started

    def remove(self, actor: Actor, *, is_hung: bool) -> None:
        """Kill an actor and remove it from the pool.

        Args:
            actor: Actor of this pool.
            is_hung: Send SIGKILL to its process too, if that runs on the host of the driver.
        """
        del self.actors[actor.index]
        self.ray.kill(actor.handle, no_restart=True)
        actor.handle = None  # a handle keeps a connection of Ray open
        if is_hung and actor.info is not None and actor.info.host == host_name():
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor.info.pid, signal.SIGKILL)

    def abandon(self, refs: list[Any]) -> None:
        """Discard results that are no longer needed.

        Ray prints the error of a result that was never read. The pool therefore keeps unfinished
        references, and reads them in a later call.
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
        """Kill all actors and release their resources, if the connection to Ray still exists."""
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
    """Start all actors and wait until they answer; if one fails, end all.

    Args:
        ray: The ray module, connected to a cluster.
        actor_class: Class of the actors, not decorated by ``ray.remote``.
        num_workers: Number of actors; ``None`` means as many as the cluster has GPUs or cores for.
        use_gpus: Reserve one GPU for each actor; ``None`` means true if the cluster has GPUs.
        cpus_per_worker: CPU cores of each actor without a GPU.
        start_timeout: Seconds to wait for the answer of an actor.

    Returns:
        The pool and the number of its actors.

    Raises:
        ValueError: The cluster has too few free GPUs or cores, or an actor did not answer in time.
    """
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
                f"num_workers must be at most the workers that fit the free {kind}s, "
                f"got {num_workers}, which require {num_workers * each}: the cluster has "
                f"{free:g} free of {total.get(kind, 0):g}"
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
            f"a worker did not start within start_timeout={start_timeout:g} s: raise start_timeout"
        ) from None
    except BaseException:
        Closer(pool.close).close()
        raise
    return pool, num_workers
