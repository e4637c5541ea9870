"""Messages from the driver to the actors of a run: settings, and the tokens that tasks hold."""

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorInfo, ActorPool
from cqs.executors.ray.tasks.job import Group, Job, ResultTensor, RunSettings
from cqs.executors.ray.tasks.shared_memory import SharedMemory, SharedTensor
from cqs.scheduler import Task
from cqs.worker import Worker


class Outbox:
    """Gives the tensors of a job to the actors when a task first needs them.

    If all actors run here, tensors are copied once to memory that they access. That is memory of
    the host, or if tensors and actors are on GPUs, of the GPU of the tensors. Actors read their
    rows there and write the results beside them. Otherwise each token group is put into the object
    store for itself, so that a host fetches only the groups of its tasks.
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
        """Time in which this process copied tensors to shared memory or put them into the store."""
        self.transport = "object store"
        """How tensors get to the actors, see :attr:`RunReport.transport`."""
        self._sent: dict[Any, Any] = {}
        """Where actors find the tensors of tokens, or a reference to them, by side and tokens."""
        self._nodes: set[str] | None = None
        """Ids of the nodes whose actors can take part; None means all, through the store."""
        self._shared: dict[int, tuple[Tensor, SharedTensor]] = {}
        """Tensors that actors access and their locations, by the id of those that they replace."""

    def share(self) -> None:
        """Reserve memory for the tensors that actors access, if all of them can.

        Otherwise memory of earlier calls is freed. None of them may still read or write it.
        """
        pool, tensors = self._pool, {id(tensor): tensor for tensor in self._job.tensors}
        device = self._job.problem.query.device
        has_access = device.type == "cpu" or all(info.device != "cpu" for info in pool.infos)
        try:
            if pool.obstacle:
                raise RuntimeError(pool.obstacle)
            if not (pool.nodes == {pool.own_node} and has_access):
                raise RuntimeError("not all workers can access the memory of these tensors")
            memory = pool.shared_memories.get(str(device))
            if memory is None or not memory.clear_for(list(tensors.values())):
                pool.drop_memory(str(device))
                memory = pool.shared_memories[str(device)] = SharedMemory(device)
            places = memory.allocate(list(tensors.values()))
        except (OSError, RuntimeError) as error:  # memory is short, or has no handle
            self.transport += f": {error}"
            pool.drop_memory(*pool.shared_memories)
            torch.cuda.empty_cache()
            return
        self.transport = "shared memory"
        self._shared = dict(zip(tensors, places, strict=True))
        if self.is_on_gpu:
            for tensor in chain(*self._job.inputs):
                self._shared[id(tensor)][0].copy_(tensor)
            self._job.synchronize()

    @property
    def is_on_gpu(self) -> bool:
        """Whether actors write the results on the driver's GPU."""
        return bool(self._shared) and self._job.problem.query.is_cuda

    def merged(self, group: Group) -> list[Tensor]:
        """Return the result of a group that an actor has written to shared memory."""
        rows = slice(group.tokens.start, group.tokens.stop)
        results = self._job.results[group.is_of_keys]
        return [self._shared[id(tensor)][0][:, :, rows] for tensor in results]

    def put_settings(self, worker: Worker) -> Any:
        """Return the settings of the run, or a reference to them if they may be large.

        Ray sends small values with a call, which takes less time than its object store.
        """
        results = {
            side: tuple(ResultTensor(tuple(t.shape), t.dtype, self._location(t)) for t in tensors)
            for side, tensors in self._job.results.items()
        }
        pool, keeps_inputs = self._pool, not self._pool.obstacle
        shares_parts = keeps_inputs and len(pool.nodes) == len({i.device for i in pool.infos}) == 1
        self._nodes = set(pool.nodes) if self._shared or shares_parts else None
        settings = RunSettings(
            self._number, self._job.task_pass, worker, results, keeps_inputs, shares_parts
        )
        return settings if worker.pattern is worker.terms is None else self._pool.ray.put(settings)

    def _location(self, tensor: Tensor) -> SharedTensor | None:
        return self._shared[id(tensor)][1] if self._shared else None

    def reaches(self, info: ActorInfo) -> bool:
        """Return whether an actor can take part in the run, although it has started during it."""
        return self._nodes is None or info.node in self._nodes

    def put(self, tasks: Sequence[Task]) -> tuple[int, list[Any]]:
        """Return the tensors that hold the tokens of some tasks, or references to them.

        Returns:
            The number of elements with tensors of queries, and these, then those of keys.
        """
        queries, keys, start = dict[Any, None](), dict[Any, None](), time.perf_counter()
        for task in tasks:
            for side, elements in enumerate((queries, keys)):
                for tokens in task.held_keys if side else task.held_queries:
                    if (side, tokens) not in self._sent:
                        self._sent[side, tokens] = self._send(side, tokens)
                    elements[self._sent[side, tokens]] = None
        self.put_seconds += time.perf_counter() - start
        return len(queries), [*queries, *keys]

    def _send(self, side: int, tokens: range) -> Any:
        """Copy tokens to shared memory or the object store; return where actors find them."""
        tensors, rows = self._job.inputs[side], slice(tokens.start, tokens.stop)
        if not self._shared:
            blobs = [Blob(tensor[:, :, rows]) for tensor in tensors]
            return self._pool.ray.put((tokens, blobs))
        if not self.is_on_gpu:
            for tensor in tensors:
                self._shared[id(tensor)][0][:, :, rows].copy_(tensor[:, :, rows])
        return range(tensors[0].shape[2]), tuple([self._location(tensor) for tensor in tensors])

    def clear(self, has_failed: bool) -> None:
        """Release all objects in the store, and the tensors in shared memory.

        Args:
            has_failed: Whether actors may go on to write to it. That of the host is replaced then.
        """
        self._sent.clear()
        self._shared.clear()
        if has_failed:
            self._pool.drop_memory("cpu")
