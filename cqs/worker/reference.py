"""The definition of one attention call; every other backend is judged by it.

Shape suffixes: B batch, G key/value heads, R query heads per key/value head, Q queries, K keys.
"""

import torch
from torch import Tensor

from cqs.partial import Partial, lse_dtype


def why_not_reference(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return None: the reference takes everything that the public interface accepts."""
    return None


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> Partial:
    """Compute ``softmax(scale * query @ key^T) @ value`` and its lse in plain PyTorch.

    Runs in float32 (float64 for float64) and holds the whole score matrix.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``, ``seqlen_kv >= 1``; ``num_heads`` is a
            multiple of ``num_kv_heads`` and consecutive query heads share one.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        is_causal: The block is square and query i sees the keys 0..i.
        scale: Factor on the scores.
    """
    dtype = lse_dtype(query.dtype)
    query_BGRQD = query.to(dtype).unflatten(1, (key.shape[1], -1))
    scores_BGRQK = scale * query_BGRQD @ key.to(dtype).unsqueeze(2).mT
    if is_causal:
        hidden = torch.ones(scores_BGRQK.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores_BGRQK.masked_fill_(hidden, -torch.inf)
    lse_BGRQ = scores_BGRQK.logsumexp(dim=-1)
    output = scores_BGRQK.softmax(dim=-1) @ value.to(dtype).unsqueeze(2)
    output = output.masked_fill((lse_BGRQ == -torch.inf).unsqueeze(-1), 0)
    return Partial(output.flatten(1, 2).to(query.dtype), lse_BGRQ.flatten(1, 2))
