"""The class of the actors, which the pool makes remote."""

import os
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorInfo
from cqs.executors.ray.session import import_ray
from cqs.executors.ray.shards.actor import ShardActor
from cqs.executors.ray.tasks.job import Group, Pass
from cqs.executors.ray.tasks.report import TaskReport
from cqs.scheduler import Task
from cqs.tiler.group import Part
from cqs.worker import HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes, memory_of


class TaskActor(ShardActor):
    """Computes one task at a time on one device, merges groups, and holds shards there."""

    def __init__(self, use_gpu: bool, num_threads: int):
        """Choose the device and warm up the memory measurement.

        Args:
            use_gpu: Compute on the GPU that Ray assigned to this process, if there is one.
            num_threads: Number of CPU threads of PyTorch.
        """
        device = torch.device("cuda" if use_gpu and torch.cuda.is_available() else "cpu")
        super().__init__(device)
        torch.set_num_threads(num_threads)
        self._kept: dict[tuple[int, Group, int], list[Part]] = {}
        """Parts by run, group and task, until the group is merged here."""
        self._buffer = lru_cache(maxsize=4)(self._make_buffer)
        """Returns the tensor of a merged result; the next merge may overwrite it."""
        measure_peak_bytes(lambda: torch.ones(1, device=device), device)  # warm up

    def describe(self) -> ActorInfo:
        """Return process, node and device; answers as soon as the actor has started."""
        node = import_ray().get_runtime_context().get_node_id()
        return ActorInfo(os.getpid(), node, str(self._device))

    def run(
        self,
        number: int,
        task: Task,
        of_pass: Pass,
        worker: Worker,
        returned: Sequence[Group],
        kept: Sequence[Group],
        *inputs: tuple[Blob, ...],
    ) -> Any:
        """Compute a task; keep its results for groups that are merged here, return the others.

        Args:
            number: Number of the run. Parts of other runs are discarded.
            task: The task.
            of_pass: Forward or backward pass.
            worker: Backend and settings of the computation.
            returned: Groups that are merged by other actors.
            kept: Groups that are merged here, see :meth:`merge`.
            inputs: The CPU tensors of each of ``task.held_queries``, then of each of
                ``task.held_keys``; they are not written to.

        Returns:
            The measurements of the task; with ``returned``, a list of these and of the parts of
            each of the groups, with blobs in place of tensors.

        Raises:
            torch.OutOfMemoryError: The GPU has too little memory. The exception's arguments are the
                message, the backend (None if not yet chosen) and the GPU's memory in bytes.
        """
        self.forget(but=number)
        split = len(task.held_queries)
        sides = [(task.held_queries, inputs[:split]), (task.held_keys, inputs[split:])]
        bytes_in = mapped_bytes = 0
        for ranges, blobs_of_ranges in sides:
            size = sum(blob.nbytes for group in blobs_of_ranges for blob in group)
            bytes_in += size
            mapped_bytes += size * self._stay_in_store(ranges, worker)
        started = seconds = 0.0
        backend = worker.backend

        def computed() -> dict[Group, list[Part]]:
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
            results = of_pass.compute(worker, task, *held)
            self._synchronize()
            seconds = time.perf_counter() - start
            return results

        try:
            found, peak_bytes = measure_peak_bytes(computed, self._device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(str(error), backend, memory_of(self._device)) from error
        for group in kept:
            self._kept[number, group, task.index] = found[group]
        parts = [[(rows, tuple(map(Blob, part))) for rows, part in found[g]] for g in returned]
        report = TaskReport(
            index=task.index,
            pid=os.getpid(),
            device=str(self._device),
            backend=str(backend),
            started=started,
            seconds=seconds,
            peak_bytes=peak_bytes + mapped_bytes,  # the profiler does not count shared memory
            bytes_in=bytes_in,
            bytes_out=sum(
                tensor.nbytes for group in found.values() for _, part in group for tensor in part
            ),
        )
        return [report, *parts] if parts else report

    def merge(
        self,
        number: int,
        group: Group,
        of_pass: Pass,
        dtype: torch.dtype,
        tasks: Sequence[int],
        returned: Sequence[int],
        *parts: list[tuple[slice, tuple[Blob, ...]]],
    ) -> tuple[float, tuple[Blob, ...]]:
        """Merge the parts of all tasks of a group.

        Args:
            number: Number of the run.
            group: The group.
            of_pass: Forward or backward pass.
            dtype: Dtype of the merged tensors; LSEs keep their own.
            tasks: All tasks of the group, in the order of their merge.
            returned: Tasks whose parts other actors have returned.
            parts: These parts.

        Returns:
            Seconds of the merge, and the merged tensors.
        """
        found = dict(zip(returned, parts, strict=True))
        ordered: list[Part] = []
        for task in tasks:
            if task in found:
                ordered += [(rows, tuple(self._load(part))) for rows, part in found[task]]
            else:
                ordered += self._kept.pop((number, group, task))
        start = time.perf_counter()
        merged = []
        for i, tensor in enumerate(ordered[0][1]):
            shape = *tensor.shape[:2], len(group.tokens), *tensor.shape[3:]
            merged.append(self._buffer(i, shape, dtype if tensor.ndim == 4 else tensor.dtype))
        of_pass.merge(ordered, merged)
        self._synchronize()
        return time.perf_counter() - start, tuple(map(Blob, merged))

    def forget(self, but: int | None = None) -> None:
        """Discard the parts of all runs except one."""
        self._kept = {key: parts for key, parts in self._kept.items() if key[0] == but}

    def _load(self, blobs: Sequence[Blob]) -> Iterator[Tensor]:
        return (blob.tensor().to(self._device) for blob in blobs)

    def _make_buffer(self, i: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

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
