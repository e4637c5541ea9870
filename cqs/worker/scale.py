"""Fused kernels and the sign of the scale."""

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
