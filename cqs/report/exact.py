"""Gradients of sampled tokens in float64, to check what is about to be timed."""

import torch
from torch import Tensor

from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.problem import Problem
from cqs.verify import VerificationError, visible_rows

_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Norm of an error, over that of the largest of the three gradients."""


@torch.no_grad()
def verify_gradients(
    problem: Problem,
    answer: Partial,
    grad_output: Tensor,
    gradients: Gradients,
    *,
    num_tokens: int = 32,
) -> None:
    """Raise unless the gradients of evenly spaced queries, keys and values are right.

    With ``P = exp(scores - lse)`` and ``D = sum(grad_output * output)`` of each row, those of
    values are ``P^T grad_output``, and with ``dS = P * (grad_output value^T - D)`` those of
    queries and keys ``scale dS key`` and ``scale dS^T query``: in float64 from the tensors and the
    answer, which :func:`cqs.verify.verify_rows` must have passed.

    Args:
        problem: What was asked: as many queries as keys, one pattern for all heads, no dropout.
        answer: Of the whole problem.
        grad_output: Gradient of its output.
        gradients: What to check.
        num_tokens: How many to sample; the first and the last are among them.

    Raises:
        VerificationError: with the relative error in norm, and what is allowed.
    """
    tokens = problem.query.shape[2]
    sample = torch.linspace(0, tokens - 1, num_tokens, device=problem.query.device).long().unique()
    exact = _exact_gradients(problem, answer, grad_output, sample)
    allowed, size = _TOLERANCES[problem.query.dtype], max(float(each.norm()) for each in exact)
    for name, found, right in zip(Gradients._fields, gradients, exact, strict=True):
        error = float((found[:, :, sample].double() - right).norm()) / size
        if not error <= allowed:
            raise VerificationError(
                f"the gradient of the {name} strays by {error:.2g}, allowed are {allowed:.2g}"
            )


def _exact_gradients(
    problem: Problem, answer: Partial, grad_output: Tensor, sample: Tensor
) -> Gradients:
    """Compute the gradients of some queries, and those of the same keys and values."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    sees, is_seen = visible_rows(problem, sample), _visible_columns(problem, sample)
    every = torch.arange(problem.query.shape[2], device=sample.device)
    found = Gradients(
        *(
            torch.zeros_like(tensor[:, :, sample], dtype=torch.float64)
            for tensor in (problem.query, problem.key, problem.value)
        )
    )
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
    """Say by which queries some keys are seen, bool ``[seqlen, len(keys)]``."""
    if problem.bound_pattern is not None:
        turned = problem.bound_pattern.transposed()
        masks = [torch.from_numpy(turned.to_mask(range(key, key + 1))) for key in keys.tolist()]
        return torch.cat(masks).T.to(keys.device)
    queries = torch.arange(problem.query.shape[2], device=keys.device)
    if problem.is_causal:
        return queries[:, None] >= keys
    return torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device)
