"""Tasks on Ray actors: the parts of a run, and its time relative to one process."""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cqs
from benchmarks.cases import Case
from benchmarks.errors import verify_close, verify_output
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.sharded import killing
from benchmarks.timing import time_by_wall_clock, track
from cqs.executors.verify import VerificationError
from cqs.problem import Problem
from cqs.report.measurement import Measurement, append_rows

_PARTS = {
    "load": "load_seconds",
    "compute": "slowest_seconds",
    "merge": "merge_seconds",
    "unload": "unload_seconds",
    "waiting": "waiting_seconds",
}
"""Parts of a run in reports, which add up to its time, and their names in rows."""
_DRIVER = ("put_seconds", "get_seconds", "overhead")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)


def run(*, tokens: list[int] | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time runs on a private cluster with one actor per GPU, else per core.

    Each problem is also computed with gradients, and with a worker that is killed. With tensors of
    the host, actors on GPUs are timed forward only.

    Args:
        tokens: Sequence lengths; ``None`` means 16,384, on GPUs also 65,536 and 131,072.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.

    Raises:
        VerificationError: Sampled rows deviate from float64, gradients from those of one process,
            or a result is not bitwise identical after a failure.
    """
    has_gpu = torch.cuda.is_available()
    if tokens is None:
        tokens = [16384, 65536, 131072] if has_gpu else [16384]
    rows: list[Measurement] = []
    with cqs.Cluster(object_store_memory=2**34 if has_gpu else None) as cluster:
        executor = f"ray, {len(cluster.pids)} actors"
        numbers = {1, len(cluster.pids), 7, 13, 31} if has_gpu else {7, 13}
        for problem, name in _problems(tokens, has_gpu):
            measurements = [(_measure, number) for number in sorted(numbers)]
            if problem.query.is_cuda == has_gpu:
                measurements += [(_measure_training, number) for number in sorted(numbers)]
                measurements.append((_measure_failures, 13))
            for measure, num_tasks in measurements:
                row = measure(cluster, problem, name, num_tasks, repeats)
                rows.append(replace(row, executor=executor))
                append_rows(rows[-1:], out)
    publish(rows, make_columns(*_PARTS.values(), "overhead"), None)


def _problems(tokens: list[int], has_gpu: bool) -> Iterator[tuple[Problem, str]]:
    """Yield problems and their names, non-causal and causal; on GPUs also tensors of the host."""
    for length in tokens:
        heads, head_dim = (16, 128) if has_gpu else (8, 64)
        dtype = torch.bfloat16 if has_gpu else torch.float32
        problem = Case("full", length, length, heads, heads, head_dim).make(dtype)
        shape = f"{length}-h{heads}-d{head_dim}"
        if has_gpu:
            yield problem, f"full-{shape}-host"
            shape += "-gpu"
            query, key, value = _to_device(problem)
            problem = replace(problem, query=query, key=key, value=value)
        yield problem, f"full-{shape}"
        yield replace(problem, is_causal=True), f"causal-{shape}"


def _to_device(problem: Problem) -> list[Tensor]:
    """Return query, key and value, on the GPU if there is one."""
    tensors = [problem.query, problem.key, problem.value]
    return [tensor.cuda() for tensor in tensors] if torch.cuda.is_available() else tensors


def _measure(
    cluster: cqs.Cluster, problem: Problem, name: str, num_tasks: int, repeats: int
) -> Measurement:
    """Time runs on the cluster, each after the same tasks in one process on the same device."""
    tensors = problem.query, problem.key, problem.value
    options: dict[str, Any] = {"is_causal": problem.is_causal, "num_tasks": num_tasks}
    query, key, value = _to_device(problem)
    attend = partial(cqs.attention, query, key, value, **options)
    reports, seconds = [], []
    for _ in track(range(repeats + 1), repeats + 1, f"{name}, W = {num_tasks}"):
        seconds.append(time_by_wall_clock(attend)[0])
        future = cluster.submit(*tensors, **options)
        output = future.result()
        reports.append(future.report)
    assert isinstance(output, Tensor)
    verify_output(problem, output)
    reports, seconds = reports[1:], seconds[1:]  # the first touches fresh shared memory
    details = {
        name: statistics.median(getattr(report, name) for report in reports) for name in _DRIVER
    } | {
        name: statistics.median(report.slowest[part] for report in reports)
        for part, name in _PARTS.items()
    }
    row = _row("ray", name, problem, num_tasks, [report.seconds for report in reports], seconds)
    return replace(row, details=details)


def _measure_training(
    cluster: cqs.Cluster, problem: Problem, name: str, num_tasks: int, repeats: int
) -> Measurement:
    """Time forward and backward passes on the cluster, each after those of one process."""
    leaves = [tensor.detach().requires_grad_() for tensor in _to_device(problem)]
    weights = torch.randn_like(leaves[0])
    found: dict[str, list[float]] = {"one process": [], "cluster": []}
    gradients: dict[str, tuple[Tensor, ...]] = {}

    def differentiate(attend: Callable[..., Any]) -> tuple[Tensor, ...]:
        output = attend(*leaves, is_causal=problem.is_causal, num_tasks=num_tasks)
        return torch.autograd.grad(output, leaves, weights)

    for _ in track(range(repeats + 1), repeats + 1, f"{name}, training, W = {num_tasks}"):
        for way, attend in (("one process", cqs.attention), ("cluster", cluster.attention)):
            seconds, gradients[way] = time_by_wall_clock(partial(differentiate, attend))
            found[way].append(seconds)
    for which, *pair in zip(("query", "key", "value"), *gradients.values(), strict=True):
        verify_close(f"the gradient of {which}", pair[1], pair[0])
    of_cluster, of_one = found["cluster"][1:], found["one process"][1:]
    return _row("ray both", name, problem, num_tasks, of_cluster, of_one)


def _measure_failures(
    cluster: cqs.Cluster, problem: Problem, name: str, num_tasks: int, repeats: int
) -> Measurement:
    """Time runs in which a worker is killed; results must be those of an undisturbed run."""
    attend = partial(
        cluster.attention,
        problem.query,
        problem.key,
        problem.value,
        is_causal=problem.is_causal,
        num_tasks=num_tasks,
    )
    attend()
    undisturbed, expected = time_by_wall_clock(attend)
    draw = random.Random(0)
    found: list[float] = []
    num_workers = len(cluster.pids)
    while len(found) < repeats:
        victim = draw.choice(cluster.pids)
        with killing([victim], draw.uniform(0, undisturbed)):
            seconds, output = time_by_wall_clock(attend)
            was_killed = victim not in cluster.pids
        if not torch.equal(output, expected):
            raise VerificationError("the result is not bitwise identical after a worker was killed")
        if was_killed:
            found.append(seconds)
        while len(cluster.pids) < num_workers:
            attend()  # a replacement joins at a call
    row = _row("ray failure", name, problem, num_tasks, found, [undisturbed] * len(found))
    return replace(row, baseline="undisturbed")


def _row(
    benchmark: str,
    name: str,
    problem: Problem,
    num_tasks: int,
    seconds: list[float],
    seconds_of_one: list[float],
) -> Measurement:
    return make_row(
        seconds,
        problem.query.dtype,
        benchmark=benchmark,
        case=name,
        baseline="one process",
        num_tasks=num_tasks,
        executor="ray",
        ratio=seconds_of_one,
    )
