"""Gradients of an attention problem, or the contribution of some of its query-key pairs."""

from typing import NamedTuple

from torch import Tensor

from cqs.partial import lse_dtype


class Gradients(NamedTuple):
    """Gradients of query, key and value.

    Their dtype is that of the tensors, or float32 (float64 for float64 tensors) for sums.
    Contributions of disjoint sets of pairs add up.
    """

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
        """Return zero gradients in the accumulation dtype, float32 or float64.

        Args:
            query: ``[batch, num_heads, rows, head_dim]``.
            key: ``[batch, num_kv_heads, rows, head_dim]``.
            value: ``[batch, num_kv_heads, rows, value_dim]``.
            device: Device of the gradients; ``None`` means that of the tensors.
        """
        dtype = lse_dtype(query.dtype)
        return cls(*(t.new_zeros(t.shape, dtype=dtype, device=device) for t in (query, key, value)))
