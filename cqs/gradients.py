"""Gradients of one attention problem, or of a part of it: sums over pairs, so parts add up."""

from typing import NamedTuple

from torch import Tensor

from cqs.partial import lse_dtype


class Gradients(NamedTuple):
    """Of some queries, keys and values, in float32 (float64 for float64 tensors) or their dtype."""

    query: Tensor
    """``[batch, num_heads, rows, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, rows, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, rows, value_dim]``."""

    @classmethod
    def zeros(
        cls, query: Tensor, key: Tensor, value: Tensor, device: str | None = None
    ) -> "Gradients":
        """Allocate the gradients of these tensors, on their device if ``device`` is None."""
        dtype = lse_dtype(query.dtype)
        return cls(*(t.new_zeros(t.shape, dtype=dtype, device=device) for t in (query, key, value)))
