"""The launch of the statistics of rows that the backward kernels require."""

import triton
from torch import Tensor

from cqs.launches import Arguments, Launcher
from cqs.worker.triton.backward import row_statistics

_STATISTICS_ROWS = 32
"""Rows of a program of ``row_statistics``."""
_ROW_STATISTICS = Launcher(row_statistics)


def launch_row_statistics(
    grad_output: Tensor, output: Tensor, lse: Tensor, *, in_blocks_of: int = 0
) -> tuple[Tensor, Tensor]:
    """Return ``lse_log2`` and ``delta`` of ``row_statistics``.

    Args:
        grad_output: Gradient of the output, ``[batch, num_heads, rows, value_dim]``.
        output: Output of the whole problem in the same shape.
        lse: LSE of the whole problem, float32 ``[batch, num_heads, rows]``.
        in_blocks_of: Rows of a block, a multiple of 32, to return the negative statistics of blocks
            that alternate in memory. 0 returns those of all rows.

    Returns:
        float32 in the shape of ``lse``; with blocks two views ``[batch * num_heads, num_blocks,
        in_blocks_of]`` of one tensor ``[batch * num_heads, num_blocks, 2, in_blocks_of]``.
    """
    batch, num_heads, num_rows, value_dim = output.shape
    if in_blocks_of:
        blocks = triton.cdiv(num_rows, in_blocks_of)
        both = lse.new_empty((batch * num_heads, blocks, 2, in_blocks_of))
        lse_log2, delta = both.unbind(2)
    else:
        lse_log2, delta = (lse.new_empty(lse.shape) for _ in range(2))

    def make(output: Tensor, grad_output: Tensor, *row_tensors: Tensor) -> Arguments:
        padded = triton.cdiv(num_rows, in_blocks_of or 1) * (in_blocks_of or 1)
        num_blocks = triton.cdiv(padded, _STATISTICS_ROWS)
        numbers = num_blocks, num_heads, num_rows, value_dim
        strides = output.stride(), grad_output.stride()
        constants = {
            "BLOCK_ROWS": _STATISTICS_ROWS,
            "BLOCK_V": triton.next_power_of_2(value_dim),
            "IN_BLOCKS_OF": in_blocks_of,
        }
        grid = (num_blocks * batch * num_heads,)
        return grid, (output, grad_output, *row_tensors, *strides, *numbers), constants

    tensors = output, grad_output, lse.contiguous(), lse_log2, delta
    _ROW_STATISTICS.launch(tensors, make, key=in_blocks_of)
    return lse_log2, delta
