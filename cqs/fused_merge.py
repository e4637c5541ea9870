"""Partials into one answer on a GPU: a single kernel that reads each of them once."""

from collections.abc import Sequence

import triton
import triton.language as tl

from cqs.partial import Partial

_BLOCK_ROWS = 16


def merge_rows(answer: Partial, parts: Sequence[tuple[Partial, slice]]) -> None:
    """Merge partials over disjoint keys into ``answer``, in their order.

    The same computation as :class:`cqs.partial.RunningMerge`, with sums in float32.

    Args:
        answer: Overwritten; float16, bfloat16 or float32 output with adjacent columns.
        parts: Partials with adjacent columns and the rows of the answer that each has.
    """
    output, lse = answer
    batch, num_heads, num_rows, value_dim = output.shape
    num_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
    _merge[(num_blocks * batch * num_heads,)](
        output,
        lse,
        tuple(partial.output for partial, _ in parts),
        tuple(partial.lse for partial, _ in parts),
        output.stride()[:3],
        lse.stride(),
        tuple(partial.output.stride()[:3] for partial, _ in parts),
        tuple(tuple(map(_write, partial.lse.stride())) for partial, _ in parts),
        tuple(tuple(map(_write, rows.indices(num_rows)[:2])) for _, rows in parts),
        num_blocks,
        num_heads,
        num_rows,
        value_dim,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=4,
    )


def _write(number: int) -> int:
    """Write a number so that no kernel is compiled for it: for 1 and multiples of 16 there is."""
    return 2 * number + 3


@triton.jit
def _read(number):
    return (number - 3) // 2


@triton.jit(do_not_specialize=["num_blocks", "num_heads", "num_rows"])
def _merge(
    output,
    lse,
    outputs,
    lses,
    output_strides,
    lse_strides,
    outputs_strides,
    lses_strides,
    bounds,
    num_blocks,
    num_heads,
    num_rows,
    value_dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge some rows of one head."""
    rows = tl.program_id(0) % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(0) // num_blocks // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_blocks % num_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    in_output = columns[None, :] < value_dim
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    for i in tl.static_range(len(outputs)):
        start, stop = _read(bounds[i][0]), _read(bounds[i][1])
        row = (rows - start).to(tl.int64)
        has_row = (rows >= start) & (rows < stop)
        strides = lses_strides[i]
        place = batch * _read(strides[0]) + head * _read(strides[1]) + row * _read(strides[2])
        new_lse = tl.load(lses[i] + place, mask=has_row, other=float("-inf"))
        place = (
            batch * outputs_strides[i][0]
            + head * outputs_strides[i][1]
            + row * outputs_strides[i][2]
        )
        new = tl.load(
            outputs[i] + place[:, None] + columns[None, :],
            mask=has_row[:, None] & in_output,
            other=0.0,
        )
        larger = tl.maximum(largest, new_lse, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        old_weight, new_weight = tl.exp(largest - shift), tl.exp(new_lse - shift)
        total = total * old_weight[:, None] + new.to(tl.float32) * new_weight[:, None]
        sums = sums * old_weight + new_weight
        largest = larger
    sums = tl.where(sums == 0, 1.0, sums)  # the log of nothing stays -inf
    total = total / sums[:, None]
    in_answer = rows < num_rows
    row = rows.to(tl.int64)
    place = batch * output_strides[0] + head * output_strides[1] + row * output_strides[2]
    tl.store(
        output + place[:, None] + columns[None, :],
        total.to(output.dtype.element_ty),
        mask=in_answer[:, None] & in_output,
    )
    place = batch * lse_strides[0] + head * lse_strides[1] + row * lse_strides[2]
    tl.store(lse + place, largest + tl.log(sums), mask=in_answer)
