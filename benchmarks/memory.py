"""Peak memory of tasks relative to the plan's prediction, for every backend."""

import argparse

import torch

from benchmarks.cases import Case
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import time_by_wall_clock, track
from cqs.problem import Problem
from cqs.report.measurement import Measurement
from cqs.report.passes import hold, measure_held
from cqs.scheduler import Task
from cqs.worker import BACKENDS, Worker
from cqs.worker.memory import predict_pattern_cost

_NUM_TASKS = (1, 7, 8, 13, 31)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 1, out: str | None = None) -> None:
    """Measure every task of every W with every backend that runs here; keep the worst of each.

    Args:
        tokens: Sequence length; ``None`` means 4096 on the CPU, 32,768 on a GPU. The reference
            gets half of it.
        repeats: Number of repeats; the worst counts.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    tokens = tokens or (32768 if on_gpu else 4096)
    rows = []
    for is_causal in (False, True):
        kind = "causal" if is_causal else "full"
        for backend in BACKENDS:
            length = tokens // 2 if backend == "reference" else tokens
            case = Case(kind, length, length, 8, 8, 128, is_causal=is_causal)
            problem = case.make(dtype, device)
            tensors = problem.query, problem.key, problem.value
            if BACKENDS[backend].why_not(*tensors) is None:
                rows += [_measure_worst(problem, backend, w, repeats) for w in _NUM_TASKS]
    publish(rows, make_columns("predicted_bytes", "peak_bytes"), out)


def measure_task(problem: Problem, task: Task, backend: str) -> tuple[int, int]:
    """Return the predicted and the measured peak bytes of a task."""
    query = hold(problem.query, task.held_queries)
    key, value = (hold(tensor, task.held_keys) for tensor in (problem.key, problem.value))
    worker = Worker.of(problem, backend)
    _, peak = measure_held(
        lambda: worker.run_steps(task.steps, query, key, value), (query, key, value)
    )
    cost = predict_pattern_cost(task, problem.shape, backend, problem.bound_pattern)
    return cost.peak_bytes, peak


def _measure_worst(problem: Problem, backend: str, num_tasks: int, repeats: int) -> Measurement:
    tasks = problem.make_plan(num_tasks).tasks
    seconds, found = time_by_wall_clock(
        lambda: [
            measure_task(problem, task, backend)
            for task in track(tasks, num_tasks, f"{backend}, W = {num_tasks}")
            for _ in range(repeats)
        ]
    )
    predicted, peak = max(found, key=lambda pair: abs(pair[1] / pair[0] - 1))
    _, num_heads, tokens, head_dim = problem.query.shape
    return make_row(
        [seconds],
        problem.query.dtype,
        benchmark="memory",
        case=f"{'causal' if problem.is_causal else 'full'}-{tokens}-h{num_heads}-d{head_dim}",
        baseline="prediction",
        num_tasks=num_tasks,
        executor=backend,
        ratio=peak / predicted,
        repeats=repeats,
        details={"predicted_bytes": predicted, "peak_bytes": peak},
    )
