"""Errors of outputs and gradients against float64, for every W and for PyTorch's own kernels."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cqs
from benchmarks.cases import Case, visible_mask
from benchmarks.errors import relative_error
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import track
from cqs.problem import Problem
from cqs.report.timing import Timer
from cqs.worker import BACKENDS

_NUM_TASKS = (1, 3, 4, 7, 8, 13, 31)
_FIELDS = ("output", "grad_query", "grad_key", "grad_value")
_Attend = Callable[..., Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 10, out: str | None = None) -> None:
    """Measure errors of causal attention of normal inputs and its gradients, one seed per repeat.

    Errors are relative, in the Frobenius norm, against float64 on the same rounded inputs.

    Args:
        tokens: Sequence length; ``None`` means 512 on the CPU, 8192 on a GPU.
        repeats: Number of seeds.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    tokens = tokens or (8192 if on_gpu else 512)
    rows, timer = [], Timer(device)
    for dtype in (torch.float16, torch.bfloat16):
        errors: dict[str, list[list[float]]] = {}
        seconds: dict[str, list[float]] = {}
        for seed in track(range(repeats), repeats, str(dtype)):
            torch.manual_seed(seed)
            case = Case(f"causal-{seed}", tokens, tokens, 2, 2, 128, is_causal=True)
            problem = case.make(dtype, device)
            grad_output = torch.randn(problem.query.shape).to(problem.query)
            exact = _differentiate(_definition, problem, grad_output, torch.float64)
            for name, attend in _contenders(problem).items():
                elapsed, found = timer.time(
                    partial(_differentiate, attend, problem, grad_output, dtype)
                )
                seconds.setdefault(name, []).append(elapsed)
                errors.setdefault(name, []).append(list(map(relative_error, found, exact)))
            del exact
        base = statistics.mean(error[0] for error in next(iter(errors.values())))
        for name, of_seeds in errors.items():
            means = [statistics.mean(column) for column in zip(*of_seeds, strict=True)]
            rows.append(
                make_row(
                    seconds[name],
                    dtype,
                    benchmark="accuracy",
                    case=f"causal-{tokens}-h2-d128",
                    baseline=f"output of {next(iter(errors))}",
                    num_tasks=int(name.partition("W = ")[2] or 1),
                    executor=name,
                    ratio=means[0] / base,
                    repeats=repeats,
                    details=dict(zip(_FIELDS, means, strict=True)),
                )
            )
    publish(rows, make_columns(*_FIELDS), out)


def _contenders(problem: Problem) -> dict[str, _Attend]:
    def pytorch(backend: SDPBackend) -> _Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return attend

    found = {"PyTorch, flash": pytorch(SDPBackend.FLASH_ATTENTION)}
    if problem.query.is_cuda:
        found["PyTorch, cudnn"] = pytorch(SDPBackend.CUDNN_ATTENTION)
    for backend, found_backend in BACKENDS.items():
        tensors = problem.query, problem.key, problem.value
        if backend != "reference" and not found_backend.why_not(*tensors):
            for num_tasks in _NUM_TASKS:
                options: dict[str, Any] = {"num_tasks": num_tasks, "backend": backend}
                attend = partial(cqs.attention, is_causal=True, **options)
                found[f"{backend}, W = {num_tasks}"] = attend
    return found


def _definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = visible_mask(Problem(query, key, value, True, 1.0))
    assert mask is not None
    scores = query.shape[-1] ** -0.5 * query @ key.mT
    output: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return output


def _differentiate(
    attend: _Attend, problem: Problem, grad_output: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    tensors = problem.query, problem.key, problem.value
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output.to(dtype))]
