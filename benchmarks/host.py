"""Host time of calls: the time of the calling thread, without the time in which it waits."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import cqs.distributed
from benchmarks.errors import verify_output
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.ranks import join_ranks
from cqs.problem import check_problem
from cqs.report.measurement import Measurement

_NUM_CALLS = 50
"""Calls of a repeat, whose mean is the time of the repeat."""
_BASELINE = "scaled_dot_product_attention"

Attend = Callable[..., Any]
"""Takes query, key and value, and returns the output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time calls so short that their computation vanishes.

    Under torchrun, ``N ranks`` is :func:`cqs.distributed.attention` of all ranks, whose shards have
    the length of the local calls. On a CPU times are those of the calling thread; on a GPU they are
    from the call to its return, without a wait for the GPU.

    Args:
        tokens: Length of a shard; ``None`` means 16.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.

    Raises:
        VerificationError: A result is wrong.
    """
    on_gpu, is_rank = torch.cuda.is_available(), "RANK" in os.environ
    device = join_ranks() if is_rank else torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    calls: dict[str, Attend] = {
        _BASELINE: F.scaled_dot_product_attention,
        "local": cqs.attention,
    }
    num_ranks, rank = 1, 0
    if is_rank:
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        calls[f"{num_ranks} ranks"] = cqs.distributed.attention
    generator, length = torch.Generator(device).manual_seed(0), tokens or 16
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = 1, 8, length * num_ranks, 64
    whole = [torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(3)]
    rows = slice(rank * length, (rank + 1) * length)
    shards = [tensor[:, :, rows].contiguous() for tensor in whole]
    for name, attend in calls.items():
        if name == "local":
            verify_output(check_problem(*shards), attend(*shards))
        elif name != _BASELINE:
            numbers = torch.arange(rows.start, rows.stop, device=device)
            verify_output(check_problem(*whole), attend(*shards), numbers)
    found = [
        row
        for name, run_pass in _passes(shards).items()
        for row in _measure(
            name, {by: partial(run_pass, call) for by, call in calls.items()}, repeats, length
        )
    ]
    if rank == 0:
        publish(found, make_columns("over_us"), out)
    if is_rank:
        dist.destroy_process_group()


def _passes(shards: list[Tensor]) -> dict[str, Callable[[Attend], object]]:
    """Return by name the passes of a call."""
    recorded = [tensor.clone().requires_grad_() for tensor in shards]
    grad_output = torch.randn_like(shards[0])

    def differentiate(attend: Attend) -> object:
        return torch.autograd.grad(attend(*recorded), recorded, grad_output)

    return {
        "forward": lambda attend: attend(*shards),
        "forward, recorded": lambda attend: attend(*recorded),
        "forward + backward": differentiate,
    }


def _measure(
    name: str, computations: Mapping[str, Callable[[], object]], repeats: int, length: int
) -> list[Measurement]:
    """Time one pass of all calls in turn; the ranks make the same calls in one order."""
    seconds: dict[str, list[float]] = {by: [] for by in computations}
    for _ in range(repeats + 1):
        for by, compute in computations.items():
            seconds[by].append(_time(compute))
    times = {by: each[1:] for by, each in seconds.items()}  # the first repeat warms caches
    baseline = statistics.median(times[_BASELINE])
    return [
        make_row(
            of_repeats,
            "bfloat16" if torch.cuda.is_available() else "float32",
            benchmark=f"host {name}",
            case=f"full-{length}-h8-d64",
            baseline=_BASELINE,
            num_tasks=int(by.split()[0]) if by.endswith("ranks") else 1,
            executor=by,
            ratio=times[_BASELINE],
            details={"over_us": 1e6 * (statistics.median(of_repeats) - baseline)},
        )
        for by, of_repeats in times.items()
    ]


def _time(compute: Callable[[], object]) -> float:
    """Return the mean seconds of the calling thread in a call."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.thread_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(_NUM_CALLS):
        compute()
    return (clock() - start) / _NUM_CALLS
