"""Exact results of some query rows, for problems too long for all rows."""

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
