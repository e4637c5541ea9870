"""Backend ``reference``: the definition of one attention call, in plain PyTorch.

Shape suffixes: B batch, G key/value heads, R query heads per key/value head, Q queries, K keys.
"""

import torch
from torch import Tensor

from cqs.partial import Partial, lse_dtype, weighted_sum
from cqs.worker.backend import CallBackend
from cqs.worker.operands import Operands

_STRIP_SCORES = 2**24
"""Most scores of a strip, if one row has fewer."""


class _Reference(CallBackend):
    """The definition in plain PyTorch; supports everything that the public interface accepts."""

    name = "reference"
    supports_dropout = supports_patterns = True
    supported_terms = frozenset(
        (
            *("softcap", "alibi_slopes", "bias", "score_mod"),
            *("gradient of bias", "gradient of score_mod"),
        )
    )

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        return None

    def attend(self, operands: Operands) -> Partial:
        """Compute ``softmax(scale * query @ key^T) @ value`` and its LSE in plain PyTorch.

        Score terms, if any, apply to the scores before the softmax.

        The computation is in float32 (float64 for float64 tensors) and stores the whole score
        matrix: O(seqlen_q * seqlen_kv) memory. With score terms it stores strips of the matrix.
        """
        if strips := _query_strips(operands):
            parts = [self.attend(operands.rows(rows)) for rows in strips]
            return Partial(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))
        query, _, value, is_causal, _, visible, kept, keep_scale, *_ = operands
        scores_BGRQK = _scores(operands)
        dtype = scores_BGRQK.dtype
        lse_BGRQ = scores_BGRQK.logsumexp(dim=-1)
        # Scores of -inf give a weight of 0, also if a row has no others: 0 times NaN stays NaN.
        is_blind_BGRQ1 = (lse_BGRQ == -torch.inf).unsqueeze(-1)
        weights_BGRQK = scores_BGRQK.softmax(dim=-1).masked_fill_(is_blind_BGRQ1, 0)
        if kept is not None:
            weights_BGRQK.masked_fill_(~kept.view_as(weights_BGRQK), 0).mul_(keep_scale)
        output = weighted_sum(weights_BGRQK, value.to(dtype).unsqueeze(2))
        is_masked = is_causal or visible is not None
        if is_masked and not output.sum().isfinite():  # NaN that is masked out has leaked
            seen = ~_masked_out(scores_BGRQK, visible)
            output = _weigh_visible(weights_BGRQK, value.to(dtype).unsqueeze(2), seen)
        return Partial(output.flatten(1, 2).to(query.dtype), lse_BGRQ.flatten(1, 2))

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients in float32 (float64 for float64 tensors).

        With the LSE and the output of the *whole* problem, ``P = exp(scores - lse)`` are the
        probabilities of these pairs among all keys, and ``dS = P * (dP - delta)`` with
        ``delta = sum(output * grad_output)`` (Dao et al., FlashAttention, 2022, appendix B).
        """
        if strips := _query_strips(operands):
            query_gradients, sums = [], list[Tensor]()
            for rows in strips:
                row_tensors = (t[:, :, rows] for t in (grad_output, output, lse))
                gradients = self.differentiate(operands.rows(rows), *row_tensors)
                query_gradients.append(gradients[0])
                sums = list(map(torch.add, sums, gradients[1:])) if sums else list(gradients[1:])
            return torch.cat(query_gradients, dim=2), sums[0], sums[1]
        query, key, value, is_causal, scale, visible, kept, keep_scale, terms, _ = operands
        scores_BGRQK = _scaled(operands)
        dtype, groups = scores_BGRQK.dtype, (key.shape[1], -1)
        key_BG1KD, value_BG1KD = (tensor.to(dtype).unsqueeze(2) for tensor in (key, value))
        query_BGRQD, grad_BGRQD, output_BGRQD, lse_BGRQ = (
            tensor.to(dtype).unflatten(1, groups) for tensor in (query, grad_output, output, lse)
        )
        delta_BGRQ1 = (output_BGRQD * grad_BGRQD).sum(-1, keepdim=True)
        grad_p_BGRQK = grad_BGRQD @ value_BG1KD.mT
        factors_BGRQK: Tensor | float = 1.0
        if kept is not None:
            factors_BGRQK = keep_scale * kept.view_as(scores_BGRQK).to(dtype)
            grad_p_BGRQK = grad_p_BGRQK * factors_BGRQK
        kept_BGRQK = scores_BGRQK

        def grad_of(scores_BGRQK: Tensor) -> Tensor:
            nonlocal kept_BGRQK
            masked_BGRQK = _mask_out(scores_BGRQK, is_causal, visible)
            p_BGRQK = (masked_BGRQK - lse_BGRQ.unsqueeze(-1)).exp()
            kept_BGRQK = p_BGRQK if kept is None else p_BGRQK * factors_BGRQK
            gradient: Tensor = p_BGRQK * (grad_p_BGRQK - delta_BGRQ1)
            return gradient

        if terms is None:
            grad_scores_BGRQK = grad_of(scores_BGRQK)
        else:
            shape = scores_BGRQK.shape
            grad_scores_BHQK = terms.differentiate(
                scores_BGRQK.flatten(1, 2), lambda scores: grad_of(scores.view(shape)).flatten(1, 2)
            )
            grad_scores_BGRQK = grad_scores_BHQK.view(shape)
        return (
            scale * (grad_scores_BGRQK @ key_BG1KD).flatten(1, 2),
            scale * (grad_scores_BGRQK.mT @ query_BGRQD).sum(2),
            (kept_BGRQK.mT @ grad_BGRQD).sum(2),
        )


def _query_strips(operands: Operands) -> list[slice]:
    """Return the queries of each strip of a call with score terms; none if one strip suffices."""
    number, seqlen_q = max(_STRIP_SCORES // operands.scores_of_row, 1), operands.query.shape[2]
    if operands.terms is None or seqlen_q <= number:
        return []
    return [slice(first, first + number) for first in range(0, seqlen_q, number)]


def _scores(operands: Operands) -> Tensor:
    """Return the scores after all terms and the mask, ``[B, G, R, Q, K]``."""
    scores_BGRQK = _scaled(operands)
    if operands.terms is not None:
        scores_BHQK = operands.terms.apply(scores_BGRQK.flatten(1, 2))
        scores_BGRQK = scores_BHQK.view_as(scores_BGRQK)
    return _mask_out(scores_BGRQK, operands.is_causal, operands.visible)


def _scaled(operands: Operands) -> Tensor:
    """Return ``scale * query @ key^T``, ``[B, G, R, Q, K]``."""
    query, key, _, _, scale, *_ = operands
    dtype = lse_dtype(query.dtype)
    query_BGRQD = query.to(dtype).unflatten(1, (key.shape[1], -1))
    scores_BGRQK: Tensor = scale * query_BGRQD @ key.to(dtype).unsqueeze(2).mT
    return scores_BGRQK


def _mask_out(scores: Tensor, is_causal: bool, visible: Tensor | None) -> Tensor:
    """Set the scores of pairs that are masked out to -inf, in place."""
    if is_causal or visible is not None:
        scores.masked_fill_(_masked_out(scores, visible), -torch.inf)
    return scores


def _masked_out(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Return bool ``[seqlen_q, seqlen_kv]``, the pairs outside of a mask or a causal square."""
    if visible is not None:
        return ~visible
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


def _weigh_visible(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Compute ``weights @ value`` over visible pairs alone, where ``0 * inf`` and NaN are NaN."""

    def any_of(pairs: Tensor, entries: Tensor) -> Tensor:
        return pairs.to(weights.dtype) @ entries.to(weights.dtype) > 0

    has_weight = visible & (weights > 0)
    output = weighted_sum(weights, value.nan_to_num(0.0, 0.0, 0.0))
    for infinity in (torch.inf, -torch.inf):
        is_reached = any_of(has_weight, value == infinity)
        output += torch.zeros_like(output).masked_fill_(is_reached, infinity)
    is_nan = any_of(visible, value.isnan()) | any_of(visible & ~has_weight, value.isinf())
    return output.masked_fill_(is_nan, torch.nan)


REFERENCE = _Reference()
