"""What the plain kernels share: runs, and which pairs of a tile and a block count."""

import triton
import triton.language as tl

_NO_BITS = tl.constexpr(-(2**31))


@triton.jit
def load_run(runs, run):
    """Return start, stop, band (low and high end), bits and residue of a run; see tiles.py."""
    fields = runs + run * 8
    band = tl.load(fields + 2), tl.load(fields + 3)
    return tl.load(fields), tl.load(fields + 1), band, tl.load(fields + 4), tl.load(fields + 5)


@triton.jit
def visible(bits, bits_of_run, rows, columns, start, stop, band, row_step, column_step):
    """Say which pairs of a tile and a block lie in a run and its band and have their bit.

    Args:
        bits: Words of all runs, or None if no run has bits.
        bits_of_run: Where those of this run are.
        rows: Rows of the tile, numbers of their residue.
        columns: Columns of the block, likewise.
        start: First column of the run.
        stop: Its last + 1.
        band: Low and high end.
        row_step: Tokens between two rows.
        column_step: Tokens between two columns.
    """
    distance = columns[None, :] * column_step - rows[:, None] * row_step
    live = (columns < stop)[None, :] & (distance >= band[0]) & (distance <= band[1])
    if bits is not None:
        column = columns[None, :] - start
        place = bits + bits_of_run + rows[:, None] * 4 + column // 2 % 4
        has_bits = (columns * 0 + bits_of_run != _NO_BITS)[None, :]
        word = tl.load(place, mask=live & has_bits, other=-1)
        live &= (word >> column // 8 * 2 + column % 2) & 1 != 0
    return live


@triton.jit
def load_query_bits(dropout_bits, rows, mask):
    """Load the multipliers and increments of queries; see cqs/dropout.py."""
    multiplier = tl.load(dropout_bits[0] + rows, mask=mask, other=0)
    return multiplier, tl.load(dropout_bits[1] + rows, mask=mask, other=0)


@triton.jit
def load_key_bits(dropout_bits, keys, mask):
    """Load the random bits of keys."""
    return tl.load(dropout_bits[2] + keys, mask=mask, other=0)


@triton.jit
def is_kept(multiplier, increment, key_bits, drop_below):
    """Say which pairs dropout keeps; the bits broadcast to pairs."""
    return ((multiplier * key_bits + increment >> 32) & 0xFFFFFFFF) >= drop_below
