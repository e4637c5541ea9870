"""Fused kernels and the sign of the scale."""

import torch
from torch import Tensor


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale of the same scores, up to the sign of zero.

    Fused kernels hide keys by scores of -inf and scale afterwards, or divide by the scale: with a
    scale of 0 or less they return NaN or see what they should not.
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
