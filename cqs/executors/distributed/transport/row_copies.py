"""Copies of rows between tensors, which pack send buffers and unpack received rows."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cqs.partial import has_triton


class RowCopy(NamedTuple):
    """One copy: adjacent rows of adjacent heads from a source tensor to a target tensor."""

    tensor: int
    """Index of the source, and of the target."""
    source_row: int
    target_row: int
    num_rows: int
    source_head: int
    target_head: int
    num_heads: int


CopySchedule = tuple[RowCopy, ...]


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor], schedule: CopySchedule) -> None:
    """Run all copies of a schedule; on a GPU with Triton in one kernel launch.

    Args:
        sources: Tensors ``[batch, heads, rows, dim]``, or all ``[batch, heads, rows]``.
        targets: Tensors of the same dtype, device and number of dimensions; written to.
        schedule: The copies. No two may write the same row of a head.
    """
    if not schedule:
        return
    if (
        targets[0].is_cuda
        and all(tensor.stride()[3:] == (1,) for tensor in (*sources, *targets))
        and has_triton()
    ):
        from cqs.executors.distributed.transport import fused_copies

        fused_copies.copy_rows(sources, targets, schedule)
        return
    for number, source_row, target_row, num_rows, source_head, target_head, num_heads in schedule:
        target = targets[number][:, target_head : target_head + num_heads]
        source = sources[number][:, source_head : source_head + num_heads]
        target[:, :, target_row : target_row + num_rows].copy_(
            source[:, :, source_row : source_row + num_rows]
        )
