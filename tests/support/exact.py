"""Results of problems: by cqs, in float64 from the definition, and by eager PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cqs
from benchmarks.cases import visible_mask
from cqs.partial import Partial, lse_dtype
from cqs.problem import Problem


def attend(
    problem: Problem, compute: Callable[..., Any] = cqs.attention, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of a problem.

    Args:
        problem: The problem.
        compute: The function that computes it.
        options: Further arguments of the function.
    """
    output, lse = compute(
        *tensors_of(problem),
        is_causal=problem.is_causal,
        pattern=problem.pattern,
        scale=problem.scale,
        return_lse=True,
        **options,
    )
    return output, lse


def tensors_of(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a problem."""
    return problem.query, problem.key, problem.value


def exact_answer(problem: Problem, dtype: torch.dtype = torch.float64) -> Partial:
    """Compute output and LSE in ``dtype`` from the definition, with all scores in memory."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    query = problem.query.to(dtype)
    key, value = (
        t.to(dtype).repeat_interleave(group_size, 1) for t in (problem.key, problem.value)
    )
    scores = problem.scale * query @ key.mT
    if (mask := visible_mask(problem)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return Partial(weights @ value, lse)


def eager_output(problem: Problem) -> Tensor:
    """Compute the output by ``scaled_dot_product_attention`` in the dtype of the problem."""
    square = problem.query.shape[2] == problem.key.shape[2] and problem.pattern is None
    output = F.scaled_dot_product_attention(
        *tensors_of(problem),
        attn_mask=None if square else visible_mask(problem),
        is_causal=problem.is_causal and square,
        scale=problem.scale,
        enable_gqa=True,
    )
    return output.nan_to_num(0.0)


def assert_tracks_exact(
    actual: Tensor, eager: Tensor, exact: Tensor, *, slack: float = 2.0, name: str = "output"
) -> None:
    """Raise AssertionError unless the error is at most ``slack`` times that of eager PyTorch.

    One rounding step of the largest exact value is added to the bound, so that an eager result
    without error does not require a result without error.

    Args:
        actual: The result under test, in its dtype.
        eager: Result of plain PyTorch in the dtype under test.
        exact: Result in float64 for the same quantised inputs.
        slack: Largest permitted ratio of the two errors.
        name: Name of the result in the message.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    assert torch.isfinite(actual).all(), f"{name}: non-finite values"
    exact = exact.double()
    rounding = torch.finfo(actual.dtype).eps * exact.abs().max()
    budget = slack * (eager.double() - exact).abs().max() + rounding
    error = (actual.double() - exact).abs().max()
    assert error <= budget, f"{name}: error {error:.3e} exceeds budget {budget:.3e}"


def assert_lse_tracks_exact(problem: Problem, lse: Tensor, exact: Tensor) -> None:
    """Like the rule for outputs; the CPU kernel for half precision has faster exponentials."""
    blind = exact == -torch.inf
    assert (lse[blind] == -torch.inf).all()
    eager = exact_answer(problem, lse_dtype(problem.query.dtype)).lse
    lse, eager, exact = (each.double().masked_fill(blind, 0) for each in (lse, eager, exact))
    budget = 4 * (eager - exact).abs().max()
    budget += 4 * torch.finfo(lse_dtype(problem.query.dtype)).eps * exact.abs().max()
    if problem.query.element_size() == 2:
        budget += 2**-12
    error = (lse - exact).abs().max()
    assert error <= budget, f"lse: error {error:.3e} exceeds budget {budget:.3e}"


def assert_answers(problem: Problem, output: Tensor, lse: Tensor) -> None:
    """Compare output and LSE with float64; rows that see no key must give 0 and -inf."""
    exact = exact_answer(problem)
    assert output.dtype == problem.query.dtype
    assert lse.dtype == lse_dtype(problem.query.dtype) and lse.shape == exact.lse.shape
    plain = exact_answer(problem, lse.dtype).output.to(output.dtype)
    eager = max(  # fused kernels are lucky where there are few numbers
        (eager_output(problem), plain),
        key=lambda each: (each.double() - exact.output).abs().max(),
    )
    assert_tracks_exact(output, eager, exact.output)
    assert (output[exact.lse == -torch.inf] == 0).all()
    assert_lse_tracks_exact(problem, lse, exact.lse)
