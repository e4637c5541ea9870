"""What a task holds at its peak, against the plan's prediction, for every backend."""

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cqs.bench.measurement import Measurement, publish, summarize
from cqs.cases import Case
from cqs.problem import Problem
from cqs.scheduler import Task, predict_cost
from cqs.worker import WHY_NOT, HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes

_NUM_TASKS = (1, 7, 8, 13, 31)


def run(*, tokens: int | None = None, repeats: int = 1, out: str | None = None) -> None:
    """Measure every task of every W with every backend that runs here; show the worst of each.

    Args:
        tokens: Sequence length; ``None`` means 4096 on the CPU, 32,768 on a GPU. The reference
            gets half of it.
        repeats: How often each is measured; the worst counts.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    tokens = tokens or (32768 if on_gpu else 4096)
    rows = []
    for is_causal in (False, True):
        kind = "causal" if is_causal else "full"
        for backend in WHY_NOT:
            length = tokens // 2 if backend == "reference" else tokens
            case = Case(kind, length, length, 8, 8, 128, is_causal=is_causal)
            problem = case.make(dtype, device)
            tensors = problem.query, problem.key, problem.value
            if WHY_NOT[backend](*tensors) is None:
                rows += [_measure_worst(problem, backend, w, repeats) for w in _NUM_TASKS]
    columns: dict[str, Callable[[Measurement], object]] = {
        "case": lambda row: row.case,
        "backend": lambda row: row.executor,
        "W": lambda row: row.num_tasks,
        "predicted MiB": lambda row: f"{row.details['predicted_bytes'] / 2**20:.1f}",
        "peak MiB": lambda row: f"{row.details['peak_bytes'] / 2**20:.1f}",
        "ratio": lambda row: f"{row.ratio:.3f}",
    }
    publish(rows, columns, out)


def measure_task(problem: Problem, task: Task, backend: str) -> tuple[int, int]:
    """Return the bytes that a task was predicted to hold, and those that it held."""
    query, key, value = (
        hold(tensor, ranges)
        for tensor, ranges in (
            (problem.query, task.held_queries),
            (problem.key, task.held_keys),
            (problem.value, task.held_keys),
        )
    )
    worker = Worker.of(problem, backend)
    peak = measure_held(lambda: worker.run(task, query, key, value), (query, key, value))
    cost = predict_cost(task, problem.shape, backend, problem.bound_pattern)
    return cost.peak_bytes, peak


def hold(tensor: Tensor, ranges: Sequence[range]) -> HeldTokens:
    """Copy tokens of ``[batch, heads, seqlen, dim]``, as a worker receives them."""
    parts = [tensor[:, :, r.start : r.stop] for r in ranges]
    return HeldTokens.packed(torch.cat([tensor[:, :, :0], *parts], dim=2), ranges)


def measure_held(compute: Callable[[], object], held: Sequence[HeldTokens]) -> int:
    """Return the most bytes that a computation takes with the tokens that it is given.

    Args:
        compute: Runs twice: at first it compiles, and allocates what stays.
        held: The tokens.
    """
    device = held[0].joined().device
    compute()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a block of it may be up to a megabyte larger than is asked for
    collects = gc.isenabled()
    gc.disable()  # nothing else is to be freed meanwhile
    try:
        _, peak = measure_peak_bytes(compute, device)
    finally:
        if collects:
            gc.enable()
    return peak + sum(tokens.joined().nbytes for tokens in held)


def _measure_worst(problem: Problem, backend: str, num_tasks: int, repeats: int) -> Measurement:
    start = time.perf_counter()
    tasks = problem.make_plan(num_tasks).tasks
    found = [measure_task(problem, task, backend) for task in tasks for _ in range(repeats)]
    predicted, peak = max(found, key=lambda pair: abs(pair[1] / pair[0] - 1))
    _, num_heads, tokens, head_dim = problem.query.shape
    return Measurement(
        benchmark="memory",
        case=f"{'causal' if problem.is_causal else 'full'}-{tokens}-h{num_heads}-d{head_dim}",
        baseline="prediction",
        num_tasks=num_tasks,
        executor=backend,
        dtype=str(problem.query.dtype).removeprefix("torch."),
        ratio=peak / predicted,
        repeats=repeats,
        details={"predicted_bytes": predicted, "peak_bytes": peak},
        **summarize([time.perf_counter() - start]),  # type: ignore[arg-type]
    )
