"""What cutting costs: all tasks of W in this process against one call of the same kernels."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cqs
from cqs.bench.measurement import Measurement, append_rows, summarize
from cqs.bench.timing import time_in_turn
from cqs.cases import Case
from cqs.commands.table import format_table
from cqs.problem import Problem
from cqs.testing import assert_tracks_exact, exact_rows
from cqs.worker import choose_backend

_NUM_WORKERS = (7, 8, 13, 31)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Check and time every W, forward and with gradients, causal and not, in turn with W = 1.

    Args:
        tokens: Sequence length; ``None`` means 8192 on the CPU, 65,536 on a GPU.
        repeats: How often each is timed.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    tokens = tokens or (65536 if on_gpu else 8192)
    rows: list[Measurement] = []
    for head_dim in (128, 64) if on_gpu else (64,):
        for is_causal in (False, True):
            heads = 16 if on_gpu else 8
            kind = "causal" if is_causal else "full"
            case = Case(kind, tokens, tokens, heads, heads, head_dim, is_causal=is_causal)
            rows += _measure(case.make(dtype, device), repeats)
    append_rows(rows, out)
    header = ["case", "pass", "W", "median ms", "over one call", "over PyTorch's"]
    table = [
        [
            row.case,
            row.benchmark.partition(" ")[2],
            row.num_workers,
            f"{row.median_ms:.1f}",
            f"{row.ratio:.3f}",
            f"{row.details['over_torch']:.3f}",
        ]
        for row in rows
    ]
    print(f"{rows[0].device}, {rows[0].dtype}, torch {rows[0].torch_version}")
    print(format_table(header, table))


def _measure(problem: Problem, repeats: int) -> list[Measurement]:
    """Check every W, then time it; one row for each pass and W."""
    tensors = problem.query, problem.key, problem.value
    device, tokens = problem.query.device.type, problem.query.shape[2]
    sample = torch.linspace(0, tokens - 1, 64, device=device).long()
    exact = exact_rows(problem, sample)
    eager = _torch(problem)(*tensors)[:, :, sample]
    for num_workers in (1, *_NUM_WORKERS):
        output = _split(problem, num_workers)(*tensors)
        assert_tracks_exact(output[:, :, sample], eager, exact)
    rows = []
    for name, run_pass in (("forward", _forward), ("forward and backward", _both)):
        computations = {"torch": run_pass(problem, _torch(problem))}
        for num_workers in (1, *_NUM_WORKERS):
            computations[str(num_workers)] = run_pass(problem, _split(problem, num_workers))
        for compute in computations.values():
            compute()
        seconds = time_in_turn(computations, repeats, device)
        for num_workers in (1, *_NUM_WORKERS):
            own = seconds[str(num_workers)]
            over_one, over_torch = (
                statistics.median(a / b for a, b in zip(own, seconds[other], strict=True))
                for other in ("1", "torch")
            )
            rows.append(
                Measurement(
                    benchmark=f"tasks {name}",
                    case=f"{'causal' if problem.is_causal else 'full'}-{tokens}"
                    f"-h{problem.query.shape[1]}-d{problem.query.shape[3]}",
                    baseline=f"one call, {choose_backend(*tensors)}",
                    num_workers=num_workers,
                    executor="local",
                    dtype=str(problem.query.dtype).removeprefix("torch."),
                    ratio=over_one,
                    repeats=repeats,
                    details={"over_torch": over_torch},
                    **summarize(own),  # type: ignore[arg-type]
                )
            )
    return rows


def _torch(problem: Problem) -> Callable[..., Tensor]:
    return partial(F.scaled_dot_product_attention, is_causal=problem.is_causal)


def _split(problem: Problem, num_workers: int) -> Callable[..., Tensor]:
    def attend(*tensors: Tensor) -> Tensor:
        output = cqs.attention(*tensors, is_causal=problem.is_causal, num_workers=num_workers)
        assert isinstance(output, Tensor)
        return output

    return attend


def _forward(problem: Problem, attend: Callable[..., Tensor]) -> Callable[[], object]:
    return lambda: attend(problem.query, problem.key, problem.value)


def _both(problem: Problem, attend: Callable[..., Tensor]) -> Callable[[], object]:
    leaves = [t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value)]
    grad_output = torch.randn_like(problem.query)
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad_output)
