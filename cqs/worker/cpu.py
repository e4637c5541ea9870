"""Backend ``cpu``: PyTorch's fused CPU attention, through the operator that returns its LSE."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.partial import Partial
from cqs.worker.operands import Operands, with_adjacent_columns, with_positive_scale, with_sign_of
from cqs.worker.reference import attend_reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 32
"""The kernel processes queries in blocks of 32, 64 or 256 rows."""
_LEAST_ROWS = 4
"""Fewest rows of a block: with fewer, MKL accumulates all keys in sequence and errors are ten times
as large."""
LEAST_COLUMNS = 16
"""Fewest columns: with 2 to 9 columns, MKL accumulates all keys in sequence too."""
_AREA = 2**22
"""Most scores that the reference stores at a time when it recomputes rows."""


def why_not_cpu(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return why PyTorch's fused CPU kernel does not support these tensors, or None if it does."""
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


def attend_cpu(operands: Operands) -> Partial:
    """Compute one call with the fused CPU kernel.

    No tensor may be empty. The kernel ignores the stride of the last dimension, so rows that are
    not contiguous are copied first. It has two defects:

    - A row whose live scores are all NaN or -inf may get output 0 and LSE 0.
    - A NaN or infinity that is masked out may leak into a row.

    The reference therefore recomputes every row that is not finite or has an LSE of 0.
    """
    query, key, value, is_causal, scale, visible, *_ = operands
    num_queries, head_dim = query.shape[2:]
    num_padding, num_columns = padding_rows(num_queries), max(LEAST_COLUMNS - head_dim, 0)
    padded, positive_scale = with_positive_scale(_pad(query, num_padding, num_columns), scale)
    of_keys = _pad(key, 0, num_columns), _pad(value, 0, num_columns)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *with_adjacent_columns(padded, *of_keys),
        0.0,
        is_causal,
        attn_mask=_addend(visible, query, num_padding),
        scale=positive_scale,
    )
    found = Partial(output[:, :, :num_queries, :head_dim].contiguous(), lse[:, :, :num_queries])
    is_sound = found.lse.isfinite() & (found.lse != 0)
    if visible is not None:
        is_blind = ~visible.any(dim=-1)
        found.output.masked_fill_(is_blind.unsqueeze(-1), 0)
        found.lse.masked_fill_(is_blind, -torch.inf)
        is_sound |= is_blind
    extremes = torch.stack(found.output.aminmax())
    if not (is_sound.all() and extremes.isfinite().all()):
        is_sound &= found.output.isfinite().all(dim=-1)
        _compute_again(found, ~is_sound, operands)
    return found


def gradients_cpu(
    operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one call with the fused CPU kernel.

    The arguments are those of :func:`~cqs.worker.reference.gradients_reference`.
    """
    query, key, value, is_causal, scale, visible, *_ = operands
    num_queries = query.shape[2]
    num_padding = padding_rows(num_queries)
    positive_query, positive_scale = with_positive_scale(query, scale)
    if visible is not None:  # NaN in a query without a live pair must not reach the keys
        positive_query = positive_query.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
    of_queries = [_pad(each, num_padding) for each in (grad_output, positive_query, output)]
    padded_grad, padded_query, padded_output = with_adjacent_columns(*of_queries)
    grad_query, grad_key, grad_value = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            padded_grad,
            padded_query,
            *with_adjacent_columns(key, value),
            padded_output,
            _pad(lse.unsqueeze(-1), num_padding, value=torch.inf).squeeze(
                -1
            ),  # P = exp(s - lse) = 0
            0.0,
            is_causal,
            attn_mask=_addend(visible, query, num_padding),
            scale=positive_scale,
        )
    )
    return with_sign_of(scale, grad_query[:, :, :num_queries]), grad_key, grad_value


def padding_rows(num_queries: int) -> int:
    """Return how many rows to append to the queries so that no block has too few."""
    last_block = num_queries % _BLOCK
    return max(_LEAST_ROWS - last_block, 0) if last_block else 0


def _pad(tensor: Tensor, num_rows: int, num_columns: int = 0, value: float = 0.0) -> Tensor:
    """Append rows and columns to ``[batch, num_heads, rows, columns]``, or return the tensor."""
    if not (num_rows or num_columns):
        return tensor
    return F.pad(tensor, (0, num_columns, 0, num_rows), value=value)


def _addend(visible: Tensor | None, like: Tensor, num_padding: int) -> Tensor | None:
    """Return the mask that the kernel adds to the scores: 0 for live pairs, -inf for others."""
    if visible is None:
        return None
    num_queries, num_keys = visible.shape
    addend = like.new_zeros(num_queries + num_padding, num_keys)
    addend[:num_queries].masked_fill_(~visible, -torch.inf)
    return addend


def _compute_again(found: Partial, is_wanted: Tensor, operands: Operands) -> None:
    """Recompute some rows of ``found`` with the reference, in place.

    Args:
        found: Output and LSE of the call.
        is_wanted: Rows to recompute, bool ``[batch, num_heads, seqlen_q]``.
        operands: Tensors and options of the call.
    """
    query, key, _, is_causal, _, visible, *_ = operands
    rows = is_wanted.any(dim=(0, 1)).nonzero().squeeze(-1)
    keys = torch.arange(key.shape[2])
    for strip in rows.split(max(_AREA // (query.shape[0] * query.shape[1] * len(keys)), 1)):
        if is_causal:
            seen = keys <= strip.unsqueeze(-1)
        else:
            seen = None if visible is None else visible[strip]
        part = operands._replace(query=query[:, :, strip], is_causal=False, visible=seen)
        again = attend_reference(part)
        wanted = is_wanted[:, :, strip]
        where = wanted.nonzero(as_tuple=True)
        place = where[0], where[1], strip[where[2]]
        for target, values in zip(found, again, strict=True):
            target[place] = values[wanted]
