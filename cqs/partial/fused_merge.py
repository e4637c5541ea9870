"""Merge of partial outputs, or sum of gradients, on a GPU: one kernel reads each of them once.

Six float32 partials merge into a bfloat16 output at 3.6 TB/s on one H200, 85 % of a copy's
bandwidth.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cqs.launches import Arguments, Launcher
from cqs.partial import Partial
from cqs.uncompiled import check_not_traced

_BLOCK_ROWS = 16
_ALIGNMENT = 16
"""Bytes at whose multiples tensors start for which Triton compiles the same kernel."""


def merge_rows(answer: Partial, parts: Sequence[tuple[Partial, slice]]) -> None:
    """Merge partial outputs over disjoint keys into ``answer``, in their order.

    The computation is that of :class:`cqs.partial.RunningMerge`, with sums in float32.

    Args:
        answer: Tensors that are overwritten: output ``[batch, num_heads, rows, value_dim]`` in
            float16, bfloat16 or float32, and LSE ``[batch, num_heads, rows]`` in float32, with any
            strides.
        parts: Partial outputs, with any strides, and the rows of ``answer`` of each.
    """
    check_not_traced("a merge")
    num_rows, number = answer.output.shape[2], len(parts)
    bounds = tuple([rows.indices(num_rows)[:2] for _, rows in parts])
    outputs = [partial.output for partial, _ in parts]
    lses, shifts = zip(*[_align(partial.lse) for partial, _ in parts], strict=True)

    def make(output: Tensor, lse: Tensor, *tensors: Tensor) -> Arguments:
        batch, num_heads, _, value_dim = output.shape
        num_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
        outputs, lses = tensors[:number], tensors[number:]
        positional = (
            output,
            lse,
            outputs,
            lses,
            output.stride(),
            tuple(map(_encode, lse.stride())),
            tuple([part_output.stride() for part_output in outputs]),
            tuple([tuple(map(_encode, part_lse.stride())) for part_lse in lses]),
            tuple([tuple(map(_encode, ends)) for ends in bounds]),
            tuple(map(_encode, shifts)),
            num_blocks,
            num_heads,
            num_rows,
            value_dim,
        )
        constants = {
            "BLOCK_ROWS": _BLOCK_ROWS,
            "BLOCK_V": triton.next_power_of_2(value_dim),
            "num_warps": 4,
        }
        return (num_blocks * batch * num_heads,), positional, constants

    _MERGE_LAUNCHER.launch((*answer, *outputs, *lses), make, key=(bounds, shifts))


def sum_rows(total: Tensor, parts: Sequence[tuple[Tensor, slice]]) -> None:
    """Write the sum of gradients into ``total``, added in their order in float32.

    Args:
        total: ``[batch, heads, rows, dim]`` in float16, bfloat16 or float32, with any strides;
            overwritten. Rows without a part get 0.
        parts: At least one gradient, with any strides, and the rows of ``total`` of each.
    """
    num_rows = total.shape[2]
    bounds = tuple([rows.indices(num_rows)[:2] for _, rows in parts])

    def make(total: Tensor, *parts: Tensor) -> Arguments:
        batch, num_heads, _, dim = total.shape
        num_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
        positional = (
            total,
            parts,
            total.stride(),
            tuple([part.stride() for part in parts]),
            tuple([tuple(map(_encode, ends)) for ends in bounds]),
            num_blocks,
            num_heads,
            num_rows,
            dim,
        )
        constants = {
            "BLOCK_ROWS": _BLOCK_ROWS,
            "BLOCK_D": triton.next_power_of_2(dim),
            "num_warps": 4,
        }
        return (num_blocks * batch * num_heads,), positional, constants

    _SUM_LAUNCHER.launch((total, *[part for part, _ in parts]), make, key=bounds)


def _align(lse: Tensor) -> tuple[Tensor, int]:
    """Return an LSE as memory that starts at a multiple of 16 bytes, and its first element there.

    Triton compiles the kernel anew for each combination of aligned and other tensors, and the LSEs
    of some rows of a task start anywhere.
    """
    shift = lse.data_ptr() % _ALIGNMENT // lse.element_size()
    start = lse.storage_offset() - shift
    if shift and start < 0:
        return lse.clone(), 0
    return (lse.as_strided(lse.shape, lse.stride(), start), shift) if shift else (lse, 0)


def _encode(number: int) -> int:
    """Encode an integer of at least 0 so that Triton does not specialise the kernel for it.

    ``do_not_specialize`` has no effect on the elements of a tuple. An odd number is no multiple of
    16, and is not 1 either if it is at least 3.
    """
    return 2 * number + 3


@triton.jit
def _decode(number):
    return (number - 3) // 2


@triton.jit(
    do_not_specialize=["num_blocks", "num_heads", "num_rows"],
    do_not_specialize_on_alignment=["lse"],
)
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
    shifts,
    num_blocks,
    num_heads,
    num_rows,
    value_dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge ``BLOCK_ROWS`` rows of one head.

    Args:
        output: ``[batch, num_heads, num_rows, value_dim]``; written to.
        lse: float32 ``[batch, num_heads, num_rows]``; written to.
        outputs: Tuple of partial outputs.
        lses: Tuple of their LSEs.
        output_strides: Strides of ``output``. Triton compiles a last stride of 1 as a constant.
        lse_strides: Encoded strides of ``lse``.
        outputs_strides: Tuple of the strides of each partial output.
        lses_strides: Tuple of the encoded strides of each LSE.
        bounds: Tuple of the encoded first row and last row + 1 of each partial output.
        shifts: Tuple of the encoded first element of each LSE.
        num_blocks: Number of blocks of ``BLOCK_ROWS`` rows in one head.
        num_heads: Number of query heads.
        num_rows: Number of rows of ``output``.
        value_dim: Number of columns of ``output``.
        BLOCK_ROWS: Rows of a program.
        BLOCK_V: value_dim, rounded up to a power of two.
    """
    rows = tl.program_id(0) % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(0) // num_blocks // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_blocks % num_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    in_output = columns[None, :] < value_dim
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    # The order of the parts is fixed, so that the result does not depend on who computed them.
    for i in tl.static_range(len(outputs)):
        start, stop = _decode(bounds[i][0]), _decode(bounds[i][1])
        row = (rows - start).to(tl.int64)
        has_row = (rows >= start) & (rows < stop)
        strides = lses_strides[i]
        place = batch * _decode(strides[0]) + head * _decode(strides[1]) + row * _decode(strides[2])
        place += _decode(shifts[i])
        new_lse = tl.load(lses[i] + place, mask=has_row, other=float("-inf"))
        place = (
            batch * outputs_strides[i][0]
            + head * outputs_strides[i][1]
            + row * outputs_strides[i][2]
        )
        new = tl.load(
            outputs[i] + place[:, None] + columns[None, :] * outputs_strides[i][3],
            mask=has_row[:, None] & in_output,
            other=0.0,
        )
        new = tl.where(new_lse[:, None] == float("-inf"), 0.0, new.to(tl.float32))  # may be garbage
        # A NaN must reach the result: by default tl.maximum drops it.
        larger = tl.maximum(largest, new_lse, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        old_weight, new_weight = tl.exp(largest - shift), tl.exp(new_lse - shift)
        total = total * old_weight[:, None] + new * new_weight[:, None]
        sums = sums * old_weight + new_weight
        largest = larger
    sums = tl.where(sums == 0, 1.0, sums)  # the log of nothing stays -inf
    total = total / sums[:, None]
    in_answer = rows < num_rows
    row = rows.to(tl.int64)
    place = batch * output_strides[0] + head * output_strides[1] + row * output_strides[2]
    tl.store(
        output + place[:, None] + columns[None, :] * output_strides[3],
        total.to(output.dtype.element_ty),
        mask=in_answer[:, None] & in_output,
    )
    strides = lse_strides
    place = batch * _decode(strides[0]) + head * _decode(strides[1]) + row * _decode(strides[2])
    tl.store(lse + place, largest + tl.log(sums), mask=in_answer)


@triton.jit(do_not_specialize=["num_blocks", "num_heads", "num_rows"])
def _sum(
    total,
    parts,
    total_strides,
    parts_strides,
    bounds,
    num_blocks,
    num_heads,
    num_rows,
    dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up ``BLOCK_ROWS`` rows of one head.

    Args:
        total: ``[batch, num_heads, num_rows, dim]``; written to.
        parts: Tuple of the gradients that are added.
        total_strides: Strides of ``total``.
        parts_strides: Tuple of the strides of each gradient.
        bounds: Tuple of the encoded first row and last row + 1 of each gradient.
        num_blocks: Number of blocks of ``BLOCK_ROWS`` rows in one head.
        num_heads: Number of heads of ``total``.
        num_rows: Number of rows of ``total``.
        dim: Number of columns of all tensors.
        BLOCK_ROWS: Rows of a program.
        BLOCK_D: dim, rounded up to a power of two.
    """
    rows = tl.program_id(0) % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(0) // num_blocks // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_blocks % num_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    in_total = columns[None, :] < dim
    sums = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(len(parts)):
        start, stop = _decode(bounds[i][0]), _decode(bounds[i][1])
        has_row = (rows >= start) & (rows < stop)
        strides = parts_strides[i]
        place = batch * strides[0] + head * strides[1] + (rows - start).to(tl.int64) * strides[2]
        place = place[:, None] + columns[None, :] * strides[3]
        sums += tl.load(parts[i] + place, mask=has_row[:, None] & in_total, other=0.0).to(
            tl.float32
        )
    strides = total_strides
    place = batch * strides[0] + head * strides[1] + rows.to(tl.int64) * strides[2]
    tl.store(
        total + place[:, None] + columns[None, :] * strides[3],
        sums.to(total.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & in_total,
    )


_MERGE_LAUNCHER, _SUM_LAUNCHER = Launcher(_merge), Launcher(_sum)
