"""Drivers of measurements: tasks in this process, on a Ray cluster and on torchrun's ranks."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import cqs
import cqs.distributed
from cqs.executors.ray import RunReport
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.report.passes import MeasuredPass
from cqs.report.rows import RepeatTimes, ScalingRow, TaskBytes, make_row, median_seconds
from cqs.report.settings import Settings
from cqs.report.timing import make_timer, run_in_turn
from cqs.scheduler import Plan
from cqs.worker.memory import measure_peak_bytes

Item = TypeVar("Item")
Compute = Callable[[], Any]
Rounds = Sequence[Mapping[str, Any]]
"""What each computation returned, by name, in every repeat."""

_PARTS = ("before_seconds", "slowest_seconds", "between_seconds", "after_seconds")
"""Attributes of :class:`cqs.executors.ray.RunReport` whose medians are reported."""


class Driver(ABC):
    """Measures the tasks of one problem."""

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
            "one": lambda: self._seconds(work.one),
            "dense": lambda: self._seconds(work.dense),
            **self._computations(work, plan),
        }
        rounds = list(run_in_turn(computations, self.settings.repeats, tick))
        return make_row(
            self.settings,
            name,
            plan,
            turns=self._turns(plan, rounds),
            held=held,
            num_devices=self._num_devices(plan),
            details=self._details(rounds),
        )

    @abstractmethod
    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        """Verify the merged result of all tasks, and measure the memory of each task."""

    @abstractmethod
    def _computations(self, work: MeasuredPass, plan: Plan) -> dict[str, Compute]:
        """Return the timed computations by name, besides or instead of ``one`` and ``dense``."""

    @abstractmethod
    def _turns(self, plan: Plan, rounds: Rounds) -> list[RepeatTimes]:
        """Return the times of every repeat."""

    def agree(self, keys: Sequence[Item]) -> Sequence[Item]:
        """Return the keys of the rows to measure, which the first of several ranks decides."""
        return keys

    def _num_devices(self, plan: Plan) -> int:
        """Return the number of devices that compute at the same time."""
        return plan.num_tasks

    def _details(self, rounds: Rounds) -> dict[str, float]:
        """Return further measurements by name."""
        return {}

    def _seconds(self, compute: Compute) -> float:
        return self._timer.time(compute)[0]


class LocalDriver(Driver):
    """Times each task alone on the device of this process.

    The time of all workers is that of the slowest task plus 1/W of the merge, which W devices would
    share. There is no communication.
    """

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        results = [work.compute(task, work.hold(task)) for task in plan.tasks]
        work.verify(work.merger(plan, results)())
        del results
        return [work.weigh(task) for task in plan.tasks]

    def _computations(self, work: MeasuredPass, plan: Plan) -> dict[str, Compute]:
        return {"tasks": lambda: self._time_tasks(work, plan)}

    def _time_tasks(self, work: MeasuredPass, plan: Plan) -> tuple[list[float], float]:
        """Return the seconds of every task, and of the merge of their results."""
        timed = [
            self._timer.time(partial(work.compute, task, work.hold(task))) for task in plan.tasks
        ]
        seconds, results = zip(*timed, strict=True)
        return list(seconds), self._seconds(work.merger(plan, results))

    def _turns(self, plan: Plan, rounds: Rounds) -> list[RepeatTimes]:
        medians = median_seconds([found["tasks"][0] for found in rounds])
        slowest = medians.index(max(medians))
        turns = []
        for found in rounds:
            seconds, merge = found["tasks"]
            whole = seconds[slowest] + merge / plan.num_tasks
            turns.append(RepeatTimes(seconds, found["one"], found["dense"], whole, merge))
        return turns


class RayDriver(Driver):
    """Times whole calls on a Ray cluster, from tensors on the driver to the result there.

    The time of one worker is that of a call with one task.
    """

    def __init__(self, settings: Settings, cluster: cqs.Cluster):
        """Prepare measurements on a cluster."""
        super().__init__(settings)
        self._executor, self._num_actors = cluster.make_executor, len(cluster.pids)

    def _run(self, work: MeasuredPass, plan: Plan) -> tuple[Any, RunReport]:
        executor = self._executor()
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

    def _computations(self, work: MeasuredPass, plan: Plan) -> dict[str, Compute]:
        return {
            "all": lambda: self._run(work, plan)[1],
            "one": lambda: self._run(work, work.plan_of_one)[1].seconds,
        }

    def _turns(self, plan: Plan, rounds: Rounds) -> list[RepeatTimes]:
        return [
            RepeatTimes(
                [task.seconds for task in found["all"].tasks],
                one=found["one"],
                dense=found["dense"],
                whole=found["all"].seconds,
                merge=found["all"].merge_seconds,
                transfer=found["all"].seconds - found["all"].slowest_seconds,
            )
            for found in rounds
        ]

    def _num_devices(self, plan: Plan) -> int:
        return min(self._num_actors, plan.num_tasks)

    def _details(self, rounds: Rounds) -> dict[str, float]:
        parts = {part: [getattr(found["all"], part) for found in rounds] for part in _PARTS}
        medians = {part: median(seconds) for part, seconds in parts.items()}
        return {"actors": self._num_actors, **medians}


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

    def _computations(self, work: MeasuredPass, plan: Plan) -> dict[str, Compute]:
        task = plan.task(self._rank)
        compute = partial(work.compute, task, work.hold(task))

        def seconds(timer: Any, compute: Compute) -> list[float]:
            """Return the seconds of every rank, measured from a barrier."""
            dist.barrier()
            return _gather(timer.time(compute)[0])

        return {
            "tasks": lambda: seconds(self._timer, compute),
            "whole": lambda: max(seconds(self._timer_of_calls, self._call)),
        }

    def _turns(self, plan: Plan, rounds: Rounds) -> list[RepeatTimes]:
        return [
            RepeatTimes(**found, transfer=found["whole"] - max(found["tasks"])) for found in rounds
        ]

    def _details(self, rounds: Rounds) -> dict[str, float]:
        return {"call_bytes": self._call_bytes}

    def _seconds(self, compute: Compute) -> float:
        """Return the seconds of the first rank while the others wait."""
        return _broadcast(super()._seconds(compute) if self._rank == 0 else 0.0)

    def _make_call(self, work: MeasuredPass) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that computes the pass for this rank's shard."""
        problem = work.problem
        shards = [
            tensor[:, :, self._rows].clone().requires_grad_(work.is_backward)
            for tensor in (problem.query, problem.key, problem.value)
        ]

        def attend() -> Any:
            return cqs.distributed.attention(
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


def num_ranks() -> int:
    """Return the number of ranks that torchrun started.

    Raises:
        ValueError: torchrun did not start this process.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "executor 'distributed' must be started by torchrun, one process per GPU: "
            "torchrun --nproc-per-node 4 -m cqs report --executor distributed"
        )
    return int(os.environ["WORLD_SIZE"])


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
