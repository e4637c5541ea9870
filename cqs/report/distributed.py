"""Measurements on the ranks of torchrun, which call :func:`cqs.distributed.attention`."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import cqs.distributed
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.report.local import Measure, Tick
from cqs.report.passes import Backward, Forward, MeasuredPass, bytes_of, make_pass
from cqs.report.rows import RepeatTimes, ScalingRow, make_row
from cqs.report.settings import Settings
from cqs.report.timing import Timer, make_timer, run_in_turn
from cqs.worker.memory import measure_peak_bytes

Item = TypeVar("Item")


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


def is_first() -> bool:
    """Return whether this is the first rank, which requests measurements and writes the report."""
    return os.environ["RANK"] == "0"


@contextmanager
def opened(settings: Settings) -> Iterator[Measure]:
    """Yield the measuring function of the first rank; all other ranks call :func:`serve`.

    The time of all workers is that of the slowest rank, measured from a barrier. One worker and the
    dense call are timed on the first rank while the others wait.
    """
    with _group():
        ranks = _Ranks(settings)

        def measure(num_tasks: int, name: str, tick: Tick) -> ScalingRow:
            _broadcast(name)
            return ranks.measure(name, tick)

        yield measure
        _broadcast("")


def serve(settings: Settings) -> None:
    """Take part in the measurements that the first rank requests, until it has finished."""
    with _group():
        ranks = _Ranks(settings)
        while name := _broadcast(""):
            ranks.measure(name, lambda: None)


@contextmanager
def _group() -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


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


class _Ranks:
    """The measurements of one rank; all ranks call each method together."""

    def __init__(self, settings: Settings):
        """Prepare the measurements.

        Args:
            settings: The problem and the options of its measurement, equal on all ranks.
        """
        self._settings = settings
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._work_of = cache(partial(make_pass, settings))
        self._timer = make_timer()
        signal = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
        self._timer_of_calls = make_timer(lambda: dist.all_reduce(signal))

    def measure(self, name: str, tick: Tick) -> ScalingRow:
        """Verify a pass, measure its memory and time; return the row on every rank.

        Args:
            name: ``"forward"`` or ``"backward"``.
            tick: Called after the verification and after every repeat.
        """
        work = self._work_of(name)
        plan = work.problem.make_plan(self._num_ranks)
        task, call = plan.task(self._rank), self._make_call(work)
        compute = partial(work.compute, task, work.hold(task))
        work.verify(self._assemble(work, call()))
        held = _gather(work.weigh(task, bytes_of(compute())))
        _, call_bytes = measure_peak_bytes(call, work.problem.query.device)
        details = {"call_bytes": float(max(_gather(call_bytes)))}
        tick()
        contenders = {
            "tasks": lambda: self._time(self._timer, compute),
            "whole": lambda: max(self._time(self._timer_of_calls, call)),
            "one": lambda: self._time_on_first(work.one),
            "dense": lambda: self._time_on_first(work.dense),
        }
        turns = [
            RepeatTimes(transfer=found["whole"] - max(found["tasks"]), **found)
            for found in run_in_turn(contenders, self._settings.repeats, tick)
        ]
        return make_row(
            self._settings,
            name,
            plan,
            turns=turns,
            held=held,
            num_devices=self._num_ranks,
            details=details,
        )

    @property
    def _rows(self) -> slice:
        """The token positions of this rank's shard."""
        tokens = self._settings.tokens
        return slice(*(tokens * rank // self._num_ranks for rank in (self._rank, self._rank + 1)))

    def _make_call(self, work: MeasuredPass) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that computes the pass for this rank's shard."""
        problem, is_backward = work.problem, isinstance(work, Backward)
        shards = [
            tensor[:, :, self._rows].clone().requires_grad_(is_backward)
            for tensor in (problem.query, problem.key, problem.value)
        ]

        def attend() -> tuple[Tensor, ...]:
            answer = cqs.distributed.attention(
                *shards,
                is_causal=problem.is_causal,
                pattern=problem.pattern,
                head_parallel=1,
                return_lse=True,
            )
            assert isinstance(answer, tuple)
            return answer

        if not isinstance(work, Backward):
            return attend
        output, grad_output = attend()[0], work.grad_output[:, :, self._rows]
        return lambda: torch.autograd.grad(output, shards, grad_output, retain_graph=True)

    def _assemble(self, work: MeasuredPass, shards: Sequence[Tensor]) -> Partial | Gradients:
        """Return the whole result, given the result of this rank's shard."""
        found = []
        for shard in shards:
            shape = (*shard.shape[:2], self._settings.tokens, *shard.shape[3:])
            whole = shard.new_zeros(shape, dtype=lse_dtype(shard.dtype))
            whole[:, :, self._rows] = shard.detach()
            dist.all_reduce(whole)
            found.append(whole.to(shard.dtype))
        return Partial(*found) if isinstance(work, Forward) else Gradients(*found)

    def _time(self, timer: Timer, compute: Callable[[], object]) -> list[float]:
        """Return the seconds of every rank, measured from a barrier."""
        dist.barrier()
        return _gather(timer.time(compute)[0])

    def _time_on_first(self, compute: Callable[[], object]) -> float:
        """Return the seconds of the first rank while the others wait."""
        return _broadcast(self._timer.time(compute)[0] if self._rank == 0 else 0.0)
