"""Options of the scores of attention: sinks, soft cap, ALiBi, bias and score functions."""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from cqs.arguments import to_float
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.problem.score_terms import Reads, ScoreMod, ScoreTerms
from cqs.problem.tensors import check_kind, dense_value, with_four_dimensions

_LEAST_CAP = 1e-30
"""Smallest soft cap; kernels compute it and its reciprocal in float32."""


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores and softmax of an attention call differ from the scaled products alone.

    The terms apply to each scaled product in this order: soft cap, ALiBi, bias, score function.
    On a GPU a score function together with a sparse pattern, and the gradients of bias and slopes
    on every device, are computed by the slow backend ``reference``; see docs/scores.md.

    Example:
        >>> import cqs, torch
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> output = cqs.attention(q, k, v, scores=Scores(sinks=torch.zeros(2)))
    """

    sinks: Tensor | None = None
    """``[num_heads]``, float64, float32, bfloat16 or float16, on the device of the query: a score
    of every query head that each row's softmax includes although no value belongs to it
    (attention sinks of gpt-oss, arXiv 2508.10925). A sink of +inf counts as the largest number of
    its dtype. May require gradients."""
    softcap: float | None = None
    """Positive number c that replaces each scaled product s by ``c * tanh(s / c)`` (Gemma 2, arXiv
    2408.00118); ``None`` caps nothing."""
    alibi_slopes: Tensor | None = None
    """``[num_heads]`` or ``[batch, num_heads]``, of a floating dtype, on the device of the query:
    ``-slope * abs(i + seqlen_kv - seqlen_q - j)`` is added to the score of query i and key j
    (ALiBi, arXiv 2108.12409). May require gradients."""
    bias: Tensor | None = None
    """Added to the scores: float64, float32, bfloat16 or float16, broadcastable to ``[batch,
    num_heads, seqlen_q, seqlen_kv]``, on the device of the query. May require gradients."""
    score_mod: ScoreMod | None = None
    """Function of score, batch element, query head, query and key, scalar tensors, that returns
    another score, as of PyTorch's FlexAttention. Tensors that it reads may require gradients."""


def take_apart(scores: Scores | None) -> tuple[tuple[Tensor | None, ...], float | None, bool, bool]:
    """Return the scores for the arguments of an operator, or raise TypeError.

    Returns:
        Sinks, slopes and bias; the soft cap; whether the gradient of the bias is required; and
        whether no operator computes the scores: a score function, or gradients of slopes.
    """
    if scores is None:
        return (None, None, None), None, False, False
    check_is_scores(scores)
    tensors = scores.sinks, scores.alibi_slopes, scores.bias
    is_eager = scores.score_mod is not None or requires_grad(scores.alibi_slopes)
    return tensors, scores.softcap, requires_grad(scores.bias), is_eager


def check_scores(
    scores: Scores, query: Tensor, seqlen_kv: int | None
) -> tuple[Tensor | None, ScoreTerms | None]:
    """Return the sinks and the terms of a call, ``None`` without any.

    Args:
        scores: The argument.
        query: The checked query, ``[batch, num_heads, seqlen_q, head_dim]``.
        seqlen_kv: Number of keys; ``None`` if it is not known.

    Raises:
        TypeError: An option has the wrong type or dtype.
        ValueError: An option does not fit the tensors.
    """
    check_is_scores(scores)
    sinks = _check_tensor("sinks", scores.sinks, query)
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"scores.sinks must be [num_heads], [{query.shape[1]}], got {list(sinks.shape)}"
        )
    seqlen_q = query.shape[2]
    reads = find_reads(scores.score_mod, query)
    captured = () if reads is None else reads.leaves
    slopes = scores.alibi_slopes
    terms = ScoreTerms(
        softcap=_check_softcap(scores.softcap),
        alibi_slopes=_check_slopes(slopes, query),
        bias=_check_bias(scores.bias, query, seqlen_kv),
        score_mod=_check_score_mod(scores.score_mod),
        distance=0 if seqlen_kv is None else seqlen_kv - seqlen_q,
        captured=(*captured, slopes) if slopes is not None and requires_grad(slopes) else captured,
        slopes_require_grad=requires_grad(slopes),
        read=() if reads is None else reads.tensors,
        bias_requires_grad=requires_grad(scores.bias),
    )
    if sinks is not None:  # of +inf: the limit, with gradients of 0
        sinks = sinks.clamp(max=torch.finfo(sinks.dtype).max)
    return sinks, terms if terms.names else None


def check_is_scores(scores: Scores) -> None:
    """Raise TypeError unless ``scores`` is :class:`Scores`."""
    if not isinstance(scores, Scores):
        raise TypeError(f"scores must be cqs.Scores or None, got {type(scores).__name__}")


def find_reads(score_mod: ScoreMod | None, like: Tensor) -> Reads | None:
    """Return what a score function reads if gradients are enabled, else ``None``."""
    return Reads(score_mod, like) if callable(score_mod) and torch.is_grad_enabled() else None


def requires_grad(tensor: Tensor | None) -> bool:
    """Return whether autograd records operations on a tensor."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _check_tensor(name: str, tensor: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a tensor of the scores, or raise TypeError or ValueError."""
    if tensor is None:
        return None
    tensor = dense_value(f"scores.{name}", tensor)
    check_kind(f"scores.{name}", tensor, query.device)
    return tensor


def _check_softcap(softcap: float | None) -> float:
    """Return the soft cap of a call, 0 for none, or raise TypeError or ValueError."""
    if softcap is None:
        return 0.0
    number = to_float(softcap, "scores.softcap must be a number or None")
    if not _LEAST_CAP <= number <= 1 / _LEAST_CAP:
        raise ValueError(
            f"scores.softcap must be between {_LEAST_CAP:g} and {1 / _LEAST_CAP:g}, got {softcap}"
        )
    return number


def _check_slopes(slopes: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the slopes of ALiBi, ``[1 or batch, num_heads]``, in the accumulation dtype."""
    slopes = _check_tensor("alibi_slopes", slopes, query)
    if slopes is None:
        return None
    batch, num_heads, *_ = query.shape
    if tuple(slopes.shape) not in ((num_heads,), (1, num_heads), (batch, num_heads)):
        raise ValueError(
            f"scores.alibi_slopes must be [num_heads] or [batch, num_heads], [{num_heads}] or "
            f"[{batch}, {num_heads}], got {list(slopes.shape)}"
        )
    return slopes.detach().to(lse_dtype(query.dtype)).view(-1, num_heads)


def _check_bias(bias: Tensor | None, query: Tensor, seqlen_kv: int | None) -> Tensor | None:
    """Return the bias of a call with four dimensions, or raise TypeError or ValueError."""
    if isinstance(bias, Tensor) and bias.dtype == torch.bool:
        raise TypeError(
            "scores.bias must be floating-point, got torch.bool: pass "
            "pattern=cqs.patterns.from_mask(mask)"
        )
    bias = _check_tensor("bias", bias, query)
    if bias is None:
        return None
    num_keys = (1, *bias.shape)[-1] if seqlen_kv is None else seqlen_kv
    return with_four_dimensions("scores.bias", bias, (*query.shape[:3], num_keys))


def _check_score_mod(score_mod: Any) -> Any:
    """Return a function of five arguments, or ``None``, or raise TypeError."""
    if score_mod is None:
        return None
    try:
        signature(score_mod).bind(*range(5))
    except ValueError:  # a function of C has no signature
        return score_mod
    except TypeError as error:
        raise TypeError(
            "scores.score_mod must be None or a function of score, batch element, head, query and "
            f"key, got {score_mod!r}: {error}"
        ) from None
    return score_mod


@torch.no_grad()
def add_sinks(answer: Partial, sinks: Tensor) -> Partial:
    """Let sinks join the softmax of rows that have all their keys.

    ``output * sigmoid(lse - sink)`` and ``logaddexp(lse, sink)`` are the output and LSE of a
    softmax with one more score. Given these, the backward pass without sinks is exact.

    Args:
        answer: Output ``[batch, num_heads, rows, value_dim]`` and LSE; overwritten.
        sinks: ``[num_heads]``.

    Returns:
        ``answer``.
    """
    output, lse = answer
    row_sinks = sinks.to(lse.dtype).unsqueeze(-1)
    share = torch.sigmoid(lse - row_sinks).masked_fill_(lse == -torch.inf, 0)
    output.mul_(share.unsqueeze(-1))
    torch.logaddexp(lse, row_sinks, out=lse)
    return answer


def merge_sinks(answer: Partial, sinks: Tensor) -> Partial:
    """Do the same as :func:`add_sinks` with bits that depend on no other row.

    PyTorch computes the last numbers of a tensor by other functions than the numbers before them,
    except for the exponential and logarithm of contiguous tensors, by which parts are merged.
    """
    output, lse = answer
    nothing = output.new_zeros((1, 1, 1, output.shape[3])).expand_as(output)
    row_sinks = sinks.to(lse.dtype).unsqueeze(-1).expand_as(lse)
    rows = slice(None)
    merge_rows(answer, [(answer, rows), (Partial(nothing, row_sinks), rows)])
    return answer


def sink_rows(sinks: Tensor, answer: Partial, grad_output: Tensor) -> Tensor:
    """Return what each query adds to the negative gradient of the sinks.

    That is ``exp(sink - lse) * rowsum(grad_output * output)``.

    Args:
        sinks: ``[num_heads]``.
        answer: Output and LSE of :func:`add_sinks`.
        grad_output: Gradient of the output, in its shape.

    Returns:
        ``[num_heads, batch, seqlen_q]``, in the dtype of the LSE.
    """
    output, lse = answer
    rows = lse.new_empty((len(sinks), len(lse), lse.shape[2]))
    for head in range(len(sinks)):  # products in the accumulation dtype, of one head at a time
        products = grad_output[:, head].to(lse.dtype) * output[:, head]
        weights = torch.exp(sinks[head].to(lse.dtype) - lse[:, head])
        weights.masked_fill_(lse[:, head] == -torch.inf, 0)
        torch.mul(weights, products.sum(-1), out=rows[head])
    return rows


def sinks_gradient(sinks: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient of sinks, given the result of :func:`sink_rows`."""
    return -torch.stack([head_rows.sum() for head_rows in rows]).to(sinks.dtype)
