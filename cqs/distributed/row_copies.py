"""Rows and heads from tensors to tensors: packing what is to be sent, placing what came."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cqs.partial import has_triton


class RowCopy(NamedTuple):
    """Some rows of some heads."""

    tensor: int
    """Which of the sources, and of the targets."""
    source_row: int
    target_row: int
    num_rows: int
    source_head: int
    target_head: int
    num_heads: int


CopySchedule = tuple[RowCopy, ...]


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor], schedule: CopySchedule) -> None:
    """Copy what ``moves`` say; on a GPU in one launch.

    Args:
        sources: ``[batch, heads, rows, dim]``, or all without the last dimension.
        targets: Likewise, of the same dtype; written to.
        moves: No target row of a head is in two.
    """
    if not schedule:
        return
    if (
        targets[0].is_cuda
        and all(tensor.stride()[3:] == (1,) for tensor in (*sources, *targets))
        and has_triton()
    ):
        from cqs.distributed import fused_copies

        fused_copies.copy_rows(sources, targets, schedule)
        return
    for number, source_row, target_row, num_rows, source_head, target_head, num_heads in schedule:
        target = targets[number][:, target_head : target_head + num_heads]
        source = sources[number][:, source_head : source_head + num_heads]
        target[:, :, target_row : target_row + num_rows].copy_(
            source[:, :, source_row : source_row + num_rows]
        )
