"""The check of gradients: sampled rows compared with float64, by relative error."""

from itertools import product

import torch
from torch import Tensor

from cqs.executors.verify import VerificationError, bound_mask, sample_rows, visible_rows
from cqs.partial import Gradients, Partial
from cqs.problem import Problem

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative errors in the Frobenius norm, about twice those of the CPU kernels."""


def check_error(name: str, error: float, tolerance: float) -> None:
    """Raise VerificationError unless a relative error is at most its tolerance; NaN is not."""
    if not error <= tolerance:
        raise VerificationError(
            f"relative error of {name} must be at most {tolerance:.2g}, got {error:.2g}"
        )


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
    tensors and the answer, which :func:`cqs.executors.verify.verify_rows` must have verified.
    Errors are relative to the largest of the three gradients.

    Args:
        problem: As many queries as keys, one pattern for all heads, no dropout.
        answer: Output and LSE of the whole problem.
        grad_output: Gradient of the output, of its shape.
        gradients: Gradients to verify, in the shapes of query, key and value.
        name: Name of the method in errors.

    Raises:
        VerificationError: A relative error exceeds the tolerance of the dtype.
    """
    sample = torch.tensor(sample_rows(problem.query.shape[2]), device=problem.query.device)
    exact = _exact_gradients(problem, answer, grad_output, sample)
    size = max(float(tensor.norm()) for tensor in exact)
    tolerance = TOLERANCES[problem.query.dtype]
    for side, gradient, right in zip(Gradients._fields, gradients, exact, strict=True):
        error = float((gradient[:, :, sample].double() - right).norm()) / size
        check_error(f"{name} gradient of the {side}".lstrip(), error, tolerance)


def _exact_gradients(
    problem: Problem, answer: Partial, grad_output: Tensor, sample: Tensor
) -> Gradients:
    """Compute the gradients of the sampled queries, keys and values in float64.

    Those of queries need the sampled rows of P only, those of keys and values the sampled columns.
    """
    tensors = problem.query, problem.key, problem.value
    group_size = problem.query.shape[1] // problem.key.shape[1]
    sums = Gradients(*(torch.zeros_like(tensor[:, :, sample]).double() for tensor in tensors))
    every = torch.arange(problem.query.shape[2], device=sample.device)
    parts = (
        (sample, every, visible_rows(problem, sample)),
        (every, sample, _visible_columns(problem, sample)),
    )
    for head, (rows, columns, visible) in product(range(problem.query.shape[1]), parts):
        kv_head = head // group_size
        query, output, grad, lse = (
            tensor[:, head, rows].double()
            for tensor in (problem.query, answer.output, grad_output, answer.lse)
        )
        key, value = (tensor[:, kv_head, columns].double() for tensor in tensors[1:])
        scores = problem.scale * query @ key.mT - lse[..., None]
        weights = scores.masked_fill(~visible, -torch.inf).exp()
        row_sums = (grad * output).sum(dim=-1, keepdim=True)
        slopes = problem.scale * weights * (grad @ value.mT - row_sums)
        if rows is sample:
            sums.query[:, head] = slopes @ key
        else:
            sums.key[:, kv_head] += slopes.mT @ query
            sums.value[:, kv_head] += weights.mT @ grad
    return sums


def _visible_columns(problem: Problem, keys: Tensor) -> Tensor:
    """Return the mask of some keys, bool ``[seqlen, len(keys)]``, True where a query sees one."""
    bound = bound_mask(problem)
    masks = [torch.from_numpy(bound.to_mask(None, range(key, key + 1))) for key in keys.tolist()]
    return torch.cat(masks, dim=1).to(keys.device)
