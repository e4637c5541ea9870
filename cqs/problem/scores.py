"""Options of the scores of attention: sinks and a soft cap."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cqs.partial import Partial


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores and softmax of an attention call differ from the scaled products alone.

    Example:
        >>> import cqs, torch
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> output = cqs.attention(q, k, v, scores=Scores(sinks=torch.zeros(2)))
    """

    sinks: Tensor | None = None
    """``[num_heads]``, float64, float32, bfloat16 or float16, on the device of the query: a score
    of every query head that each row's softmax includes although no value belongs to it
    (attention sinks of gpt-oss, arXiv 2508.10925). May require gradients."""
    softcap: float | None = None
    """Positive number c that replaces each scaled product s by ``c * tanh(s / c)`` (Gemma 2, arXiv
    2408.00118); ``None`` caps nothing. The backend ``reference`` computes it, which stores the
    scores of a task and is slow."""


def take_apart(scores: Scores | None) -> tuple[Tensor | None, float | None]:
    """Return sinks and soft cap, or raise TypeError; both are ``None`` without scores."""
    if scores is None:
        return None, None
    if not isinstance(scores, Scores):
        raise TypeError(f"scores must be cqs.Scores or None, got {type(scores).__name__}")
    return scores.sinks, scores.softcap


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
    of_rows = sinks.to(lse.dtype).unsqueeze(-1)
    share = torch.sigmoid(lse - of_rows).masked_fill_(lse == -torch.inf, 0)
    output.mul_(share.unsqueeze(-1))
    torch.logaddexp(lse, of_rows, out=lse)
    return answer


def sinks_gradient(sinks: Tensor, answer: Partial, grad_output: Tensor) -> Tensor:
    """Return the gradient of sinks, ``-sum(exp(sink - lse) * rowsum(grad_output * output))``.

    Args:
        sinks: ``[num_heads]``.
        answer: Output and LSE of :func:`add_sinks`.
        grad_output: Gradient of the output, in its shape.
    """
    output, lse = answer
    gradient = torch.empty_like(sinks, dtype=lse.dtype)
    for head in range(len(sinks)):  # products in the accumulation dtype, of one head at a time
        products = grad_output[:, head].to(lse.dtype) * output[:, head]
        weights = torch.exp(sinks[head].to(lse.dtype) - lse[:, head])
        weights.masked_fill_(lse[:, head] == -torch.inf, 0)
        gradient[head] = -(weights * products.sum(-1)).sum()
    return gradient.to(sinks.dtype)
