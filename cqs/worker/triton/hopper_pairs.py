"""Live pairs in the Hopper kernels, in the register layout of the tensor cores' scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cqs.worker.triton.fields import NO_BITS


@gluon.jit
def visible(
    layout: gl.constexpr, mask_bits, run, steps, row_start, column_start, HAS_BITS: gl.constexpr
):
    """Return which pairs of a tile and a block are live, bool ``[64, columns]``.

    Args:
        layout: Layout of the scores, that of the tensor cores' accumulator ``[64, columns]``.
        mask_bits: int32 mask bits of all runs; read only if ``HAS_BITS``.
        run: Start, stop, band and start of the mask bits of the run.
        steps: Tokens between two rows, and between two columns.
        row_start: First row, as a row number within its residue.
        column_start: First column, as a column number within its residue.
        HAS_BITS: Whether any run of the launch has mask bits.
    """
    ROWS: gl.constexpr = layout.warps_per_cta[0] * layout.instr_shape[0]
    COLUMNS: gl.constexpr = layout.instr_shape[1]
    start, stop, band, bits_start = run
    row_step, column_step = steps
    rows = row_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(column_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    # The live columns of each row are an interval: two comparisons for each pair. Distances would
    # take a difference and three comparisons. The divisions round towards 0, so that a negative
    # quotient may be too large; it still is at most 0, and `last` at most -1: no column is there.
    first = (band[0] + rows * row_step + column_step - 1) // column_step
    last = gl.minimum((band[1] + rows * row_step + column_step) // column_step, stop) - 1
    live = (columns >= gl.expand_dims(first, 1)) & (columns <= gl.expand_dims(last, 1))
    if HAS_BITS:
        place = mask_bits + bits_start + row_start * 4
        live &= _are_set(layout, place, bits_start != NO_BITS, (column_start - start) // 4)
    return live


@gluon.jit
def _are_set(layout: gl.constexpr, place, exist, first_bit):
    """Return which mask bits of a tile are set, bool ``[ROWS, COLUMNS]`` in ``layout``.

    In the accumulator layout a thread has pairs of adjacent columns, 8 columns apart. Mask bits are
    stored in that order, so that a thread loads one integer for each of its rows.

    Args:
        layout: Layout of the scores.
        place: Pointer to the first integer of the tile's first row.
        exist: Whether the run has mask bits; without them all bits count as set.
        first_bit: Bit of the block's first column within an integer.
    """
    ROWS: gl.constexpr = layout.warps_per_cta[0] * layout.instr_shape[0]
    COLUMNS: gl.constexpr = layout.instr_shape[1]
    # Column c = pair * 8 + integer * 2 + of_pair, so [ROWS, COLUMNS] splits into these dimensions
    # without moving registers; each index below is an arange in a slice of that layout.
    tile = gl.full([ROWS, COLUMNS], 0, gl.int32, layout).reshape([ROWS, COLUMNS // 8, 4, 2])
    whole: gl.constexpr = tile.type.layout
    row_and_integer: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, whole))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, row_and_integer))
    integer = gl.arange(0, 4, gl.SliceLayout(0, row_and_integer))
    integers = gl.load(
        place + gl.expand_dims(row, 1) * 4 + gl.expand_dims(integer, 0), mask=exist, other=-1
    )
    integers = gl.expand_dims(gl.expand_dims(integers, 1), 3)
    pair_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, whole)))
    pair = gl.arange(0, COLUMNS // 8, pair_layout)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 2), 3)
    of_pair_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole)))
    of_pair = gl.arange(0, 2, of_pair_layout)
    of_pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(of_pair, 0), 1), 2)
    found = tile + (integers >> (first_bit + pair * 2 + of_pair) & 1)
    return gl.convert_layout(found.reshape([ROWS, COLUMNS]), layout) != 0
