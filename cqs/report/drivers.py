"""Drivers of measurements: tasks in this process, on a Ray cluster and on torchrun's ranks."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import cqs
import cqs.distributed
from cqs.executors.ray import RunReport
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.report.passes import MeasuredPass
from cqs.report.rows import RepeatTimes, ScalingRow, TaskBytes, make_row
from cqs.report.settings import Settings
from cqs.report.timing import Timer, make_timer, run_in_turn
from cqs.scheduler import Plan
from cqs.worker.memory import measure_peak_bytes

Item = TypeVar("Item")
Compute = Callable[[], Any]

PARTS = ("before_seconds", "slowest_seconds", "between_seconds", "after_seconds")
"""Attributes of :class:`cqs.executors.ray.RunReport` that are details of rows."""


class Driver(ABC):
    """Measures the tasks of one problem."""

    max_devices = sys.maxsize
    """Most devices that compute at the same time."""

    def __init__(self, settings: Settings):
        """Prepare the measurements.

        Args:
            settings: The problem and the options of its measurement.
        """
        self.settings = settings
        self._work_of = cache(partial(MeasuredPass, settings))
        self._timer = make_timer()

    def measure(
        self, num_tasks: int, name: str, tick: Callable[[], object] = lambda: None
    ) -> ScalingRow:
        """Verify and measure a pass.

        Args:
            num_tasks: Number of tasks.
            name: ``"forward"`` or ``"backward"``.
            tick: Called after the verification and after every repeat.

        Raises:
            VerificationError: The merged result of all tasks is wrong.
        """
        work = self._work_of(name)
        plan = work.problem.make_plan(num_tasks)
        held = self._check(work, plan)
        tick()
        computations = {
            "one": lambda: self._time_one(work),
            "dense": lambda: self._seconds(work.dense),
            "all": lambda: self._time_all(work, plan),
        }
        found = run_in_turn(computations, self.settings.repeats, tick)
        turns = [RepeatTimes(**seconds.pop("all"), **seconds) for seconds in found]
        num_devices = min(self.max_devices, num_tasks)
        return make_row(self.settings, name, plan, turns=turns, held=held, num_devices=num_devices)

    def agree(self, keys: Sequence[Item]) -> Sequence[Item]:
        """Return the keys of the rows to measure, which the first of several ranks decides."""
        return keys

    @abstractmethod
    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        """Verify the merged result of all tasks, and measure the memory of each task."""

    @abstractmethod
    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        """Return the fields of RepeatTimes except ``one`` and ``dense``."""

    def _time_one(self, work: MeasuredPass) -> float:
        """Return the seconds of one worker."""
        return self._seconds(work.one)

    def _seconds(self, compute: Compute) -> float:
        return self._timer.time(compute)[0]


class LocalDriver(Driver):
    """Times each task alone on the device of this process, without communication."""

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        results = [work.compute(task, work.hold(task)) for task in plan.tasks]
        work.verify(work.merger(plan, results)())
        del results
        return [work.weigh(task) for task in plan.tasks]

    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        timed = [
            self._timer.time(partial(work.compute, task, work.hold(task))) for task in plan.tasks
        ]
        seconds, results = zip(*timed, strict=True)
        return {"tasks": seconds, "merge": self._seconds(work.merger(plan, results))}


class RayDriver(Driver):
    """Times whole calls on a Ray cluster, from tensors on the driver to the result there.

    The time of one worker is that of a call with one task.
    """

    def __init__(self, settings: Settings, cluster: cqs.Cluster):
        """Prepare measurements on a cluster."""
        super().__init__(settings)
        self._make_executor, self.max_devices = cluster.make_executor, len(cluster.pids)

    def _run(self, work: MeasuredPass, plan: Plan) -> tuple[Any, RunReport]:
        executor = self._make_executor()
        return work.run(executor, plan), executor.reports[0]

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        result, report = self._run(work, plan)
        work.verify(result)
        return [
            TaskBytes(
                predicted=work.predict_bytes(plan.task(task.index), task.backend),
                peak=task.peak_bytes,
                received=task.bytes_in,
                returned=task.bytes_out,
            )
            for task in report.tasks
        ]

    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        report = self._run(work, plan)[1]
        return {
            "tasks": [task.seconds for task in report.tasks],
            "whole": report.seconds,
            "merge": report.merge_seconds,
            "transfer": report.seconds - report.slowest_seconds,
            "details": {
                "actors": self.max_devices,
                **{part: getattr(report, part) for part in PARTS},
            },
        }

    def _time_one(self, work: MeasuredPass) -> float:
        return self._run(work, work.plan_of_one)[1].seconds


class RankDriver(Driver):
    """Times :func:`cqs.distributed.attention` on the ranks of a group, which all measure together.

    The time of all workers is that of the slowest rank, measured from a barrier. One worker and the
    dense call are timed on the first rank while the others wait.
    """

    def __init__(self, settings: Settings):
        """Prepare measurements of one task per rank of the default group."""
        super().__init__(settings)
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        tokens = settings.tokens
        self._rows = slice(*(tokens * i // num_ranks for i in (self._rank, self._rank + 1)))
        signal = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
        self._timer_of_calls = make_timer(lambda: dist.all_reduce(signal))

    def agree(self, keys: Sequence[Item]) -> Sequence[Item]:
        """Return the keys of the first rank."""
        return _broadcast(keys)

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        self._call = self._make_call(work)
        work.verify(self._assemble(work, self._call()))
        held = _gather(work.weigh(plan.task(self._rank)))
        _, call_bytes = measure_peak_bytes(self._call, work.problem.query.device)
        self._call_bytes = float(max(_gather(call_bytes)))
        return held

    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        task = plan.task(self._rank)
        tasks = self._time_ranks(self._timer, partial(work.compute, task, work.hold(task)))
        whole = max(self._time_ranks(self._timer_of_calls, self._call))
        details = {"call_bytes": self._call_bytes}
        return {"tasks": tasks, "whole": whole, "transfer": whole - max(tasks), "details": details}

    def _time_ranks(self, timer: Timer, compute: Compute) -> list[float]:
        """Return the seconds of every rank, measured from a barrier."""
        dist.barrier()
        return _gather(timer.time(compute)[0])

    def _seconds(self, compute: Compute) -> float:
        """Return the seconds of the first rank while the others wait."""
        return _broadcast(super()._seconds(compute) if self._rank == 0 else 0.0)

    def _make_call(self, work: MeasuredPass) -> Compute:
        """Return a function that computes the pass for this rank's shard."""
        problem = work.problem
        shards = [
            tensor[:, :, self._rows].clone().requires_grad_(work.is_backward)
            for tensor in (problem.query, problem.key, problem.value)
        ]

        attend = partial(
            cqs.distributed.attention,
            *shards,
            is_causal=problem.is_causal,
            pattern=problem.pattern,
            head_parallel=1,
            return_lse=True,
        )
        if not work.is_backward:
            return attend
        output, grad_output = attend()[0], work.grad_output[:, :, self._rows]
        return lambda: torch.autograd.grad(output, shards, grad_output, retain_graph=True)

    def _assemble(self, work: MeasuredPass, shards: Sequence[Tensor]) -> Partial | Gradients:
        """Return the whole result, given the result of this rank's shard."""
        found = []
        for shard in shards:
            shape = (*shard.shape[:2], self.settings.tokens, *shard.shape[3:])
            whole = shard.new_zeros(shape, dtype=lse_dtype(shard.dtype))
            whole[:, :, self._rows] = shard.detach()
            dist.all_reduce(whole)
            found.append(whole.to(shard.dtype))
        return Gradients(*found) if work.is_backward else Partial(*found)


@contextmanager
def open_driver(
    settings: Settings, num_actors: int | None = None, address: str | None = None
) -> Iterator[Driver]:
    """Yield the driver of an executor, with its Ray cluster or its process group.

    Args:
        settings: The problem and the options of its measurement.
        num_actors: Number of Ray actors; ``None`` means one per GPU or core, see
            :class:`cqs.Cluster`.
        address: Address of a running Ray cluster; ``None`` starts a private Ray.
    """
    match settings.executor:
        case "ray":
            with cqs.Cluster(num_actors, address=address) as cluster:
                yield RayDriver(settings, cluster)
        case "distributed":
            device = None
            if torch.cuda.is_available():
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device else "gloo", device_id=device)
            try:
                yield RankDriver(settings)
            finally:
                dist.destroy_process_group()
        case _:
            yield LocalDriver(settings)


def _broadcast(item: Item) -> Item:
    """Return the item of rank 0 on every rank."""
    box = [item]
    dist.broadcast_object_list(box)
    return box[0]


def _gather(item: Item) -> list[Item]:
    """Gather the items of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found
