"""What fused kernels ask of their operands."""

import torch
from torch import Tensor


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale of the same scores, up to the sign of zero.

    Fused kernels hide keys by scores of -inf and scale afterwards, or divide by the scale: with a
    scale of 0 or less, or one that float32 rounds to 0, they return NaN or see too much.
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
