"""Exact results of some rows, and relative errors of results."""

import torch
from torch import Tensor

from cqs.executors.verify import sample_rows, verify_rows, visible_rows
from cqs.partial import Partial, lse_dtype
from cqs.problem import Problem
from cqs.report.exact import TOLERANCES, check_error


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


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference divided by that of ``expected``."""
    if not expected.numel():
        return 0.0
    found, expected = (tensor.to(lse_dtype(tensor.dtype)) for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm())


def verify_close(name: str, found: Tensor, expected: Tensor) -> None:
    """Raise VerificationError unless a tensor is that of another computation, within its dtype."""
    check_error(name, relative_error(found, expected), TOLERANCES[found.dtype])


@torch.no_grad()
def verify_output(
    problem: Problem,
    output: Tensor,
    rows: Tensor | None = None,
    *,
    name: str = "the output",
    slack: float = 1.0,
) -> None:
    """Raise unless every sampled row of an output agrees with float64 attention.

    Args:
        problem: The attention problem: one pattern for all heads, no dropout.
        output: The whole output, ``[batch, heads, seqlen_q, head_dim]``, or the rows that ``rows``
            names.
        rows: Query indices of the rows of ``output``, int64; ``None`` means all.
        name: What an error calls the output.
        slack: Factor on the tolerance.

    Raises:
        VerificationError: The relative error of a row exceeds the tolerance of its dtype.
    """
    if rows is None:
        rows = torch.arange(output.shape[2], device=output.device)
    sample = torch.tensor(sample_rows(len(rows), 64), dtype=torch.int64, device=output.device)
    if not len(sample):
        return
    exact = exact_rows(problem, rows[sample])
    distances = (output[:, :, sample].double() - exact).norm(dim=-1)
    errors = (distances / exact.norm(dim=-1)).masked_fill(distances == 0, 0)  # rows of zeros: 0 / 0
    check_error(name, float(errors.max()), slack * TOLERANCES[output.dtype])


def verify_answer(problem: Problem, answer: Partial) -> None:
    """Raise VerificationError unless sampled rows of output and LSE agree with float64.

    Besides :func:`verify_output`, every entry keeps the bound of :func:`verify_rows`.
    """
    verify_rows(problem, answer)
    verify_output(problem, answer.output)
