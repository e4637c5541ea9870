"""What the driver sends to the actors of a run: settings, and the tokens that tasks hold."""

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorPool
from cqs.executors.ray.tasks.job import Job, ResultTensor, RunSettings
from cqs.scheduler import Task
from cqs.worker import Worker

if TYPE_CHECKING:
    from cqs.executors.ray.tasks.device_memory import SharedTensor


_LOGGER = logging.getLogger("cqs")


class Outbox:
    """Puts the tensors of a job into the object store when a task first needs them.

    If all actors are on one host, whole tensors are put: every actor reads its rows in the same
    shared memory. Otherwise each token group is put for itself, so that a host fetches only what
    its tasks hold. GPU tensors stay where they are if all actors are on GPUs of the driver's host.
    """

    def __init__(self, pool: ActorPool, job: Job, number: int):
        """Put nothing yet.

        Args:
            pool: The actors.
            job: The job.
            number: Number of the run.
        """
        self._pool, self._job, self._number = pool, job, number
        self.put_seconds = 0.0
        """Time in which this process put objects into the store."""
        self._stored: dict[Any, Any] = {}
        """References by side and tokens."""
        self._shared = _share(pool, job.tensors) if pool.shares_gpu_memory else {}
        """The tensors as memory that actors access, by id; empty if none do."""
        self.used_by_actors = job.tensors if self._shared else []
        """Tensors of this process that actors read and write."""
        nodes = {info.node for info in pool.infos}
        num_bytes = sum(tensor.nbytes for side in job.inputs for tensor in side)
        self._is_whole = bool(self._shared) or (
            len(nodes) == 1 and num_bytes <= pool.store_bytes / 2
        )

    def put_settings(self, worker: Worker) -> Any:
        """Return a reference to the settings of the run."""
        results = {
            side: tuple(
                ResultTensor(tuple(t.shape), t.dtype, self._shared.get(id(t))) for t in tensors
            )
            for side, tensors in self._job.results.items()
        }
        seqlens = self._job.problem.query.shape[2], self._job.problem.key.shape[2]
        keeps_inputs = bool(self._shared) or self._job.plan.num_tasks > len(self._pool.actors)
        return self._put(
            RunSettings(self._number, self._job.of_pass, worker, results, seqlens, keeps_inputs)
        )

    def put(self, tasks: Sequence[Task]) -> tuple[int, list[Any]]:
        """Return references to the tensors that hold the tokens of some tasks.

        Returns:
            The number of references to tensors of queries, and the references: those of queries,
            then those of keys.
        """
        found: tuple[list[Any], list[Any]] = ([], [])
        for side, tensors in enumerate(self._job.inputs):
            if self._is_whole:
                groups = [range(tensors[0].shape[2])]
            else:
                held = [task.held_keys if side else task.held_queries for task in tasks]
                groups = sorted(set(chain(*held)), key=lambda tokens: tokens.start)
            for tokens in groups:
                if (side, tokens) not in self._stored:
                    rows = slice(tokens.start, tokens.stop)
                    sent = [self._shared.get(id(t)) or Blob(t[:, :, rows]) for t in tensors]
                    self._stored[side, tokens] = self._put((tokens, sent))
                found[side].append(self._stored[side, tokens])
        return len(found[0]), [*found[0], *found[1]]

    def _put(self, value: Any) -> Any:
        start = time.perf_counter()
        reference = self._pool.ray.put(value)
        self.put_seconds += time.perf_counter() - start
        return reference

    def clear(self) -> None:
        """Release all objects in the store."""
        self._stored.clear()


def _share(pool: ActorPool, tensors: Sequence[Tensor]) -> "dict[int, SharedTensor]":
    """Return GPU tensors as memory that all actors access, by id; none if one cannot."""
    is_here = all(info.device == "cuda" and info.node == pool.own_node for info in pool.infos)
    if not is_here or not all(tensor.is_cuda for tensor in tensors):
        return {}
    try:
        from cqs.executors.ray.tasks.device_memory import SharedTensor

        return {id(tensor): SharedTensor(tensor) for tensor in tensors}
    except (ImportError, RuntimeError) as error:  # perhaps memory without a handle
        _LOGGER.info("GPU tensors pass through the object store: %s", error)
        return {}
