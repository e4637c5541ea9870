"""Exact results in float64, and error bounds relative to eager PyTorch."""

import torch
from torch import Tensor

from cqs.executors.verify import visible_rows
from cqs.problem import Problem


def exact_rows(problem: Problem, rows: Tensor) -> Tensor:
    """Compute the output of some query rows in float64, for problems too long for all rows.

    Args:
        problem: The problem.
        rows: Query indices, int64 ``[rows]``.

    Returns:
        ``[batch, num_heads, rows, value_dim]``, float64.
    """
    group_size = problem.query.shape[1] // problem.key.shape[1]
    masked_out = ~visible_rows(problem, rows)
    outputs = []
    for head in range(problem.query.shape[1]):
        key, value = (t[:, head // group_size].double() for t in (problem.key, problem.value))
        scores = problem.scale * problem.query[:, head, rows].double() @ key.mT
        scores = scores.masked_fill(masked_out, -torch.inf)
        outputs.append(scores.softmax(dim=-1).nan_to_num(0.0) @ value)
    return torch.stack(outputs, dim=1)


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
