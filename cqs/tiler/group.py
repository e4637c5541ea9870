"""Merge of all parts of one group, by the worker that holds most of them."""

from collections.abc import Sequence

from torch import Tensor

from cqs.partial import Partial, merge_rows, sum_rows

GroupPart = tuple[slice, tuple[Tensor, ...]]
"""Rows of a group, and the results of a task for them: output and LSE, or gradients."""


def merge_group(parts: Sequence[GroupPart], answer: Sequence[Tensor]) -> None:
    """Merge partial outputs of one query group, in their order.

    Args:
        parts: Rows of the group, output ``[batch, num_heads, rows, value_dim]`` and LSE ``[batch,
            num_heads, rows]`` of each part.
        answer: Output and LSE of all rows of the group; written to.
    """
    merge_rows(Partial(*answer), [(Partial(*tensors), rows) for rows, tensors in parts])


def sum_group(parts: Sequence[GroupPart], answer: Sequence[Tensor]) -> None:
    """Sum the gradient contributions to one group, in their order.

    Args:
        parts: All rows of the group, and one gradient ``[batch, heads, rows, dim]`` or several, of
            each part.
        answer: The sums, in any dtype; written to. They are formed in float32, or float64.
    """
    for i, total in enumerate(answer):
        sum_rows(total, [(gradients[i], rows) for rows, gradients in parts])
