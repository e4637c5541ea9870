"""Cost of splitting: time of all W tasks on this device relative to one call."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.errors import verify_answer
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import time_in_turn
from cqs.executors.contract import Planned
from cqs.executors.local import LocalExecutor
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem
from cqs.report.exact import verify_gradients
from cqs.report.measurement import Measurement
from cqs.report.timing import Timer
from cqs.scheduler import Plan
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, Worker, choose_backend

_NUM_TASKS = (7, 8, 13, 31)
_ALONE, _TOGETHER = "one by one", "local"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time every W, forward and with gradients, non-causal and causal.

    ``local`` is :func:`cqs.attention`, which on a GPU computes all tasks together. ``one by one``
    computes each task as if it were alone on the device, and merges.

    Args:
        tokens: Sequence length; ``None`` means 8192 on the CPU, 65,536 on a GPU.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    tokens = tokens or (65536 if on_gpu else 8192)
    rows: list[Measurement] = []
    for head_dim in (128, 64) if on_gpu else (64,):
        for is_causal in (False, True):
            heads = 16 if on_gpu else 8
            mask = "causal" if is_causal else "full"
            case = Case(mask, tokens, tokens, heads, heads, head_dim, is_causal=is_causal)
            rows += _measure(case.make(dtype, device), repeats)
    publish(rows, make_columns("over_torch"), out)


def _measure(problem: Problem, repeats: int) -> list[Measurement]:
    """Verify every W, then time it; return one row for each pass, W and kind."""
    tensors = problem.query, problem.key, problem.value
    device, tokens = problem.query.device.type, problem.query.shape[2]
    plans = {num_tasks: problem.make_plan(num_tasks) for num_tasks in (1, *_NUM_TASKS)}
    kinds = (_TOGETHER, _ALONE) if device == "cuda" else (_TOGETHER,)
    contenders = [(_TOGETHER, 1)] + [(kind, w) for kind in kinds for w in _NUM_TASKS]
    grad_output = torch.randn_like(problem.query)
    backend = choose_backend(*tensors).name
    answer = LocalExecutor().run(Planned(problem, plans[1], backend))
    verify_answer(problem, answer)

    def forward(kind: str, plan: Plan) -> Partial:
        return _forward[kind](Planned(problem, plan, backend))

    def backward(kind: str, plan: Plan, answer: Partial) -> Gradients:
        return _backward[kind](Planned(problem, plan, backend), answer, grad_output)

    for kind, num_tasks in contenders:
        verify_answer(problem, forward(kind, plans[num_tasks]))
        verify_gradients(problem, answer, grad_output, backward(kind, plans[num_tasks], answer))

    def of_torch(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=problem.is_causal)  # type: ignore

    rows = []
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    passes: dict[str, tuple[Callable[[], object], Callable[[str, Plan], object]]] = {
        "forward": (partial(of_torch, *tensors), forward),
        "forward and backward": (
            lambda: torch.autograd.grad(of_torch(*leaves), leaves, grad_output),
            lambda kind, plan: backward(kind, plan, forward(kind, plan)),
        ),
    }
    for name, (library, compute) in passes.items():
        computations = {"torch": library}
        for kind, num_tasks in contenders:
            computations[f"{kind} {num_tasks}"] = partial(compute, kind, plans[num_tasks])
        seconds = time_in_turn(computations, repeats, Timer(device), f"tasks {name}")
        for kind, num_tasks in contenders:
            own = seconds[f"{kind} {num_tasks}"]
            ratios = (a / b for a, b in zip(own, seconds["torch"], strict=True))
            rows.append(
                make_row(
                    own,
                    problem.query.dtype,
                    benchmark=f"tasks {name}",
                    case=f"{'causal' if problem.is_causal else 'full'}-{tokens}"
                    f"-h{problem.query.shape[1]}-d{problem.query.shape[3]}",
                    baseline=f"one call, {backend}",
                    num_tasks=num_tasks,
                    executor=kind,
                    ratio=seconds[f"{_TOGETHER} 1"],
                    details={"over_torch": statistics.median(ratios)},
                )
            )
    return rows


def _attend_one_by_one(part: Planned) -> Partial:
    problem, plan, backend = part
    tiler = Tiler(plan, *problem.empty_answer())
    worker = Worker.of(problem, backend)
    held = list(map(HeldTokens.whole, (problem.query, problem.key, problem.value)))
    for task in plan.tasks:
        tiler.add(
            task.index, worker.run_steps(task.steps, *held, dtype=lse_dtype(problem.query.dtype))
        )
    return tiler.finish()


def _differentiate_one_by_one(part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
    problem, plan, backend = part
    worker = Worker.of(problem, backend)
    tensors = problem.query, problem.key, problem.value
    total = Gradients.zeros(*tensors)
    for task in plan.tasks:
        of_queries, of_keys = (
            [HeldTokens(None, ranges, [t[:, :, r.start : r.stop] for r in ranges]) for t in side]
            for ranges, side in (
                (task.held_queries, (problem.query, grad_output, *answer)),
                (task.held_keys, tensors[1:]),
            )
        )
        found = worker.run_backward(task.steps, of_queries[0], *of_keys, *of_queries[1:])
        held = task.held_queries, task.held_keys, task.held_keys
        for sums, gradient, ranges in zip(total, found, held, strict=True):
            for r, rows in zip(ranges, gradient.split(list(map(len, ranges)), dim=2), strict=True):
                sums[:, :, r.start : r.stop] += rows
    return total


_forward = {_TOGETHER: LocalExecutor().run, _ALONE: _attend_one_by_one}
_backward = {_TOGETHER: LocalExecutor().run_backward, _ALONE: _differentiate_one_by_one}
