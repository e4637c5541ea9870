"""Partial outputs and gradients, the values that worker and tiler exchange."""

from typing import NamedTuple

import torch
from torch import Tensor

SUM_BLOCK = 4096
"""Keys per matrix product of :func:`weighted_sum`."""


class AttentionOutput(NamedTuple):
    """The result of attention with ``return_lse=True``."""

    output: Tensor
    """``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of the query."""
    lse: Tensor
    """``[batch, num_heads, seqlen_q]``, float32 (float64 for float64 queries): the natural
    logarithm of the sum of the exponentials of a query's scores; -inf if it attends to no key."""


class Partial(NamedTuple):
    """A partial output: attention of some queries over some keys."""

    output: Tensor
    """``[batch, num_heads, seqlen_q, value_dim]``, normalised by its own softmax denominator."""
    lse: Tensor
    """``[batch, num_heads, seqlen_q]``, float32 (float64 for float64 outputs): the natural
    logarithm of the softmax denominator. A query that attends to no key has -inf and output 0."""

    def to_result(self, return_lse: bool) -> Tensor | AttentionOutput:
        """Return the output for the caller, with the LSE if ``return_lse``."""
        return AttentionOutput(*self) if return_lse else self.output


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and LSEs: float64 for float64, float32 for narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Compute ``weights @ value`` in blocks of 4096 keys.

    BLAS libraries may accumulate one key after another; blocks keep the rounding error small.

    Args:
        weights: ``[..., seqlen_q, seqlen_kv]``.
        value: ``[..., seqlen_kv, value_dim]``, in the dtype of ``weights``. Leading dimensions
            broadcast.

    Returns:
        ``[..., seqlen_q, value_dim]``.
    """
    blocks = zip(weights.split(SUM_BLOCK, dim=-1), value.split(SUM_BLOCK, dim=-2), strict=True)
    products = (block @ of_keys for block, of_keys in blocks)
    total: Tensor = next(products)
    for product in products:
        total += product
    return total


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


def check_partial(partial: Partial, answer: Partial, num_rows: int, name: str) -> None:
    """Raise ValueError unless ``partial`` has ``num_rows`` rows of the shape of ``answer``.

    The dtypes and the device must agree, except that its output may have the dtype of the LSE,
    because partial outputs may stay unrounded.
    """
    lse_dtype = answer.lse.dtype
    for field, got, want in zip(Partial._fields, partial, answer, strict=True):
        shape = (*want.shape[:2], num_rows, *want.shape[3:])
        has_dtype = got.dtype == want.dtype or got.dtype == lse_dtype
        if not has_dtype or got.shape != shape or got.device != want.device:
            raise ValueError(
                f"{name}: {field} must be {shape} {want.dtype} on {want.device}, "
                f"got {tuple(got.shape)} {got.dtype} on {got.device}"
            )
