"""Throughput of our kernels and of libraries, in one run."""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.errors import verify_answer, verify_output
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import time_in_turn
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.report.exact import verify_gradients
from cqs.report.measurement import Measurement
from cqs.report.timing import Timer
from cqs.scheduler import Plan
from cqs.worker import BACKENDS, CallBackend, HeldTokens, Worker
from cqs.worker.operands import Operands, TaskOperands
from cqs.worker.triton import TRITON

_HEADS = 16
_NUM_TASKS = 31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Verify and time single calls of our kernels and of libraries on a GPU.

    FLOPs are ``4 N^2 d`` per head forward and 2.5 times that backward, half of it if causal. Work
    that a kernel does twice counts once.

    Args:
        tokens: Sequence length; ``None`` means 16,384.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.

    Raises:
        NotImplementedError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("the benchmark kernels requires a GPU")
    tokens = tokens or 16384
    rows: list[Measurement] = []
    for head_dim in (128, 64):
        for is_causal in (False, True):
            kind = "causal" if is_causal else "full"
            case = Case(kind, tokens, tokens, _HEADS, _HEADS, head_dim, is_causal=is_causal)
            rows += _measure(case.make(torch.bfloat16, "cuda"), repeats)
    publish(rows, make_columns("tflops"), out)


def _measure(problem: Problem, repeats: int) -> list[Measurement]:
    tokens, head_dim = problem.query.shape[2:]
    tensors = problem.query, problem.key, problem.value
    libraries = ["cudnn"] if BACKENDS["flash"].why_not(*tensors) else ["cudnn", "flash"]
    forward = {
        **{name: _one_call(problem, problem.make_plan(1), name) for name in libraries},
        "triton": _one_call(problem, problem.make_plan(1), "triton"),
        f"triton, tasks of W = {_NUM_TASKS} in one launch": _one_call(
            problem, problem.make_plan(_NUM_TASKS), "triton"
        ),
        "flex": _flex(problem),
    }
    for name, attend in forward.items():
        verify_output(problem, attend()[0].output, name=name)
    answer = forward["cudnn"]()[0]
    verify_answer(problem, answer)
    grad_output = torch.randn_like(answer.output)
    backward = {
        **{name: _library_backward(problem, answer, grad_output, name) for name in libraries},
        "triton": _triton_backward(problem, answer, grad_output),
    }
    for name, differentiate in backward.items():
        gradients = Gradients(*differentiate())
        verify_gradients(problem, answer, grad_output, gradients, name=name)
    flops = 4.0 * tokens**2 * head_dim * _HEADS / (2 if problem.is_causal else 1)
    rows = []
    for name, computations, work in (
        ("forward", forward, flops),
        ("backward", backward, 2.5 * flops),
    ):
        seconds = time_in_turn(computations, repeats, Timer("cuda"), name)
        for by, own in seconds.items():
            rows.append(
                make_row(
                    own,
                    "bfloat16",
                    benchmark=f"kernels {name}",
                    case=f"{'causal' if problem.is_causal else 'full'}-{tokens}"
                    f"-h{_HEADS}-d{head_dim}",
                    baseline="cudnn",
                    executor=by,
                    ratio=seconds["cudnn"],
                    details={"tflops": work / statistics.median(own) / 1e12},
                )
            )
    return rows


def _one_call(problem: Problem, plan: Plan, backend: str) -> Callable[[], list[Partial]]:
    held = list(map(HeldTokens.whole, (problem.query, problem.key, problem.value)))
    worker = Worker.of(problem, backend)
    if plan.num_tasks == 1:
        return lambda: worker.run_steps(plan.task(0).steps, *held)
    steps = [step for task in plan.tasks for step in task.steps]
    return lambda: [worker.run_together(steps, *held)]


def _flex(problem: Problem) -> Callable[[], list[Partial]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = problem.query.shape[2]
    mask = None
    if problem.is_causal:
        mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, tokens, tokens, device="cuda"
        )
    compiled = torch.compile(flex_attention)

    def attend() -> list[Partial]:
        output = compiled(problem.query, problem.key, problem.value, block_mask=mask)
        return [Partial(output, output[..., 0])]

    attend()
    return attend


def _library_backward(
    problem: Problem, answer: Partial, grad_output: Tensor, backend: str
) -> Callable[[], tuple[Tensor, ...]]:
    tensors = problem.query, problem.key, problem.value
    operands = Operands(*tensors, problem.is_causal, problem.scale)
    found = BACKENDS[backend]
    assert isinstance(found, CallBackend)
    return lambda: found.differentiate(operands, grad_output, *answer)


def _triton_backward(
    problem: Problem, answer: Partial, grad_output: Tensor
) -> Callable[[], Sequence[Tensor]]:
    from cqs.worker.work import make_work

    whole = (range(problem.query.shape[2]),)
    work = make_work(problem.make_plan(1).task(0).steps, None, whole, whole)
    operands = TaskOperands(problem.query, problem.key, problem.value, work, problem.scale)
    dtype = problem.query.dtype
    return lambda: TRITON.differentiate(operands, grad_output, *answer, dtype=dtype)
