"""Overhead of Ray: all time of a run except the slowest actor's computation."""

import argparse
import statistics
from collections.abc import Callable

import torch

import cqs
from benchmarks.cases import Case
from benchmarks.errors import verify_output
from benchmarks.options import add_common
from benchmarks.publish import publish
from benchmarks.timing import track
from cqs.report.measurement import Measurement, summarize
from cqs.report.table import percent

_NUM_TASKS = (7, 13)
_PARTS = ("before_seconds", "slowest_seconds", "between_seconds", "after_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time runs on a private cluster with one actor per GPU, else per core.

    Args:
        tokens: Sequence length; ``None`` means 16,384.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.
    """
    tokens = tokens or 16384
    rows = []
    with cqs.Cluster() as cluster:
        for is_causal in (False, True):
            kind = "causal" if is_causal else "full"
            problem = Case(kind, tokens, tokens, 8, 8, 64, is_causal=is_causal).make()
            tensors = problem.query, problem.key, problem.value
            for num_tasks in _NUM_TASKS:
                reports = []
                label = f"{kind}, W = {num_tasks}"
                for _ in track(range(repeats + 1), repeats + 1, label):
                    future = cluster.submit(*tensors, is_causal=is_causal, num_tasks=num_tasks)
                    output = future.result()
                    assert isinstance(output, torch.Tensor)
                    verify_output(problem, output)
                    reports.append(future.report)
                reports = reports[1:]  # the first touches fresh shared memory
                rows.append(
                    Measurement(
                        benchmark="ray",
                        case=f"{kind}-{tokens}-h8-d64",
                        baseline="slowest actor's computation",
                        num_tasks=num_tasks,
                        executor=f"ray, {len(cluster.pids)} actors",
                        dtype="float32",
                        ratio=statistics.median(r.seconds / r.slowest_seconds for r in reports),
                        repeats=repeats,
                        details={
                            name: statistics.median(getattr(r, name) for r in reports)
                            for name in (*_PARTS, "put_seconds", "merge_seconds", "overhead")
                        },
                        **summarize([r.seconds for r in reports]),  # type: ignore[arg-type]
                    )
                )
    columns: dict[str, Callable[[Measurement], object]] = {
        "case": lambda row: row.case,
        "by": lambda row: row.executor,
        "W": lambda row: row.num_tasks,
        "run s": lambda row: f"{row.median_ms / 1e3:.2f}",
        "before": lambda row: f"{row.details['before_seconds']:.2f}",
        "slowest": lambda row: f"{row.details['slowest_seconds']:.2f}",
        "between": lambda row: f"{row.details['between_seconds']:.2f}",
        "after": lambda row: f"{row.details['after_seconds']:.2f}",
        "overhead": lambda row: percent(row.details["overhead"]),
    }
    publish(rows, columns, out)
