"""Verification of a result: sampled rows are recomputed in float64."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product

import numpy as np
import torch
from torch import Tensor

from cqs.partial import Partial, lse_dtype, weighted_sum
from cqs.patterns import BoundPattern, sliding_window
from cqs.problem import Problem

_NOT_FINITE = "; some scores or values are not finite, which reaches rows that do not see them"

_FEW = 8
"""Bound on the roundings outside sums: scale, exponential, merge, split of float32 operands."""
_STATISTICAL = 8
"""The error of a sum of n terms is below ``_STATISTICAL * sqrt(n)`` unit roundoffs."""
_MOST = 700.0
"""Score errors above this are bounded by logarithms, because exp(710) overflows in float64."""


Head = Callable[[tuple[int, int]], Tensor]
"""Returns ``[seqlen, columns]``, or ``[seqlen]`` of an LSE, of a batch element and head."""


class VerificationError(ArithmeticError):
    """A sampled row deviates from the exact result by more than rounding explains."""


@torch.no_grad()
def verify_rows(problem: Problem, answer: Partial, *, num_rows: int = 32, seed: int = 0) -> None:
    """Compare sampled query rows with float64 attention, for every batch element and head.

    The error bound of each entry is a function of head_dim, the number of visible keys, and the
    magnitudes of scores and values; docs/exactness.md derives it.

    Where the exact result is NaN or infinite, ``answer`` must be so too; a NaN at a masked key does
    not excuse a NaN in the output. An infinite value whose weight may underflow to 0 may give NaN.

    Args:
        problem: The attention problem.
        answer: The output and LSE to check, of the shapes of :meth:`Problem.empty_answer`.
        num_rows: Number of rows to sample, with replacement; the first and last rows are added.
        seed: Random seed of the sample.

    Raises:
        VerificationError: A row deviates by more than its bound. The message gives batch, head,
            row, error and bound of the first such row.
    """
    tensors = problem.query, problem.key, problem.value, *answer
    rows = sample_rows(problem.query.shape[2], num_rows, seed)
    verify_heads(problem, [tensor.__getitem__ for tensor in tensors], rows)


@torch.no_grad()
def verify_heads(
    problem: Problem, heads: Sequence[Head], rows: Sequence[int], first: int = 0
) -> None:
    """Verify like :func:`verify_rows`, with one KV head and one of its query heads at a time.

    Args:
        problem: The attention problem, whose tensors are not read.
        heads: Functions that return heads of query, key, value, output and LSE. Those of key and
            value are called in turn, once for each element of :func:`kv_places`.
        rows: The rows to verify, ascending indices of the rows that the functions return.
        first: Position of the query in the first of those rows.

    Raises:
        VerificationError: A row deviates by more than its bound.
    """
    if not rows:
        return
    places = torch.tensor(rows, device=problem.query.device)
    positions = [first + row for row in rows]
    group_size = problem.query.shape[1] // problem.key.shape[1]
    cuts = zip(problem.cuts(), problem.parts(), strict=True)
    for (_, kv_cut), ((_, query_heads), part) in cuts:
        visible = visible_rows(part, places + first)
        for batch, kv_head in _places(problem.key, kv_cut):
            key, value = (read((batch, kv_head)) for read in heads[1:3])
            for head in range(problem.query.shape[1])[query_heads]:
                if head // group_size == kv_head:
                    place = batch, head
                    row_tensors = (heads[i](place)[places] for i in (0, 3, 4))
                    _verify_head(problem, place, positions, visible, *row_tensors, key, value)


def kv_places(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield batch element and KV head of the keys in the order in which they are verified."""
    return chain.from_iterable(_places(problem.key, kv_cut) for _, kv_cut in problem.cuts())


def _places(key: Tensor, kv_cut: tuple[slice, slice]) -> Iterator[tuple[int, int]]:
    row, kv_heads = kv_cut
    return product(range(key.shape[0])[row], range(key.shape[1])[kv_heads])


def sample_rows(seqlen_q: int, num_rows: int = 32, seed: int = 0) -> list[int]:
    """Return the first, the last and ``num_rows`` random rows, ascending, without repetition."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randint(max(seqlen_q, 1), (num_rows,), generator=generator, device="cpu")
    return sorted({0, seqlen_q - 1, *sample.tolist()} & set(range(seqlen_q)))


def _verify_head(
    problem: Problem,
    place: tuple[int, int],
    rows: Sequence[int],
    visible: Tensor,
    *tensors: Tensor,
) -> None:
    """Verify rows of a head.

    Args:
        problem: The attention problem, whose tensors are not read.
        place: Batch element and query head.
        rows: Positions of the queries, ascending.
        visible: The attention mask, bool ``[rows, seqlen_kv]``.
        *tensors: Query, output and LSE of the rows, then all keys and values of the head.

    Raises:
        VerificationError: A row deviates by more than its bound.
    """
    query, output, found_lse, key, value = (tensor.double() for tensor in tensors)
    scores = problem.scale * (query @ key.T)
    magnitudes = abs(problem.scale) * (query.abs() @ key.abs().T)
    if problem.terms is not None:
        head_terms = problem.terms.part(*(slice(index, index + 1) for index in place))
        sampled = [range(row, row + 1) for row in rows]
        pairs = head_terms.pair_terms(query.device, sampled, [range(len(key))])
        scores, magnitudes = (
            one[0, 0] for one in pairs.with_errors(scores[None, None], magnitudes[None, None])
        )
    masked = scores.masked_fill(~visible, -torch.inf)
    lse, sink = masked.logsumexp(dim=-1), query.new_tensor(0.0)
    if problem.sinks is not None:
        sink = problem.sinks[place[1]].to(sink)
        lse = torch.logaddexp(lse, sink)
    log_weights = masked - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    weights = log_weights.exp()
    factors: Tensor | float = 1.0
    magnitudes.masked_fill_(~(visible & scores.isfinite()), 0)
    finite = value.masked_fill(~value.isfinite(), 0)
    if problem.dropout is not None:
        dropout, sampled = problem.dropout.moved(*place), [range(row, row + 1) for row in rows]
        bits = dropout.random_bits(query[None, None], sampled, [range(len(key))])
        factors = dropout.kept(bits)[0, 0].double() * dropout.scale
        weights = weights * factors
    exact = weighted_sum(weights, finite)
    if not value.isfinite().all():
        exact = exact + _sum_of_infinite(weights, value - finite, visible)
        # Kernels may flush a subnormal weight to 0, and 0 * inf is NaN.
        faint = weights.masked_fill(weights < torch.finfo(problem.query.dtype).tiny, 0)
        may_vanish = _sum_of_infinite(faint, value - finite, visible).isnan()
        exact = exact.masked_fill(output.isnan() & may_vanish, torch.nan)
    # Also of masked pairs, and as kernels accumulate the scores.
    largest = torch.finfo(lse_dtype(problem.query.dtype)).max
    is_finite = (scores.abs() <= largest).all() and value.isfinite().all()
    note = "" if is_finite else _NOT_FINITE
    bound, bound_lse = _bounds(problem, log_weights, magnitudes, sink, visible, factors, finite)
    merged = lse.masked_fill(found_lse.isnan() & (lse == torch.inf), torch.nan)  # by a merge
    lses = "lse", found_lse.unsqueeze(-1), merged.unsqueeze(-1), bound_lse
    for name, result, right, limit in (("output", output, exact, bound), lses):
        error = (result - right).abs()
        is_same = (result == right) | (result.isnan() & right.isnan())
        wrong = ~is_same & ~(error <= limit)
        if wrong.any():
            first = int(wrong.any(dim=-1).nonzero()[0])
            worst = int(error[first].masked_fill(~wrong[first], 0).argmax())
            raise VerificationError(
                f"{name} of batch {place[0]}, head {place[1]}, row {rows[first]} deviates by "
                f"{error[first, worst]:.3g}, more than rounding explains "
                f"({limit[first, worst]:.3g}){note}"
            )


def _bounds(
    problem: Problem,
    log_weights: Tensor,
    magnitudes: Tensor,
    sink: Tensor,
    visible: Tensor,
    factors: Tensor | float,
    finite: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return bounds on the absolute errors of sampled rows of a head; see docs/exactness.md.

    Args:
        problem: The problem, which determines dtype and head_dim.
        log_weights: Natural logarithms of the softmax weights, float64 ``[rows, seqlen_kv]``.
        magnitudes: What the rounding errors of the scores are proportional to: ``abs(scale) *
            abs(query) @ abs(key)`` without score terms, 0 for pairs that are masked out, float64
            ``[rows, seqlen_kv]``.
        sink: The sink of the head, 0 without one.
        visible: The attention mask, bool ``[rows, seqlen_kv]``.
        factors: Factors of dropout on the softmax weights, float64 ``[rows, seqlen_kv]``, or 1
            without dropout.
        finite: Values, with 0 for those that are not finite, float64 ``[seqlen_kv, value_dim]``.

    Returns:
        The bounds of the output, float64 ``[rows, value_dim]``, and of the LSE, float64
        ``[rows, 1]``.
    """
    dtype = torch.finfo(problem.query.dtype)
    accumulation = torch.finfo(lse_dtype(problem.query.dtype))
    # For float64 inputs the check itself rounds as much as the result does.
    own_share = 2 if problem.query.dtype == torch.float64 else 1
    unit, unit_of_dtype = own_share * accumulation.eps / 2, own_share * dtype.eps / 2
    num_keys = visible.sum(dim=-1, keepdim=True).double()
    zeros = torch.zeros_like(num_keys)  # the maxima of rows without keys
    largest = torch.cat([zeros + sink.abs(), magnitudes], dim=-1).amax(-1, keepdim=True)
    scores = (problem.query.shape[-1] + _FEW) * unit * magnitudes
    scores = scores + _FEW * unit * (1 + largest + num_keys.clamp(min=1).log()) + unit_of_dtype
    weights = log_weights.exp()
    mean = (weights * scores.clamp(max=_MOST).expm1()).sum(dim=-1, keepdim=True).log1p()
    is_large = (scores > _MOST).any(dim=-1, keepdim=True)
    mean = (log_weights + scores).logsumexp(dim=-1, keepdim=True).where(is_large, mean)
    changes = scores + mean
    moderate = weights * changes.clamp(max=_MOST).expm1()
    large = (log_weights + changes).clamp(max=0).exp()
    weight_errors = large.where(changes > _MOST, moderate).clamp(max=1)
    summation = _STATISTICAL * unit * num_keys.sqrt()
    sum_errors = weights * factors * (2 * summation + 4 * unit_of_dtype)
    # A subnormal number has an absolute error.
    tiny = accumulation.tiny + dtype.tiny * dtype.eps
    largest_weight = torch.cat([zeros, weights], dim=-1).amax(-1, keepdim=True)
    in_sum = largest_weight * (visible.double() @ (1 + finite.abs()))
    output_error = (factors * weight_errors + sum_errors) @ finite.abs() + tiny * (2 + in_sum)
    return output_error, mean + summation + 2 * unit * sink.abs()


def visible_rows(problem: Problem, rows: Tensor) -> Tensor:
    """Return rows of the attention mask, bool ``[len(rows), seqlen_kv]``, true for live pairs.

    Args:
        problem: The attention problem, without per-head patterns.
        rows: Query indices, int64 ``[len(rows)]``; the mask is on their device.
    """
    bound = bound_mask(problem)
    masks = [bound.to_mask(range(row, row + 1)) for row in rows.tolist()]
    return torch.from_numpy(np.concatenate(masks)).to(rows.device)


def bound_mask(problem: Problem) -> BoundPattern:
    """Return the pattern of a problem, without per-head patterns, also if it is dense."""
    plain = sliding_window(None, 0 if problem.is_causal else None)
    return problem.bound_pattern or plain.bind(problem.query.shape[2], problem.key.shape[2])


def _sum_of_infinite(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Compute ``weights @ value`` over the visible keys only, so that masked NaNs do not count."""
    rows = zip(weights, visible, strict=True)
    return torch.stack([(row[sees].unsqueeze(-1) * value[sees]).sum(dim=0) for row, sees in rows])
