"""Block-sparse attention by three kernels, with the scores of live blocks in memory.

It is the method of the block-sparse operators of Triton and DeepSpeed: a product of dense matrices
into sparse blocks, a softmax of sparse rows, and a product of sparse and dense matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dense_to_blocks(
    query,
    key,
    scores,
    rows,
    columns,
    scale,
    num_tokens,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    of_head = head.to(tl.int64) * num_tokens
    of_queries = of_head + tl.load(rows + number) * BLOCK + row
    of_keys = of_head + tl.load(columns + number) * BLOCK + row
    queries = tl.load(query + of_queries[:, None] * HEAD_DIM + column)
    keys = tl.load(key + of_keys[:, None] * HEAD_DIM + column)
    found = tl.dot(queries, tl.trans(keys)) * scale
    block = (head.to(tl.int64) * tl.num_programs(0) + number) * BLOCK
    pairs = (block + row)[:, None] * BLOCK + row
    tl.store(scores + pairs, found.to(scores.dtype.element_ty))


@triton.jit
def _softmax_of_blocks(scores, starts, num_blocks, BLOCK: tl.constexpr, MOST: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + row // BLOCK), tl.load(starts + row // BLOCK + 1)
    number = start + tl.arange(0, MOST)
    of_row = ((head.to(tl.int64) * num_blocks + number) * BLOCK + row % BLOCK) * BLOCK
    pairs = scores + of_row[:, None] + tl.arange(0, BLOCK)
    live = (number < stop)[:, None]
    found = tl.load(pairs, mask=live, other=-float("inf")).to(tl.float32)
    weights = tl.exp(found - tl.max(found))
    tl.store(pairs, (weights / tl.sum(weights)).to(scores.dtype.element_ty), mask=live)


@triton.jit
def _blocks_to_dense(
    weights,
    value,
    output,
    starts,
    columns,
    num_blocks,
    num_tokens,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    of_head = head.to(tl.int64) * num_tokens
    total = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for number in range(tl.load(starts + block), tl.load(starts + block + 1)):
        of_rows = (head.to(tl.int64) * num_blocks + number) * BLOCK + row
        of_keys = of_head + tl.load(columns + number) * BLOCK + row
        values = tl.load(value + of_keys[:, None] * HEAD_DIM + column)
        total = tl.dot(tl.load(weights + of_rows[:, None] * BLOCK + row), values, total)
    of_queries = of_head + block * BLOCK + row
    found = total.to(output.dtype.element_ty)
    tl.store(output + of_queries[:, None] * HEAD_DIM + column, found)


def make(tensors: Sequence[Tensor], layout: Tensor, block: int) -> Callable[[], Tensor]:
    """Return a function that computes attention over the live blocks of a layout.

    Args:
        tensors: Query, key and value, ``[1, heads, tokens, head_dim]``, contiguous.
        layout: Boolean ``[tokens / block, tokens / block]``; every row has a live block.
        block: Size of a block, a power of two.
    """
    query, key, value = tensors
    _, heads, tokens, head_dim = query.shape
    layout = layout.to(query.device)
    rows, columns = (each.int() for each in layout.nonzero(as_tuple=True))
    counts = layout.sum(1)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    num_blocks, most = len(rows), triton.next_power_of_2(int(counts.max()))
    sizes: dict[str, Any] = {"BLOCK": block, "HEAD_DIM": head_dim}

    def attend() -> Tensor:
        scores = query.new_empty(heads, num_blocks, block, block)
        output = torch.empty_like(query)
        _dense_to_blocks[num_blocks, heads](
            query, key, scores, rows, columns, head_dim**-0.5, tokens, **sizes
        )
        _softmax_of_blocks[tokens, heads](scores, starts, num_blocks, BLOCK=block, MOST=most)
        _blocks_to_dense[tokens // block, heads](
            scores, value, output, starts, columns, num_blocks, tokens, **sizes
        )
        return output

    return attend
