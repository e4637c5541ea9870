"""PyTorch's fused attention for CPUs, through the operator that returns its lse."""

import torch
from torch import Tensor

from cqs.partial import Partial
from cqs.worker.operands import with_adjacent_columns, with_positive_scale, with_sign_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_KEYS = 64
"""Below one vector of keys (16, seen with AVX-512) the kernel loses NaN; this leaves a margin."""


def why_not_cpu(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Say why PyTorch's fused CPU kernel cannot take these tensors, or return None if it can."""
    if query.device.type != "cpu":
        return f"needs CPU tensors, got {query.device}"
    if query.dtype not in _DTYPES:
        return f"needs float32, bfloat16 or float16, got {query.dtype}"
    if value.shape[-1] != query.shape[-1]:
        return (
            f"needs equal head_dim of query and value, got {query.shape[-1]} and {value.shape[-1]}"
        )
    return None


def attend_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
    visible: Tensor | None = None,
) -> Partial:
    """Attend with the fused CPU kernel; arguments as for the reference, none of them empty.

    The kernel reads rows as if their elements were adjacent, whatever the stride says, so other
    layouts are copied first; and with few keys it loses a NaN of the query, which is put back.
    """
    query, scale = with_positive_scale(query, scale)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *with_adjacent_columns(query, key, value),
        0.0,
        is_causal,
        attn_mask=_addend(visible, query),
        scale=scale,
    )
    if key.shape[2] < FEW_KEYS:
        smallest, largest = query.aminmax(dim=-1)
        broken = ~(smallest.isfinite() & largest.isfinite())
        output = output.masked_fill(broken.unsqueeze(-1), torch.nan)
        lse = lse.masked_fill(broken, torch.nan)
    if visible is not None:
        blind = ~visible.any(dim=-1)
        output.masked_fill_(blind.unsqueeze(-1), 0)
        lse = lse.masked_fill(blind, -torch.inf)
    return Partial(output, lse)


def gradients_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with the fused CPU kernel; arguments as for the reference."""
    positive_query, positive_scale = with_positive_scale(query, scale)
    if visible is not None:  # NaN in a query that sees nothing is nobody's business
        positive_query = positive_query.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
    grad_query, grad_key, grad_value = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *with_adjacent_columns(grad_output, positive_query, key, value, output),
            lse,
            0.0,
            is_causal,
            attn_mask=_addend(visible, query),
            scale=positive_scale,
        )
    )
    return with_sign_of(scale, grad_query), grad_key, grad_value


def _addend(visible: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what the kernel adds to the scores, so that hidden pairs get -inf."""
    if visible is None:
        return None
    return like.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
