"""Runs and live pairs in the plain kernels, which serve all GPUs that Triton supports."""

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
    RUN_RESIDUE,
)

_MULTIPLIER, _INCREMENT, _KEY = (tl.constexpr(i) for i in range(len(DropoutBits._fields)))
"""Fields of :class:`cqs.problem.dropout.DropoutBits`, which a kernel receives as a plain tuple."""


@triton.jit
def load_run(runs, index):
    """Return start, stop, band (low and high end), start of the mask bits and residue of a run."""
    run = runs + index * RUN_FIELDS
    band = tl.load(run + RUN_LOW), tl.load(run + RUN_HIGH)
    start, stop = tl.load(run + RUN_COLUMN_START), tl.load(run + RUN_COLUMN_STOP)
    return start, stop, band, tl.load(run + RUN_BITS_START), tl.load(run + RUN_RESIDUE)


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
    start, stop, band, bits_start, _ = run
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
