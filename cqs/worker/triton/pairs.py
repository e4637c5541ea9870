"""Runs, live pairs and score terms in the plain kernels, which serve all GPUs of Triton."""

import triton
import triton.language as tl

from cqs.problem.dropout import DropoutBits
from cqs.worker.triton.fields import (
    NO_BITS,
    RUN_BITS_START,
    RUN_COLUMN_START,
    RUN_COLUMN_STOP,
    RUN_FIELDS,
    RUN_HIGH,
    RUN_LOW,
    RUN_OFFSET,
    RUN_RESIDUE,
)

_MULTIPLIER, _INCREMENT, _KEY = (tl.constexpr(i) for i in range(len(DropoutBits._fields)))
"""Fields of :class:`cqs.problem.dropout.DropoutBits`, which a kernel receives as a plain tuple."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_run(runs, index):
    """Return start, stop, band (low and high end), start of mask bits, residue, offset of a run."""
    run = runs + index * RUN_FIELDS
    band = tl.load(run + RUN_LOW), tl.load(run + RUN_HIGH)
    start, stop = tl.load(run + RUN_COLUMN_START), tl.load(run + RUN_COLUMN_STOP)
    bits_start, residue = tl.load(run + RUN_BITS_START), tl.load(run + RUN_RESIDUE)
    return start, stop, band, bits_start, residue, tl.load(run + RUN_OFFSET)


@triton.jit
def visible(mask_bits, run, rows, columns, row_step, column_step):
    """Return which pairs of a tile and a block are live, bool ``[rows, columns]``.

    Args:
        mask_bits: int32 mask bits of all runs, or None if no run has any.
        run: The result of :func:`load_run`.
        rows: Row numbers of the tile, within their residue.
        columns: Column numbers of the block, within their residue.
        row_step: Tokens between two rows.
        column_step: Tokens between two columns.
    """
    start, stop, band, bits_start, _, _ = run
    distance = columns[None, :] * column_step - rows[:, None] * row_step
    # No bound on rows: those after the tile's last are computed and then not stored.
    live = (columns < stop)[None, :] & (distance >= band[0]) & (distance <= band[1])
    if mask_bits is not None:
        column = columns[None, :] - start
        place = mask_bits + bits_start + rows[:, None] * 4 + column // 2 % 4
        has_bits = (columns * 0 + bits_start != NO_BITS)[None, :]
        integers = tl.load(place, mask=live & has_bits, other=-1)  # -1 has all bits set
        live &= (integers >> column // 8 * 2 + column % 2) & 1 != 0
    return live


@triton.jit
def load_query_bits(dropout_bits, rows, mask):
    """Load the multipliers and increments of queries, fields of ``DropoutBits``."""
    multiplier = tl.load(dropout_bits[_MULTIPLIER] + rows, mask=mask, other=0)
    return multiplier, tl.load(dropout_bits[_INCREMENT] + rows, mask=mask, other=0)


@triton.jit
def load_key_bits(dropout_bits, keys, mask):
    """Load the random bits of keys."""
    return tl.load(dropout_bits[_KEY] + keys, mask=mask, other=0)


@triton.jit
def is_kept(multiplier, increment, key_bits, drop_below):
    """Return which pairs dropout keeps; the bits of queries and keys broadcast to pairs."""
    # The shift of a signed integer keeps the sign: the AND makes the upper half unsigned.
    return ((multiplier * key_bits + increment >> 32) & 0xFFFFFFFF) >= drop_below


@triton.jit
def apply_terms(
    products, scale_log2, softcap, slope, bias, run, rows, first, row_step, column_step
):
    """Apply the score terms to the products of a tile's rows and a block's columns.

    Args:
        products: Products of queries and keys before the scale, float32 ``[rows, columns]``.
        scale_log2: Factor on the products divided by ln 2.
        softcap: The soft cap, or None.
        slope: Slope of ALiBi divided by ln 2, or None.
        bias: Bias of the pairs, float32 ``[rows, columns]``, or None.
        run: The result of :func:`load_run`.
        rows: Row numbers of the tile, within their residue.
        first: First column number of the block, within its residue.
        row_step: Tokens between two rows.
        column_step: Tokens between two columns.

    Returns:
        Scores in some unit; that unit, in base-2 logarithms; and the scores before ALiBi and bias,
        which are hyperbolic tangents with a soft cap.
    """
    scores, unit = products, scale_log2
    if softcap is not None:
        scores, unit = _tanh(products * (scale_log2 / _LOG2E / softcap)), softcap * _LOG2E
    capped = scores
    if slope is not None:
        # Of the numbers of rows relative to the block: float32 has all integers up to 2^24.
        place = (rows * row_step + (run[5] - first * column_step)).to(tl.float32)
        columns = (tl.arange(0, products.shape[1]) * column_step).to(tl.float32)
        scores = scores * unit - slope * tl.abs(place[:, None] - columns[None, :])
        unit = 1.0
    if bias is not None:
        scores = scores * unit + bias * _LOG2E
        unit = 1.0
    return scores, unit, capped


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent with a relative error of a few float32 roundings."""
    size = tl.abs(x)
    power = tl.exp2(size * (-2 * _LOG2E))
    result = (1 - power) / (1 + power)
    # 1 - power cancels for small numbers, for which five terms of the Taylor series suffice.
    square = size * size
    series = -17 / 315 + square * (62 / 2835)
    series = -1 / 3 + square * (2 / 15 + square * series)
    result = tl.where(size < 0.25, size + size * square * series, result)
    return tl.where(x < 0, -result, result)


@triton.jit
def load_bias(bias, strides, batch, head, queries, keys, mask):
    """Load the bias of pairs, float32.

    Args:
        bias: ``[batch, num_heads, rows_q, rows_kv]``, or None, which is returned.
        strides: The four strides of ``bias``.
        batch: Batch element.
        head: Query head.
        queries: Row numbers of queries in the tensor, ``[queries, 1]`` or ``[1, queries]``.
        keys: Row numbers of keys in the tensor, in the other dimension.
        mask: Pairs that exist, broadcastable to all pairs.
    """
    pair_bias = None
    if bias is not None:
        place = bias + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        place += queries.to(tl.int64) * strides[2] + keys.to(tl.int64) * strides[3]
        pair_bias = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return pair_bias
