"""Messages from the driver to the actors of a run: settings, and the tokens that tasks hold."""

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorPool
from cqs.executors.ray.tasks.job import Group, Job, ResultTensor, RunSettings
from cqs.scheduler import Task
from cqs.worker import Worker

if TYPE_CHECKING:
    from cqs.executors.ray.tasks.device_memory import SharedTensor


_LOGGER = logging.getLogger("cqs")


class Outbox:
    """Puts the tensors of a job into the object store when a task first needs them.

    If all actors are on one host, whole tensors are put: every actor reads its rows in the same
    shared memory. Otherwise each token group is put for itself, so that a host fetches only the
    groups of its tasks. GPU tensors stay on their GPU if all actors are on GPUs of the driver's
    host: actors read copies of them there, and write the results beside these.
    """

    def __init__(self, pool: ActorPool, job: Job, number: int):
        """Store the arguments; put nothing into the object store yet.

        Args:
            pool: The actors.
            job: The job.
            number: Number of the run.
        """
        self._pool, self._job, self._number = pool, job, number
        self.put_seconds = 0.0
        """Time in which this process put objects into the store."""
        self._stored: dict[Any, Any] = {}
        """Tensors that were sent, by side and tokens."""
        self._shared: dict[int, tuple[Tensor, SharedTensor]] = {}
        """Tensors that actors access on the driver's GPU, by the id of those that they replace."""
        self.has_replaced = False
        """Whether actors have memory open that has become too small."""
        nodes = {info.node for info in pool.infos}
        num_bytes = sum(tensor.nbytes for side in job.inputs for tensor in side)
        self._is_whole = len(nodes) == 1 and num_bytes <= pool.store_bytes / 2

    def share(self) -> None:
        """Copy tensors of a GPU to memory that actors access, if all are on GPUs of this host.

        No earlier call may still read or write this memory.
        """
        pool, tensors = self._pool, {id(tensor): tensor for tensor in self._job.tensors}
        is_here = pool.nodes == {pool.own_node}
        if not is_here or any(info.device == "cpu" for info in pool.infos):
            return
        try:
            from cqs.executors.ray.tasks.device_memory import ExportedMemory

            device = self._job.problem.query.device
            memory = pool.exported.get(device)
            if memory is None or not memory.clear_for(list(tensors.values())):
                self.has_replaced = pool.exported.pop(device, None) is not None
                memory = pool.exported[device] = ExportedMemory(device)
            places = memory.allocate(list(tensors.values()))
        except (ImportError, RuntimeError) as error:  # memory is short, or has no handle
            _LOGGER.info("GPU tensors pass through the object store: %s", error)
            return
        self._shared = dict(zip(tensors, places, strict=True))
        for tensor in chain(*self._job.inputs):
            self._shared[id(tensor)][0].copy_(tensor)
        self._job.synchronize()
        self._is_whole = True

    @property
    def is_shared(self) -> bool:
        """Whether actors write the results on the driver's GPU."""
        return bool(self._shared)

    def merged(self, group: Group) -> list[Tensor]:
        """Return the result of a group that an actor has written on the driver's GPU."""
        rows = slice(group.tokens.start, group.tokens.stop)
        results = self._job.results[group.is_of_keys]
        return [self._shared[id(tensor)][0][:, :, rows] for tensor in results]

    def put_settings(self, worker: Worker) -> Any:
        """Return the settings of the run, or a reference to them if they may be large.

        Ray sends small values with a call, which takes less time than its object store.
        """
        results = {
            side: tuple(
                ResultTensor(tuple(t.shape), t.dtype, self._find_shared(t)) for t in tensors
            )
            for side, tensors in self._job.results.items()
        }
        seqlens = self._job.problem.query.shape[2], self._job.problem.key.shape[2]
        keeps_inputs = self.is_shared or self._job.plan.num_tasks > len(self._pool.actors)
        settings = RunSettings(
            self._number, self._job.task_pass, worker, results, seqlens, keeps_inputs
        )
        is_small = worker.pattern is worker.terms is None
        return settings if is_small else self._put(settings)

    def put(self, tasks: Sequence[Task]) -> tuple[int, list[Any]]:
        """Return the tensors that hold the tokens of some tasks, or references to them.

        Returns:
            The number of elements with tensors of queries, and these, then those of keys.
        """
        elements: tuple[list[Any], list[Any]] = ([], [])
        for side, tensors in enumerate(self._job.inputs):
            if self._is_whole:
                groups = [range(tensors[0].shape[2])]
            else:
                held = [task.held_keys if side else task.held_queries for task in tasks]
                groups = sorted(set(chain(*held)), key=lambda tokens: tokens.start)
            for tokens in groups:
                if (side, tokens) not in self._stored:
                    rows = slice(tokens.start, tokens.stop)
                    if self.is_shared:
                        sent = tokens, [self._find_shared(tensor) for tensor in tensors]
                    else:
                        sent = self._put((tokens, [Blob(tensor[:, :, rows]) for tensor in tensors]))
                    self._stored[side, tokens] = sent
                elements[side].append(self._stored[side, tokens])
        return len(elements[0]), [*elements[0], *elements[1]]

    def _put(self, value: Any) -> Any:
        start = time.perf_counter()
        reference = self._pool.ray.put(value)
        self.put_seconds += time.perf_counter() - start
        return reference

    def _find_shared(self, tensor: Tensor) -> "SharedTensor | None":
        shared = self._shared.get(id(tensor))
        return None if shared is None else shared[1]

    def clear(self) -> None:
        """Release all objects in the store, and the tensors on the GPU."""
        self._stored.clear()
        self._shared.clear()
