"""The class of the actors, which the pool makes remote."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.pool import ActorInfo
from cqs.executors.ray.session import import_ray
from cqs.executors.ray.shards.actor import ShardActor
from cqs.executors.ray.tasks import job
from cqs.executors.ray.tasks.inputs import Inputs, Sent
from cqs.executors.ray.tasks.job import MergeCall, RunSettings, TaskCall, TaskResults
from cqs.executors.ray.tasks.report import MergeReport, TaskReport
from cqs.executors.ray.tasks.shared_memory import SharedMemory
from cqs.executors.streaming.transfers import DeviceCopies, GpuCopies
from cqs.tiler.group import GroupPart
from cqs.version import __version__
from cqs.worker.environment import describe_environment
from cqs.worker.memory import measure_peak_bytes, memory_of


class TaskActor(ShardActor):
    """Computes tasks on one device, merges groups, and holds shards there."""

    def __init__(self, use_gpu: bool, num_threads: int):
        """Choose the device and warm up the memory measurement.

        Args:
            use_gpu: Compute on the GPU that Ray assigned to this process, if there is one.
            num_threads: Number of CPU threads of PyTorch.
        """
        device = torch.device("cuda" if use_gpu and torch.cuda.is_available() else "cpu")
        super().__init__(device)
        torch.set_num_threads(num_threads)
        self._ray = import_ray()
        self._node = str(self._ray.get_runtime_context().get_node_id())
        self._inputs = Inputs((GpuCopies if self._is_on_gpu else DeviceCopies)(device))
        self._number = -1
        """Number of the current run."""
        self._exported = SharedMemory(device)
        """Parts of the current run, which other actors read."""
        self._backend: str | None = None
        """Name of the backend of the current task."""
        measure_peak_bytes(lambda: torch.ones(1, device=device), device)  # warm up

    def describe(self) -> ActorInfo:
        """Return process, node, device and version; answers as soon as the actor has started."""
        memory = memory_of(self._device) if self._is_on_gpu else None
        environment = describe_environment(self._device.type)
        device = str(self._device)
        return ActorInfo(os.getpid(), self._node, device, memory, __version__, environment)

    def run(
        self, settings: RunSettings, calls: Sequence[TaskCall], num_queries: int, *sent: Sent
    ) -> Any:
        """Compute tasks, and let other actors read their results.

        Args:
            settings: The run. Inputs and parts of earlier runs are discarded.
            calls: The tasks.
            num_queries: Number of elements of ``sent`` with tensors of queries.
            sent: Tensors of the queries, then of the keys, with all tokens that the tasks hold.

        Returns:
            For each task its measurements, the gradients of its score terms, and its parts by group
            as in :class:`MergeCall`.

        Raises:
            torch.OutOfMemoryError: The GPU has too little memory. The exception's arguments are the
                message, the index of the task, the backend (None if not yet chosen) and the GPU's
                memory in bytes.
            MemoryNotSharedError: Memory of the driver, of its host or GPU, cannot be accessed.
        """
        self._begin(settings.number)
        sides = sent[:num_queries], sent[num_queries:]
        begun, answers = time.time(), []
        for call in calls:
            try:
                report, results, sums = self._run_task(settings, call, sides, begun)
            except torch.OutOfMemoryError as error:
                arguments = str(error), call.task.index, self._backend, memory_of(self._device)
                self.forget(closes=True)
                raise torch.OutOfMemoryError(*arguments) from error
            parts = {group: self._export(settings, results[group]) for group in call.groups}
            begun = time.time()
            answers.append((report, tuple(map(Blob, sums)), parts))
        self._synchronize()  # other actors may read the parts once this call is answered
        return answers

    def merge(
        self, settings: RunSettings, calls: Sequence[MergeCall]
    ) -> tuple[MergeReport, list[tuple[Blob, ...]]]:
        """Merge the parts of all tasks of some groups.

        Args:
            settings: The run.
            calls: The groups.

        Returns:
            The measurements, and the merged tensors of each group: none where tensors of the driver
            were written to.

        Raises:
            MemoryNotSharedError: Memory of the driver, or of another actor that may have failed,
                cannot be accessed. All groups can be merged again.
            ray.exceptions.ObjectLostError: An actor whose parts are in the object store has failed.
        """
        self._begin(settings.number)
        started, start = time.time(), time.perf_counter()
        merged = [self._merge_group(settings, call) for call in calls]
        self._synchronize()
        middle = time.perf_counter()
        blobs = [tuple(map(Blob, tensors)) for tensors in merged]
        end = time.perf_counter()
        return MergeReport(os.getpid(), self._node, started, middle - start, end - middle), blobs

    def forget(self, closes: bool) -> None:
        """Discard inputs, parts and results of the current run.

        Args:
            closes: Also close memory of other processes, and free memory that they may have open.
        """
        self._begin(-1)
        if closes:
            self._inputs.close()
            self._exported = SharedMemory(self._device)

    def _begin(self, number: int) -> None:
        """Discard inputs and parts of earlier runs."""
        if self._number != number:
            self._number = number
            self._inputs.clear()
            self._exported.clear()

    def _run_task(
        self,
        settings: RunSettings,
        call: TaskCall,
        sides: Sequence[Sequence[Sent]],
        begun: float,
    ) -> tuple[TaskReport, TaskResults, list[Tensor]]:
        """Compute one task.

        Args:
            settings: The run.
            call: The task, and the groups for which its results are needed.
            sides: Tensors of the queries, and of the keys, with all tokens that the task holds.
            begun: Time at which this process began to load them, in seconds since the epoch.

        Returns:
            The measurements, the parts by group, and the gradients of the score terms.
        """
        task, worker = call.task, settings.worker
        terms = job.terms_of_task(settings, call, self._device)
        worker = replace(worker, terms=terms)
        ranges = task.held_queries, task.held_keys
        self._backend = worker.backend

        def compute() -> tuple[TaskResults, float, float, int, int]:
            held, num_bytes, beside = [], 0, 0
            must_join = self._is_on_gpu or worker.pattern is not None
            for is_of_keys, own in zip((False, True), ranges, strict=True):
                tokens, uncounted = self._inputs.hold(
                    own, is_of_keys=is_of_keys, must_join=must_join
                )
                held.append(tokens)
                num_bytes += sum(tensor.nbytes for tensor in tokens)
                beside += uncounted
            (query, *rest), (key, value) = held
            tensors = query.sample, key.sample, value.sample
            self._backend = worker.choose_backend(*tensors, task.steps).name
            self._synchronize()
            started, start = time.time(), time.perf_counter()
            with torch.no_grad():  # tensors of a score function may require gradients
                results = settings.task_pass.compute(
                    worker, task, call.groups, query, key, value, *rest
                )
            self._synchronize()
            return results, started, time.perf_counter() - start, num_bytes, beside

        for is_of_keys, own in zip((False, True), ranges, strict=True):
            self._inputs.load(sides[is_of_keys], own, is_of_keys=is_of_keys)
        measured, peak_bytes = measure_peak_bytes(compute, self._device)
        results, started, seconds, num_bytes, beside = measured
        if not (settings.keeps_inputs and self._is_on_gpu):
            self._inputs.clear()
        report = TaskReport(
            index=task.index,
            pid=os.getpid(),
            node=self._node,
            device=str(self._device),
            backend=str(self._backend),
            load_seconds=started - begun,
            started=started,
            seconds=seconds,
            peak_bytes=peak_bytes + beside,
            bytes_in=num_bytes,
            bytes_out=job.count_bytes(results),
        )
        return report, results, job.sums_of_task(terms, call)

    def _merge_group(self, settings: RunSettings, call: MergeCall) -> list[Tensor]:
        """Merge a group, and return the tensors unless they are those of the driver."""
        ordered: list[GroupPart] = []
        for sent in call.parts:
            parts = self._ray.get(sent) if isinstance(sent, self._ray.ObjectRef) else sent
            ordered += [(rows, tuple(map(self._inputs.bring, part))) for rows, part in parts]
        tokens, specs = call.group.tokens, settings.results[call.group.is_of_keys]
        shared = [] if call.is_repeated else [spec.shared for spec in specs if spec.shared]
        places = [self._inputs.tensor(t)[:, :, tokens.start : tokens.stop] for t in shared]
        if places and places[0].device.type == self._device.type:
            settings.task_pass.merge(ordered, places)
            return []
        shapes = [(*spec.shape[:2], len(tokens), *spec.shape[3:]) for spec in specs]
        new = partial(torch.empty, device=self._device)
        results = [new(s, dtype=spec.dtype) for s, spec in zip(shapes, specs, strict=True)]
        settings.task_pass.merge(ordered, results)
        for place, result in zip(places, results, strict=False):
            for index in product(*map(range, place.shape[:2])):  # a head's rows are adjacent
                place[index].copy_(result[index], non_blocking=True)
        return [] if places else results

    def _export(self, settings: RunSettings, parts: Sequence[GroupPart]) -> Any:
        """Return where other actors find parts: locations, or a reference in the object store."""
        if settings.shares_parts:
            tensors = [tensor for _, part in parts for tensor in part]
            with suppress(OSError, RuntimeError):  # memory is short, or has no handle
                places = self._exported.allocate(tensors)
                for (place, _), tensor in zip(places, tensors, strict=True):
                    place.copy_(tensor)
                locations = iter([location for _, location in places])
                return [(rows, tuple(next(locations) for _ in part)) for rows, part in parts]
        return self._ray.put([(rows, tuple(map(Blob, part))) for rows, part in parts])

    def _synchronize(self) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)
