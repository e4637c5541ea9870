"""The check that precedes every measurement: sampled rows against float64, by relative error."""

import torch
from torch import Tensor

from cqs.executors.verify import VerificationError, verify_rows, visible_rows
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem
from cqs.testing import exact_rows

_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative errors in the Frobenius norm, about twice those of the CPU kernels."""


def check_error(name: str, error: float, tolerance: float) -> None:
    """Raise VerificationError unless a relative error is at most its tolerance; NaN is not."""
    if not error <= tolerance:
        raise VerificationError(
            f"relative error of {name} must be at most {tolerance:.2g}, got {error:.2g}"
        )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference divided by that of ``expected``."""
    if not expected.numel():
        return 0.0
    found, expected = (tensor.to(lse_dtype(tensor.dtype)) for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm())


def verify_close(name: str, found: Tensor, expected: Tensor) -> None:
    """Raise VerificationError unless a tensor is that of another computation, within its dtype."""
    check_error(name, relative_error(found, expected), _TOLERANCES[found.dtype])


@torch.no_grad()
def verify_output(
    problem: Problem, output: Tensor, rows: Tensor | None = None, *, name: str = "the output"
) -> None:
    """Raise unless every sampled row of an output agrees with float64 attention.

    Args:
        problem: The attention problem: one pattern for all heads, no dropout.
        output: The whole output, ``[batch, heads, seqlen_q, head_dim]``, or the rows that ``rows``
            names.
        rows: Query indices of the rows of ``output``, int64; ``None`` means all.
        name: What an error calls the output.

    Raises:
        VerificationError: The relative error of a row exceeds the tolerance of its dtype.
    """
    if rows is None:
        rows = torch.arange(output.shape[2], device=output.device)
    sample = _sample(len(rows), 64, output.device)
    if not len(sample):
        return
    exact = exact_rows(problem, rows[sample])
    distances = (output[:, :, sample].double() - exact).norm(dim=-1)
    errors = (distances / exact.norm(dim=-1)).masked_fill(distances == 0, 0)  # rows of zeros: 0 / 0
    check_error(name, float(errors.max()), _TOLERANCES[output.dtype])


def verify_answer(problem: Problem, answer: Partial) -> None:
    """Raise VerificationError unless sampled rows of output and LSE agree with float64.

    Besides :func:`verify_output`, every entry keeps the bound of :func:`verify_rows`.
    """
    verify_rows(problem, answer)
    verify_output(problem, answer.output)


@torch.no_grad()
def verify_gradients(
    problem: Problem,
    answer: Partial,
    grad_output: Tensor,
    gradients: Gradients,
    *,
    name: str = "",
) -> None:
    """Raise unless the gradients of sampled queries, keys and values agree with float64.

    Let ``P = exp(scores - lse)``, ``D = sum(grad_output * output)`` per row and
    ``dS = P * (grad_output value^T - D)``. The gradients are ``dV = P^T grad_output``,
    ``dQ = scale dS key`` and ``dK = scale dS^T query``. They are computed in float64 from the
    tensors and the answer, which :func:`verify_answer` must have verified. Errors are relative to
    the largest of the three gradients.

    Args:
        problem: As many queries as keys, one pattern for all heads, no dropout.
        answer: Output and LSE of the whole problem.
        grad_output: Gradient of the output, of its shape.
        gradients: Gradients to verify, in the shapes of query, key and value.
        name: Name of the method in errors.

    Raises:
        VerificationError: A relative error exceeds the tolerance of the dtype.
    """
    sample = _sample(problem.query.shape[2], 32, problem.query.device)
    exact = _exact_gradients(problem, answer, grad_output, sample)
    size = max(float(each.norm()) for each in exact)
    tolerance = _TOLERANCES[problem.query.dtype]
    for side, found, right in zip(Gradients._fields, gradients, exact, strict=True):
        error = float((found[:, :, sample].double() - right).norm()) / size
        check_error(f"{name} gradient of the {side}".lstrip(), error, tolerance)


def _sample(number: int, most: int, device: torch.device) -> Tensor:
    """Return evenly spaced indices of ``number`` rows, the first and the last among them."""
    if not number:
        return torch.empty(0, dtype=torch.int64, device=device)
    indices: Tensor = torch.linspace(0, number - 1, most, device=device).long().unique()
    return indices


def _exact_gradients(
    problem: Problem, answer: Partial, grad_output: Tensor, sample: Tensor
) -> Gradients:
    """Compute the gradients of the sampled queries, keys and values in float64."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    sees, is_seen = visible_rows(problem, sample), _visible_columns(problem, sample)
    every = torch.arange(problem.query.shape[2], device=sample.device)
    tensors = problem.query, problem.key, problem.value
    found = Gradients(*(torch.zeros_like(tensor[:, :, sample]).double() for tensor in tensors))
    for head in range(problem.query.shape[1]):
        of_keys = head // group_size
        query, output, grad = (
            tensor[:, head].double() for tensor in (problem.query, answer.output, grad_output)
        )
        key, value = (tensor[:, of_keys].double() for tensor in (problem.key, problem.value))
        lse = answer.lse[:, head].double()
        row_sums = (grad * output).sum(dim=-1)
        for rows, columns, visible in ((sample, every, sees), (every, sample, is_seen)):
            scores = problem.scale * query[:, rows] @ key[:, columns].mT
            weights = (scores - lse[:, rows, None]).exp().masked_fill(~visible, 0)
            slopes = grad[:, rows] @ value[:, columns].mT - row_sums[:, rows, None]
            of_scores = problem.scale * weights * slopes
            if rows is sample:
                found.query[:, head] = of_scores @ key
            else:
                found.key[:, of_keys] += of_scores.mT @ query
                found.value[:, of_keys] += weights.mT @ grad
    return found


def _visible_columns(problem: Problem, keys: Tensor) -> Tensor:
    """Return the mask of some keys, bool ``[seqlen, len(keys)]``, True where a query sees one."""
    if problem.bound_pattern is not None:
        turned = problem.bound_pattern.transposed()
        masks = [torch.from_numpy(turned.to_mask(range(key, key + 1))) for key in keys.tolist()]
        return torch.cat(masks).T.to(keys.device)
    queries = torch.arange(problem.query.shape[2], device=keys.device)
    if problem.is_causal:
        return queries[:, None] >= keys
    return torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device)
