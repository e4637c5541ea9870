"""The class of the actors, which the pool makes remote."""

import os
import time
from collections.abc import Callable, Sequence

import torch

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorInfo
from cqs.executors.ray.session import import_ray
from cqs.executors.ray.shards.actor import ShardActor
from cqs.executors.ray.tasks.job import TensorGroups
from cqs.executors.ray.tasks.report import TaskReport
from cqs.scheduler import Task
from cqs.worker import HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes, memory_of


class TaskActor(ShardActor):
    """Computes one task at a time on one device, and holds shards there."""

    def __init__(self, use_gpu: bool, num_threads: int):
        """Choose the device and warm up the memory measurement.

        Args:
            use_gpu: Compute on the GPU that Ray assigned to this process, if there is one.
            num_threads: Number of CPU threads of PyTorch.
        """
        device = torch.device("cuda" if use_gpu and torch.cuda.is_available() else "cpu")
        super().__init__(device)
        torch.set_num_threads(num_threads)
        measure_peak_bytes(lambda: torch.ones(1, device=device), device)  # warm up

    def describe(self) -> ActorInfo:
        """Return process, node and device; answers as soon as the actor has started."""
        node = import_ray().get_runtime_context().get_node_id()
        return ActorInfo(os.getpid(), node, str(self._device))

    def run(
        self,
        task: Task,
        compute: Callable[..., TensorGroups],
        worker: Worker,
        *groups: tuple[Blob, ...],
    ) -> tuple[list[tuple[Blob, ...]], TaskReport]:
        """Compute a task.

        Args:
            task: The task.
            compute: Forward or backward pass, ``attend_task`` or ``differentiate_task``.
            worker: Backend and settings of the computation.
            groups: The CPU tensors of each of ``task.held_queries``, then of each of
                ``task.held_keys``; they are not written to.

        Returns:
            The results of ``compute`` as blobs, and the measurements of the task.

        Raises:
            torch.OutOfMemoryError: The GPU has too little memory. The exception's arguments are the
                message, the backend (None if not yet chosen) and the GPU's memory in bytes.
        """
        number = len(task.held_queries)
        sides = [(task.held_queries, groups[:number]), (task.held_keys, groups[number:])]
        bytes_in = mapped_bytes = 0
        for ranges, blobs_of_ranges in sides:
            size = sum(blob.nbytes for group in blobs_of_ranges for blob in group)
            bytes_in += size
            mapped_bytes += size * self._stay_in_store(ranges, worker)
        started = seconds = 0.0
        backend = worker.backend

        def computed() -> TensorGroups:
            nonlocal started, seconds, backend
            held = [
                [self._hold(ranges, blobs, worker) for blobs in zip(*blobs_of_ranges, strict=True)]
                for ranges, blobs_of_ranges in sides
            ]
            query, (key, value) = held[0][0], held[1]
            chosen = worker.choose_backend(query.sample, key.sample, value.sample, task.steps)
            backend = chosen.name
            self._synchronize()
            started, start = time.time(), time.perf_counter()
            results = compute(worker, task, *held)
            self._synchronize()
            seconds = time.perf_counter() - start
            return results

        try:
            tensors, peak_bytes = measure_peak_bytes(computed, self._device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(str(error), backend, memory_of(self._device)) from error
        results = [tuple(map(Blob, group)) for group in tensors]
        report = TaskReport(
            index=task.index,
            pid=os.getpid(),
            device=str(self._device),
            backend=str(backend),
            started=started,
            seconds=seconds,
            peak_bytes=peak_bytes + mapped_bytes,  # the profiler does not count shared memory
            bytes_in=bytes_in,
            bytes_out=sum(blob.nbytes for group in results for blob in group),
        )
        return results, report

    def _stay_in_store(self, ranges: Sequence[range], worker: Worker) -> bool:
        """Return whether tensors are read from shared memory; patterns require one range."""
        return self._device.type == "cpu" and (worker.pattern is None or len(ranges) == 1)

    def _hold(self, ranges: Sequence[range], blobs: Sequence[Blob], worker: Worker) -> HeldTokens:
        """Copy one tensor of each range to the device, unless shared memory serves."""
        tensors = [blob.tensor() for blob in blobs]
        if self._stay_in_store(ranges, worker):
            return HeldTokens(zip(ranges, tensors, strict=True))
        batch, heads, _, *dim = tensors[0].shape
        lengths = list(map(len, ranges))
        shape = batch, heads, sum(lengths), *dim
        packed = torch.empty(shape, dtype=tensors[0].dtype, device=self._device)
        for part, tensor in zip(packed.split(lengths, dim=2), tensors, strict=True):
            part.copy_(tensor)
        return HeldTokens.packed(packed, ranges)

    def _synchronize(self) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)
