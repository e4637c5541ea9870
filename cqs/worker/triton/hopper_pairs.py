"""Which pairs of a tile and a block count, in the registers of the warps that computed them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_NO_BITS = gl.constexpr(-(2**31))


@gluon.jit
def visible(
    layout: gl.constexpr, bits, run, steps, row_start, column_start, HAS_BITS: gl.constexpr
):
    """Say which pairs lie in a run and its band and have their bit.

    Args:
        layout: Of the scores, tensor cores' ``[64, columns]``.
        bits: Words of all runs.
        run: Its first and last column + 1, band and place among the words; see tiles.py.
        steps: Tokens between two rows, and between two columns.
        row_start: First row, number in its residue.
        column_start: First column, likewise.
        HAS_BITS: Whether any run has bits.
    """
    ROWS: gl.constexpr = layout.warps_per_cta[0] * layout.instr_shape[0]
    COLUMNS: gl.constexpr = layout.instr_shape[1]
    start, stop, band, bits_of_run = run
    row_step, column_step = steps
    rows = row_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(column_start + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    # Columns of a row from first to last; divisions round towards 0, where columns begin.
    first = (band[0] + rows * row_step + column_step - 1) // column_step
    last = gl.minimum((band[1] + rows * row_step + column_step) // column_step, stop) - 1
    live = (columns >= gl.expand_dims(first, 1)) & (columns <= gl.expand_dims(last, 1))
    if HAS_BITS:
        place = bits + bits_of_run + row_start * 4
        live &= _are_set(layout, place, bits_of_run != _NO_BITS, (column_start - start) // 4)
    return live


@gluon.jit
def _are_set(layout: gl.constexpr, place, exist, first_bit):
    """Spread words of bits over a tile: a thread loads one for each of its rows.

    The columns of a thread are pairs, 8 apart; so are the bits of a word.
    """
    ROWS: gl.constexpr = layout.warps_per_cta[0] * layout.instr_shape[0]
    COLUMNS: gl.constexpr = layout.instr_shape[1]
    tile = gl.full([ROWS, COLUMNS], 0, gl.int32, layout).reshape([ROWS, COLUMNS // 8, 4, 2])
    whole: gl.constexpr = tile.type.layout
    row_and_word: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, whole))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, row_and_word))
    word = gl.arange(0, 4, gl.SliceLayout(0, row_and_word))
    words = gl.load(
        place + gl.expand_dims(row, 1) * 4 + gl.expand_dims(word, 0), mask=exist, other=-1
    )
    words = gl.expand_dims(gl.expand_dims(words, 1), 3)
    pair_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, whole)))
    pair = gl.arange(0, COLUMNS // 8, pair_layout)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 2), 3)
    of_pair_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole)))
    of_pair = gl.arange(0, 2, of_pair_layout)
    of_pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(of_pair, 0), 1), 2)
    found = tile + (words >> (first_bit + pair * 2 + of_pair) & 1)
    return gl.convert_layout(found.reshape([ROWS, COLUMNS]), layout) != 0
