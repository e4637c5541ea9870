"""Launches of the backward kernel of one rectangle of scores, on Hopper GPUs."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cqs.launches import Arguments, Launcher
from cqs.patterns.views import View
from cqs.worker.operands import TaskOperands
from cqs.worker.triton.descriptors import describe
from cqs.worker.triton.hopper_rectangle import (
    BLOCK_QUERIES,
    STATE_TURNS,
    TILE_KEYS,
    convert_query_gradient,
    rectangle_gradients,
)
from cqs.worker.triton.statistics_launch import launch_row_statistics
from cqs.worker.work import Work

_HEAD_DIMS = (64, 128)
"""Columns of the tensors that the kernel supports."""
_MIN_HEADS, _MIN_KEYS = 4, 65536
"""Query heads of all batch elements, or keys, from which the kernel is used.

With one head of 16K tokens it is slower than the other kernels."""
_TOGETHER = 4
"""KV heads whose tiles alternate in the queue without a causal mask; with one all do.

On an H100 with 16 heads of 128, non-causal, 4 give 563 TFLOP/s at 16K tokens and 579 at 64K; all 16
give 525 and 314. Causal at 16K, all 16 give 542 and 4 give 514."""
_STAGES = {64: 4, 128: 3}
"""Blocks of queries in shared memory, by columns."""
_BUFFERS = {64: 2, 128: 1}
"""Blocks of dQ in shared memory, by columns. With 128, a second one would take a stage's place."""
_QUERIES: int = BLOCK_QUERIES.value
_KEYS: int = TILE_KEYS.value
_COLUMNS_OF_SUMS = 256
"""Columns of the descriptor of the sums of dQ, the most that the TMA unit copies at once."""

_RECTANGLE = Launcher(rectangle_gradients)
_CONVERT = Launcher(convert_query_gradient)


def takes_rectangle_kernel(operands: TaskOperands) -> bool:
    """Return whether the kernel of one rectangle computes the gradients of these operands.

    Args:
        operands: Tensors and options for which the kernels for Hopper GPUs are chosen.
    """
    query, key, value, work, _, dropout, _, terms = operands
    batch, num_heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    return (
        terms is None
        and dropout is None
        and head_dim == value.shape[-1]
        and head_dim in _HEAD_DIMS
        and (batch * num_heads >= _MIN_HEADS or num_keys >= _MIN_KEYS)
        and is_causal_rectangle(work, num_queries, num_keys) is not None
    )


@lru_cache(maxsize=256)
def is_causal_rectangle(work: Work, num_queries: int, num_keys: int) -> bool | None:
    """Return whether the work is causal, or ``None`` if it is not one dense or causal rectangle.

    A causal rectangle is aligned at the end: query i sees keys up to ``i + num_keys -
    num_queries``. Its first queries may see no key.

    Args:
        work: The work of any tasks.
        num_queries: Number of rows of the query tensor, all of which a rectangle has.
        num_keys: Number of rows of the key tensor, all of which a rectangle has.
    """
    if len(work.block_rows) != 1:
        return None
    ((queries, views),) = work.block_rows
    views = tuple(sorted(views, key=lambda view: view.keys.start))
    stop = 0
    for view in views:
        are_adjacent = view.keys == range(stop, view.keys.stop) and len(view.keys) > 0
        if not are_adjacent or view.queries != queries or not queries:
            return None
        stop = view.keys.stop
    if stop != num_keys:
        return None
    if queries == range(num_queries) and all(view.is_full for view in views):
        return False
    high = num_keys - num_queries
    sees_keys = queries == range(max(-high, 0), num_queries)
    return True if sees_keys and all(_is_below(view, high) for view in views) else None


def _is_below(view: View, high: int) -> bool:
    """Return whether the live pairs are all with ``key - query <= high``."""
    nearest, farthest = view.keys[0] - view.queries[-1], view.keys[-1] - view.queries[0]
    is_cut_there = view.high == high or farthest <= min(view.high, high)
    return view.bits is None and view.low <= nearest and is_cut_there


def num_items_of_rectangle(key: Tensor) -> int:
    """Return the number of tiles of all KV heads of ``[batch, num_kv_heads, rows, head_dim]``."""
    batch, num_kv_heads, num_keys, _ = key.shape
    return batch * num_kv_heads * -(-num_keys // _KEYS)


def gradients_of_rectangle(
    operands: TaskOperands,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    dtype: torch.dtype | None,
    num_programs: int,
) -> Sequence[Tensor]:
    """Compute the gradients of one rectangle of scores.

    Besides its results it allocates float32 sums of dQ, two float32 statistics per query and an
    int32 turn for each block of 64 queries.

    Args:
        operands: Tensors and options that :func:`takes_rectangle_kernel` accepts.
        grad_output: Gradient of the output, ``[batch, num_heads, rows_q, head_dim]``.
        output: Output of the whole problem, in the same shape.
        lse: LSE of the whole problem, float32 ``[batch, num_heads, rows_q]``.
        dtype: Dtype of the gradients; ``None`` means float32.
        num_programs: Number of programs; it does not change the result.

    Returns:
        Gradients of query, key and value in their shapes, contiguous.
    """
    query, key, value, work, scale, *_ = operands
    batch, num_heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    block = _QUERIES
    heads, num_blocks = batch * num_heads, triton.cdiv(num_queries, block)
    is_causal = bool(is_causal_rectangle(work, num_queries, num_keys))
    offset = num_keys - num_queries
    of_blocks, _ = launch_row_statistics(grad_output, output, lse, in_blocks_of=block)
    num_statistics = 2 * heads * num_blocks * block
    statistics = of_blocks.as_strided((num_statistics,), (1,))
    sums = lse.new_empty((heads * num_blocks * block * head_dim // _COLUMNS_OF_SUMS, 256))
    grad_query, grad_key, grad_value = (
        torch.empty(each.shape, dtype=dtype or torch.float32, device=each.device)
        for each in (query, key, value)
    )
    state = torch.zeros(
        STATE_TURNS.value + heads * num_blocks, dtype=torch.int32, device=query.device
    )

    def make(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        statistics: Tensor,
        sums: Tensor,
        *written: Tensor,
    ) -> Arguments:
        half = _KEYS // 2
        descriptors = [
            describe(query, 1, block, on_hopper=True),
            describe(key, 1, half, on_hopper=True),
            describe(value, 1, half, on_hopper=True),
            describe(grad_output, 1, block, on_hopper=True),
            describe(key, 1, half, on_hopper=True, columns=head_dim // 2),
            _describe_flat(statistics, [block]),
            _describe_flat(sums, [block * head_dim // _COLUMNS_OF_SUMS, _COLUMNS_OF_SUMS]),
        ]
        num_kv_heads = batch * key.shape[1]
        together = num_kv_heads if is_causal else min(_TOGETHER, num_kv_heads)
        numbers = (
            num_kv_heads,
            triton.cdiv(num_keys, _KEYS),
            num_blocks,
            num_keys,
            heads // num_kv_heads,
            together,
            offset,
            key.shape[1],
            scale,
            scale / math.log(2),
        )
        constants = {
            "BLOCK_D": head_dim,
            "IS_CAUSAL": is_causal,
            "IS_RAGGED": num_keys % _KEYS != 0,
            "STAGES": _STAGES[head_dim],
            "BUFFERS": _BUFFERS[head_dim],
            "num_warps": 4,
        }
        return (num_programs,), (*descriptors, *written, *numbers), constants

    def make_conversion(sums: Tensor, grad_query: Tensor) -> Arguments:
        first = max(-offset, 0) // block if is_causal else 0
        numbers = scale, num_queries, num_blocks, first
        constants = {"BLOCK_D": head_dim, "num_warps": 4}
        return (2 * heads * num_blocks,), (sums, grad_query, *numbers), constants

    tensors = query, key, value, grad_output, statistics, sums, grad_key, grad_value, state
    _RECTANGLE.launch(tensors, make, key=(is_causal, scale, num_programs))
    _CONVERT.launch((sums, grad_query), make_conversion, key=(is_causal, scale, offset))
    return grad_query, grad_key, grad_value


def _describe_flat(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe contiguous float32 for TMA, in shared memory without swizzling."""
    layout = gl.NVMMASharedLayout(0, 32, len(block))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
