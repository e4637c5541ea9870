"""What fused kernels ask of their operands."""

import torch
from torch import Tensor

_MAX_GRID = 65535


def why_not_half_precision_on_gpu(query: Tensor, value: Tensor, head_dims: range) -> str | None:
    """Say why a CUDA library of 16-bit attention cannot take these tensors, or return None.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        head_dims: What the library takes, for both.
    """
    if query.device.type != "cuda":
        return f"needs CUDA tensors, got {query.device}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {query.dtype}"
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim != value_dim:
        return f"needs equal head_dim of query and value, got {head_dim} and {value_dim}"
    if head_dim not in head_dims:
        return (
            f"needs a head_dim that is a multiple of {head_dims.step} up to {head_dims[-1]}, "
            f"got {head_dim}"
        )
    if max(query.shape[:2]) > _MAX_GRID:
        return f"needs batch and heads up to {_MAX_GRID}, got {tuple(query.shape[:2])}"
    return None


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale of the same scores, up to the sign of zero.

    Fused kernels set masked scores to -inf before they scale, or divide by the scale. A scale of 0
    or less, or one that float32 rounds to 0, gives NaN there or unmasks pairs.
    """
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return 0 * query, 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def with_sign_of(scale: float, grad_query: Tensor) -> Tensor:
    """Turn the gradient of what :func:`with_positive_scale` returned into that of its query."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return scale * grad_query
    return grad_query if scale > 0 else -grad_query


def with_adjacent_columns(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose rows lie in one piece each: the same where they do, else copies."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
