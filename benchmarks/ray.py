"""Tasks on Ray actors: the parts of a run, and its time over that of one process."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cqs
from benchmarks.cases import Case
from benchmarks.errors import verify_output
from benchmarks.options import add_common
from benchmarks.publish import publish
from benchmarks.timing import time_by_wall_clock, track
from cqs.problem import Problem
from cqs.report.measurement import Measurement, summarize
from cqs.report.table import percent

_PARTS = {
    "load": "load_seconds",
    "compute": "slowest_seconds",
    "merge": "merge_seconds",
    "unload": "unload_seconds",
    "waiting": "waiting_seconds",
}
"""Parts of a run, which add up to its time, and their names in reports."""
_DRIVER = ("put_seconds", "get_seconds", "overhead")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)


def run(*, tokens: list[int] | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time runs on a private cluster with one actor per GPU, else per core.

    Args:
        tokens: Sequence lengths; ``None`` means 16,384, on GPUs also 65,536 and 131,072.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.
    """
    has_gpu = torch.cuda.is_available()
    if tokens is None:
        tokens = [16384, 65536, 131072] if has_gpu else [16384]
    rows = []
    with cqs.Cluster(object_store_memory=2**34 if has_gpu else None) as cluster:
        for problem, name, num_tasks in _problems(tokens, has_gpu):
            rows.append(_measure(cluster, problem, name, num_tasks, repeats))
    columns: dict[str, Callable[[Measurement], object]] = {
        "case": lambda row: row.case,
        "by": lambda row: row.executor,
        "W": lambda row: row.num_tasks,
        "run ms": lambda row: f"{row.median_ms:.1f}",
        "over one process": lambda row: f"{row.ratio:.2f}",
        **{
            part: lambda row, name=name: f"{1e3 * row.details[name]:.1f}"  # type: ignore[misc]
            for part, name in _PARTS.items()
        },
        "overhead": lambda row: percent(row.details["overhead"]),
    }
    publish(rows, columns, out)


def _problems(tokens: list[int], has_gpu: bool) -> Iterator[tuple[Problem, str, int]]:
    """Yield problems with names and numbers of tasks; on GPUs with tensors of host and GPU."""
    for length in tokens:
        if not has_gpu:
            for is_causal in (False, True):
                kind = "causal" if is_causal else "full"
                problem = Case(kind, length, length, 8, 8, 64, is_causal=is_causal).make()
                for num_tasks in (7, 13):
                    yield problem, f"{kind}-{length}-h8-d64", num_tasks
            continue
        on_host = Case("full", length, length, 16, 16, 128).make(torch.bfloat16)
        tensors = on_host.query, on_host.key, on_host.value
        query, key, value = _to_gpu(tensors)
        on_gpu = replace(on_host, query=query, key=key, value=value)
        for problem, place in ((on_host, "host"), (on_gpu, "gpu")):
            for num_tasks in (1, 7, 13):
                yield problem, f"full-{length}-h16-d128-{place}", num_tasks


def _to_gpu(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def _measure(
    cluster: cqs.Cluster, problem: Problem, name: str, num_tasks: int, repeats: int
) -> Measurement:
    """Time runs on the cluster, each after the same tasks in one process on the same device."""
    tensors = problem.query, problem.key, problem.value
    local = tuple(_to_gpu(tensors)) if torch.cuda.is_available() else tensors
    query, key, value = local
    options: dict[str, Any] = {"is_causal": problem.is_causal, "num_tasks": num_tasks}
    attend = partial(cqs.attention, query, key, value, **options)
    reports, seconds = [], []
    for _ in track(range(repeats + 1), repeats + 1, f"{name}, W = {num_tasks}"):
        seconds.append(time_by_wall_clock(attend)[0])
        future = cluster.submit(*tensors, is_causal=problem.is_causal, num_tasks=num_tasks)
        output = future.result()
        reports.append(future.report)
    assert isinstance(output, Tensor)
    verify_output(problem, output)
    reports, seconds = reports[1:], seconds[1:]  # the first touches fresh shared memory
    details = {
        part: statistics.median(getattr(report, part) for report in reports)
        for part in (*_PARTS.values(), *_DRIVER)
    }
    return Measurement(
        benchmark="ray",
        case=name,
        baseline="one process",
        num_tasks=num_tasks,
        executor=f"ray, {len(cluster.pids)} actors",
        dtype=str(problem.query.dtype).removeprefix("torch."),
        ratio=statistics.median(
            report.seconds / one for report, one in zip(reports, seconds, strict=True)
        ),
        repeats=repeats,
        details=details,
        **summarize([report.seconds for report in reports]),  # type: ignore[arg-type]
    )
