"""Backend ``cpu``: PyTorch's fused CPU attention, through the operator that returns its LSE."""

from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from cqs.partial import Partial
from cqs.worker.backend import CallBackend
from cqs.worker.operands import (
    MIN_SCALE,
    Operands,
    mask_addend,
    with_adjacent_columns,
    with_positive_scale,
    with_sign_of,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 32
"""The kernel processes queries in blocks of 32, 64 or 256 rows."""
_LEAST_ROWS = 4
"""Fewest rows of a block: with fewer, MKL accumulates all keys in sequence and errors are ten times
as large."""
_LEAST_COLUMNS = 16
"""Fewest columns: with 2 to 9 columns, MKL accumulates all keys in sequence too."""


class _Cpu(CallBackend):
    """PyTorch's fused CPU kernel.

    It has two defects, so :meth:`unsound_rows` has the reference compute rows again:

    - A row whose live scores are all NaN or -inf may get output 0 and LSE 0.
    - A NaN or infinity that is masked out may leak into a row.
    """

    name = "cpu"
    supports_patterns = True
    supported_terms = frozenset(("alibi_slopes", "bias"))
    joins_calls = True

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cpu":
            return f"requires CPU tensors, got {query.device}"
        if query.dtype not in _DTYPES:
            return f"requires float32, bfloat16 or float16, got {query.dtype}"
        if value.shape[-1] != query.shape[-1]:
            return (
                "requires equal head_dim of query and value, "
                f"got {query.shape[-1]} and {value.shape[-1]}"
            )
        return None

    def attend(self, operands: Operands) -> Partial:
        """Pad the tensors to what the kernel computes accurately, call it, and cut the padding.

        ``operands.addend`` is the mask as an addend; with terms there is none.
        """
        query, key, value, is_causal, scale, visible, _, _, terms, addend = operands  # no dropout
        num_queries, head_dim = query.shape[2:]
        padded, positive_scale = query, scale
        if scale < MIN_SCALE:  # negative, or too small for the kernel
            padded, positive_scale = with_positive_scale(query, scale)
        num_padding, num_columns = padding_rows(num_queries), max(_LEAST_COLUMNS - head_dim, 0)
        if num_padding or num_columns:
            padded = _pad(padded, num_padding, num_columns)
            key, value = _pad(key, 0, num_columns), _pad(value, 0, num_columns)
        # The kernel ignores the last stride, also of its output, which it allocates like the query.
        strides, columns = padded.stride(), padded.shape[3]
        if not (
            strides.count(1) == strides[3] == key.stride(3) == value.stride(3) == 1
            and min(strides[2], key.stride(2), value.stride(2)) >= columns
        ):
            padded, key, value = with_adjacent_columns(padded, key, value)
        if (addend is None or num_padding) and (visible is not None or terms is not None):
            addend = _addend(operands, num_padding)
        output, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            padded,
            key,
            value,
            0.0,
            is_causal,
            attn_mask=addend,
            scale=positive_scale,
        )
        if num_padding or num_columns:
            output, lse = output[:, :, :num_queries, :head_dim], lse[:, :, :num_queries]
            output = output.contiguous()  # without the memory of the padding
        return Partial(output, lse)

    def unsound_rows(self, partial: Partial, visible: Tensor | None) -> Tensor | None:
        """Return the rows that are not finite or have LSE 0; set those without a live pair.

        Where the kernel's sum of values overflows, a row stays infinite or NaN, as in PyTorch.
        """
        # Most calls are sound. Rows that the kernel loses, into which a score leaks, or without a
        # live pair get LSE 0, inf or NaN. A value that is not finite reaches the last row, for
        # which the kernel skips no key. Norms find them sooner than other operators of PyTorch.
        least = vector_norm(partial.lse, -torch.inf).item()
        has_lse = least > 0 and isfinite(vector_norm(partial.lse, torch.inf).item())
        if has_lse and isfinite(vector_norm(partial.output.select(2, -1), torch.inf).item()):
            return None
        is_sound = partial.lse.isfinite() & (partial.lse != 0)
        if visible is not None:
            is_blind = ~visible.any(dim=-1)
            partial.output.masked_fill_(is_blind.unsqueeze(-1), 0)
            partial.lse.masked_fill_(is_blind, -torch.inf)
            is_sound |= is_blind
        extremes = torch.stack(partial.output.aminmax())
        if is_sound.all() and extremes.isfinite().all():
            return None
        return ~(is_sound & partial.output.isfinite().all(dim=-1))

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, is_causal, scale, visible, *_ = operands
        num_queries = query.shape[2]
        num_padding = padding_rows(num_queries)
        positive_query, positive_scale = with_positive_scale(query, scale)
        if visible is not None:  # NaN in a query without a live pair must not reach the keys
            positive_query = positive_query.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
        query_tensors = [grad_output, positive_query, output]
        if num_padding:
            query_tensors = [_pad(tensor, num_padding) for tensor in query_tensors]
            lse = _pad(lse.unsqueeze(-1), num_padding, value=torch.inf).squeeze(-1)  # P = 0
        padded_grad, padded_query, padded_output = with_adjacent_columns(*query_tensors)
        grad_query, grad_key, grad_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                padded_grad,
                padded_query,
                *with_adjacent_columns(key, value),
                padded_output,
                lse,
                0.0,
                is_causal,
                attn_mask=_addend(operands, num_padding),
                scale=positive_scale,
            )
        )
        if num_padding:
            grad_query = grad_query[:, :, :num_queries]
        return with_sign_of(scale, grad_query), grad_key, grad_value


CPU = _Cpu()


def padding_rows(num_queries: int) -> int:
    """Return the number of rows to append to the queries so that no block has too few."""
    last_block = num_queries % _BLOCK
    return max(_LEAST_ROWS - last_block, 0) if last_block else 0


def _pad(tensor: Tensor, num_rows: int, num_columns: int = 0, value: float = 0.0) -> Tensor:
    """Append rows and columns to ``[batch, num_heads, rows, columns]``, or return the tensor."""
    if not (num_rows or num_columns):
        return tensor
    return F.pad(tensor, (0, num_columns, 0, num_rows), value=value)


def _addend(operands: Operands, num_padding: int) -> Tensor | None:
    """Return the additive mask of the kernel: bias, and -inf for pairs that are masked out.

    Returns:
        ``[queries, keys]`` or ``[1 or batch, 1 or num_heads, queries, keys]``, with the padding
        rows; float32 with ALiBi or a bias, otherwise in the dtype of the query. ``None`` if nothing
        is added.
    """
    query, key, *_ = operands
    visible, terms = operands.visible, operands.terms
    if visible is terms is None:
        return None
    num_queries, num_keys = query.shape[2], key.shape[2]
    if terms is None:
        assert visible is not None
        kept = operands.addend
        addend = mask_addend(visible, query.dtype) if kept is None else kept
    else:
        addend = terms.addend().expand(-1, -1, num_queries, num_keys)
        if visible is not None:
            addend = torch.where(visible, addend, -torch.inf)
    return F.pad(addend, (0, 0, 0, num_padding)) if num_padding else addend
