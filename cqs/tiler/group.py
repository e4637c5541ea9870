"""Merge of all parts of one group, by the worker that holds most of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cqs.partial import Partial, merge_rows

Part = tuple[slice, tuple[Tensor, ...]]
"""Rows of a group, and what a task has computed for them: output and LSE, or gradients."""


def merge_group(parts: Sequence[Part], num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge partial outputs of one query group.

    Args:
        parts: At least one part: rows of the group, output ``[batch, num_heads, rows, value_dim]``
            and LSE ``[batch, num_heads, rows]``. They are merged in their order.
        num_rows: Number of queries of the group.
        dtype: Dtype of the merged output.

    Returns:
        Output ``[batch, num_heads, num_rows, value_dim]``, and LSE in its own dtype.
    """
    output, lse = (_empty(tensor, num_rows) for tensor in parts[0][1])
    answer = Partial(output.to(dtype), lse)
    merge_rows(answer, [(Partial(*tensors), rows) for rows, tensors in parts])
    return answer


def sum_group(parts: Sequence[Part], num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Sum the gradient contributions to one group, in their order.

    Args:
        parts: At least one part: rows of the group, and one gradient ``[batch, heads, rows, dim]``
            or several.
        num_rows: Number of tokens of the group.
        dtype: Dtype of the sums that are returned; they are formed in float32, or float64.
    """
    sums = [_empty(tensor, num_rows).zero_() for tensor in parts[0][1]]
    for rows, gradients in parts:
        for total, gradient in zip(sums, gradients, strict=True):
            total[:, :, rows] += gradient
    return tuple(total.to(dtype) for total in sums)


def _empty(tensor: Tensor, num_rows: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:2], num_rows, *tensor.shape[3:]))
