"""Recompute sampled rows of an answer in float64."""

import numpy as np
import torch

from cqs.partial import Partial, lse_dtype
from cqs.problem import Problem

_NOT_FINITE = "; some scores or values are not finite, which reaches rows that do not see them"


class VerificationError(ArithmeticError):
    """A sampled row of the answer is further from the exact one than rounding explains."""


@torch.no_grad()
def verify_rows(problem: Problem, answer: Partial, *, num_rows: int = 32, seed: int = 0) -> None:
    """Raise unless sampled query rows agree with float64 attention, for every batch and head.

    An lse may stray from the exact one by ``bound = 16 * eps_acc * (1 + max score) + eps``, an
    output by ``(bound + 16 * eps) * max |value|``, where eps belongs to the dtype of the tensors
    and eps_acc to that of the accumulation: what rounding of the products, of the probabilities
    and of the result can add up to, with fast exponentials where the tensors are half precision.
    The largest score is the row's, of the magnitudes of query and key (terms of a score that
    cancel leave their rounding behind), the largest value that of the row and column, both among
    what is visible and finite.

    Where the exact answer is NaN or infinite, so must this one be; a NaN that the row does not see
    is no excuse. An infinite value whose weight may round to zero may also give NaN.

    Args:
        problem: What was asked.
        answer: The answer to check.
        num_rows: How many rows to sample; the first and the last are always among them.
        seed: Seed of the sample.

    Raises:
        VerificationError: with batch, head, row, error and bound of the first row that disagrees.
    """
    if problem.differs_by_head:
        for where, part in problem.parts():
            verify_rows(part, Partial(*(t[where] for t in answer)), num_rows=num_rows, seed=seed)
        return
    seqlen_q, seqlen_kv = problem.query.shape[2], problem.key.shape[2]
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randint(max(seqlen_q, 1), (num_rows,), generator=generator, device="cpu")
    rows = sorted({0, seqlen_q - 1, *sample.tolist()} & set(range(seqlen_q)))
    if not rows:
        return
    index = torch.tensor(rows, device=problem.query.device)
    visible = visible_rows(problem, index)
    eps = torch.finfo(problem.query.dtype).eps
    eps_accumulation = torch.finfo(lse_dtype(problem.query.dtype)).eps
    group_size = problem.query.shape[1] // problem.key.shape[1]

    largest_factor = 1.0
    if problem.dropout is not None:
        sampled = [range(row, row + 1) for row in rows]
        words = problem.dropout.words(problem.query, sampled, [range(seqlen_kv)])
        largest_factor = problem.dropout.scale
    for batch in range(problem.query.shape[0]):
        for head in range(problem.query.shape[1]):
            query = problem.query[batch, head, index].double()
            key = problem.key[batch, head // group_size].double()
            value = problem.value[batch, head // group_size].double()
            scores = problem.scale * (query @ key.T)
            hidden = scores.masked_fill(~visible, -torch.inf)
            lse = hidden.logsumexp(dim=-1)
            weights = (hidden - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
            magnitudes = abs(problem.scale) * (query.abs() @ key.abs().T)
            seen = magnitudes.masked_fill(~(visible & scores.isfinite()), 0)
            largest_score = seen.amax(dim=-1) if seqlen_kv else scores.new_zeros(len(rows))
            lse_bound = 16 * eps_accumulation * (1 + largest_score) + eps
            finite = value.masked_fill(~value.isfinite(), 0)
            largest_values = _largest_of_visible(finite.abs(), visible)
            output = answer.output[batch, head, index].double()
            if problem.dropout is not None:
                of_head = words._replace(
                    multiplier=words.multiplier[batch, head], increment=words.increment[batch, head]
                )
                weights = weights * problem.dropout.kept(of_head) * problem.dropout.scale
            exact = weights @ finite
            if not value.isfinite().all():
                exact = exact + _sum_of_infinite(weights, value - finite, visible)
                faint = weights.masked_fill(weights < torch.finfo(problem.query.dtype).tiny, 0)
                may_vanish = _sum_of_infinite(faint, value - finite, visible).isnan()
                exact = exact.masked_fill(output.isnan() & may_vanish, torch.nan)
            note = "" if _is_finite(problem, scores, value) else _NOT_FINITE
            _compare_rows(
                "output",
                (batch, head),
                rows,
                output,
                exact,
                largest_factor * (16 * eps + lse_bound).unsqueeze(-1) * largest_values,
                note,
            )
            _compare_rows(
                "lse",
                (batch, head),
                rows,
                answer.lse[batch, head, index].double().unsqueeze(-1),
                lse.unsqueeze(-1),
                lse_bound.unsqueeze(-1),
                note,
            )


def visible_rows(problem: Problem, rows: torch.Tensor) -> torch.Tensor:
    """Say which keys some queries see, bool ``[len(rows), seqlen_kv]``.

    Args:
        problem: What was asked.
        rows: Query indices, int64 ``[len(rows)]``, on the device of the answer.
    """
    seqlen_q, seqlen_kv = problem.query.shape[2], problem.key.shape[2]
    if problem.bound_pattern is not None:
        masks = [problem.bound_pattern.to_mask(range(row, row + 1)) for row in rows.tolist()]
        return torch.from_numpy(np.concatenate(masks)).to(rows.device)
    if not problem.is_causal:
        return torch.ones(len(rows), seqlen_kv, dtype=torch.bool, device=rows.device)
    keys = torch.arange(seqlen_kv, device=rows.device)
    return keys <= rows.unsqueeze(1) + (seqlen_kv - seqlen_q)


def _is_finite(problem: Problem, scores: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether scores, as kernels accumulate them, and values are finite, hidden ones too."""
    largest = torch.finfo(lse_dtype(problem.query.dtype)).max
    return bool((scores.abs() <= largest).all() and value.isfinite().all())


def _largest_of_visible(value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each column that each row sees, 0 where it sees none."""
    none = value.new_zeros(1, value.shape[1])
    return torch.stack([torch.cat([none, value[sees]]).amax(dim=0) for sees in visible])


def _sum_of_infinite(
    weights: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Compute ``weights @ value`` over visible keys alone, where ``0 * inf`` and NaN are NaN."""
    rows = zip(weights, visible, strict=True)
    return torch.stack([(row[sees].unsqueeze(-1) * value[sees]).sum(dim=0) for row, sees in rows])


def _compare_rows(
    name: str,
    batch_and_head: tuple[int, int],
    rows: list[int],
    actual: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor,
    note: str,
) -> None:
    error = (actual - exact).abs()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    wrong = ~same & ~(error <= bound)
    if wrong.any():
        first = int(wrong.any(dim=-1).nonzero()[0])
        worst = int(error[first].masked_fill(~wrong[first], 0).argmax())
        raise VerificationError(
            f"{name} of batch {batch_and_head[0]}, head {batch_and_head[1]}, row {rows[first]} "
            f"is off by {error[first, worst]:.3g}, more than rounding explains "
            f"({bound[first, worst]:.3g}){note}"
        )
