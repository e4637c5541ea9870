"""Live pairs and score terms in the Hopper kernels, in the register layout of the tensor cores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cqs.worker.triton.fields import NO_BITS

LARGEST_SOFTCAP = 256
"""Largest soft cap that the kernels support: :func:`tanh` has an absolute error of 8e-7, which is
then at most 2e-4 in a score, less than the rounding of float16 (5e-4)."""
_LOG2E = gl.constexpr(1.4426950408889634)
_LIMIT = gl.constexpr(0.6)
"""Largest argument of the hyperbolic tangent that :func:`capped_powers` computes by ``TERMS``."""
TERMS = 0.9999910177, -0.3329897411, 0.1297455359, -0.03961126842
"""Coefficients of ``tanh(x) / x`` in ``x * x``: an absolute error of tanh of 6.4e-7, least squares
with weights that level the error between 0 and ``_LIMIT``."""
_TERM_0, _TERM_1, _TERM_2, _TERM_3 = map(gl.constexpr, TERMS)


def _tanh_of_quad(a: int, b: int, c: int, d: int) -> str:
    """Return PTX that turns ``x`` in four registers into ``1 - 2 / (1 + 2**x)``.

    They share a reciprocal, ``1 / a = bcd / abcd``. The exponents are at most 31, where the result
    rounds to 1, so that no product overflows.
    """
    powers = "".join(
        f"""
min.NaN.f32 t{i}, t{i}, 0f41F80000;
ex2.approx.ftz.f32 t{i}, t{i};
add.f32 t{i}, t{i}, 0f3F800000;
"""
        for i in (a, b, c, d)
    )
    return f"""{powers}
mul.f32 p0, t{a}, t{b};
mul.f32 p1, t{c}, t{d};
mul.f32 r0, p0, p1;
rcp.approx.ftz.f32 r0, r0;
mul.f32 r1, r0, p0;
mul.f32 r0, r0, p1;
mul.f32 r2, r0, t{b};
mul.f32 r0, r0, t{a};
mul.f32 r3, r1, t{d};
mul.f32 r1, r1, t{c};
fma.rn.f32 t{a}, r2, 0fC0000000, 0f3F800000;
fma.rn.f32 t{b}, r0, 0fC0000000, 0f3F800000;
fma.rn.f32 t{c}, r3, 0fC0000000, 0f3F800000;
fma.rn.f32 t{d}, r1, 0fC0000000, 0f3F800000;
"""


def _lines(text: str, count: int) -> str:
    """Return a line of PTX for each of ``count`` elements."""
    return "".join(text.format(i=i, x=f"${count + i}") + "\n" for i in range(count))


# In the accumulator layout elements 0, 1, 4 and 5 of a thread are of one row, and 2, 3, 6 and 7 of
# another. NaN spreads to the row, which its softmax would do anyway.
_TANH = gl.constexpr(
    "{\n.reg .f32 t<8>, p<2>, r<4>;\n"
    + _lines("mov.f32 t{i}, {x};", 8)
    + _tanh_of_quad(0, 1, 4, 5)
    + _tanh_of_quad(2, 3, 6, 7)
    + _lines("mov.f32 ${i}, t{i};", 8)
    + "}"
)
"""``1 - 2 / (1 + 2**x)`` of 8 adjacent elements of a thread."""


def _make_capped_powers() -> str:
    """Return the PTX of :func:`capped_powers` for 16 adjacent elements of a thread.

    A branch that all threads of a warp take together skips the special functions of the hyperbolic
    tangent. They run only if an argument of the 32 x 16 is beyond ``_LIMIT``.
    """
    # The operands after the 16 products are the same for all elements: the first of each is read.
    term_0, term_1, term_2, term_3, unit, shift, limit, stretch = (
        f"${i}" for i in range(32, 160, 16)
    )
    return "\n".join(
        [
            "{\n.reg .f32 t<16>, z<16>, m, p<2>, r<4>;\n.reg .pred is_beyond;",
            _lines("mul.f32 z{i}, {x}, {x};", 16),
            _lines(f"fma.rn.f32 t{{i}}, z{{i}}, {term_3}, {term_2};", 16),
            _lines(f"fma.rn.f32 t{{i}}, z{{i}}, t{{i}}, {term_1};", 16),
            _lines(f"fma.rn.f32 t{{i}}, z{{i}}, t{{i}}, {term_0};", 16),
            _lines(f"fma.rn.f32 t{{i}}, {{x}}, t{{i}}, {shift};", 16),
            _lines("ex2.approx.ftz.f32 t{i}, t{i};", 16),
            "mov.f32 m, z0;",
            _lines("max.f32 m, m, z{i};", 16),
            f"setp.gt.f32 is_beyond, m, {limit};",
            "vote.sync.any.pred is_beyond, is_beyond, 0xFFFFFFFF;",
            "@!is_beyond bra.uni DONE;",
            _lines(f"mul.f32 t{{i}}, {{x}}, {stretch};", 16),
            *(_tanh_of_quad(i, i + 1, i + 4, i + 5) for i in (0, 2, 8, 10)),
            _lines(f"fma.rn.f32 t{{i}}, t{{i}}, {unit}, {shift};", 16),
            _lines("ex2.approx.ftz.f32 t{i}, t{i};", 16),
            "DONE:",
            _lines("mov.f32 ${i}, t{i};", 16) + "}",
        ]
    )


_CAPPED_POWERS = gl.constexpr(_make_capped_powers())
_CAPPED_POWERS_OPERANDS = gl.constexpr(",".join(["=f"] * 16 + ["f"] * 9 * 16))


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
        live &= are_set(layout, place, bits_start != NO_BITS, (column_start - start) // 4)
    return live


@gluon.jit
def are_set(layout: gl.constexpr, place, exist, first_bit):
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
    # Column c = pair * 8 + integer * 2 + parity, so [ROWS, COLUMNS] splits into these dimensions
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
    parity_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole)))
    parity = gl.arange(0, 2, parity_layout)
    parity = gl.expand_dims(gl.expand_dims(gl.expand_dims(parity, 0), 1), 2)
    bits = tile + (integers >> (first_bit + pair * 2 + parity) & 1)
    return gl.convert_layout(bits.reshape([ROWS, COLUMNS]), layout) != 0


@gluon.jit
def tanh(products, factor):
    """Return the hyperbolic tangent of products, with an absolute error of 8e-7 (mean 1.2e-7).

    A multiprocessor computes 16 special functions per clock, so that one for each pair takes as
    long as a product of heads of 64 on the tensor cores. By sharing reciprocals, the hyperbolic
    tangent of a pair takes 1.25 of them, in addition to the exponential of the softmax.

    Args:
        products: float32 in the tensor cores' accumulator layout. NaN of a pair that is masked out
            must have been replaced before.
        factor: Factor on the products, times 2 / ln 2.
    """
    return gl.inline_asm_elementwise(
        _TANH,
        "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [products * factor],
        dtype=gl.float32,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def capped_powers(products, factor, unit, shift):
    """Return ``2 ** (unit * tanh(products * factor) - shift)``.

    The hyperbolic tangent is a polynomial on the FP32 pipes, whose fused multiply-adds also apply
    ``unit`` and ``shift``. The special function units, which the softmax alone keeps busy at
    head_dim 64, compute one power a pair, and the other functions only where an argument is large.

    Args:
        products: float32 in the tensor cores' accumulator layout. NaN of a pair that is masked out
            must have been replaced before.
        factor: Positive factor on the products; its seventh power must be a float32 number.
        unit: Factor on the hyperbolic tangents.
        shift: Number that is subtracted from the exponents.
    """
    zeros = gl.full(products.shape, 0.0, gl.float32, products.type.layout)
    square = factor * factor
    slope = unit * factor
    return gl.inline_asm_elementwise(
        _CAPPED_POWERS,
        _CAPPED_POWERS_OPERANDS,
        [
            products,
            zeros + slope * _TERM_0,
            zeros + slope * square * _TERM_1,
            zeros + slope * square * square * _TERM_2,
            zeros + slope * square * square * square * _TERM_3,
            zeros + unit,
            zeros - shift,
            zeros + _LIMIT * _LIMIT / square,
            zeros + 2 * _LOG2E * factor,
        ],
        dtype=gl.float32,
        is_pure=True,
        pack=16,
    )


@gluon.jit
def alibi(layout: gl.constexpr, slope, offset, steps, row_start, column_start):
    """Return ``slope`` times the distance of the positions of pairs, float32 ``[64, columns]``.

    Args:
        layout: Layout of the scores, that of the tensor cores' accumulator ``[64, columns]``.
        slope: Factor on the distances; positive or negative.
        offset: See ``RUN_OFFSET``.
        steps: Tokens between two rows, and between two columns.
        row_start: First row, as a row number within its residue.
        column_start: First column, as a column number within its residue.
    """
    ROWS: gl.constexpr = layout.warps_per_cta[0] * layout.instr_shape[0]
    COLUMNS: gl.constexpr = layout.instr_shape[1]
    row_step, column_step = steps
    # Column c = pair * 8 + quarter * 2 + parity. Only the quarter depends on the thread: others
    # are constants of a thread's registers, and each element takes one instruction.
    tile = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout).reshape([ROWS, COLUMNS // 8, 4, 2])
    whole: gl.constexpr = tile.type.layout
    row_and_quarter: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, whole))
    row = row_start + gl.arange(0, ROWS, gl.SliceLayout(1, row_and_quarter))
    quarter = column_start + 2 * gl.arange(0, 4, gl.SliceLayout(0, row_and_quarter))
    place = gl.expand_dims(row * row_step + offset, 1) - gl.expand_dims(quarter * column_step, 0)
    place = place.to(gl.float32) * slope
    pair_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, whole)))
    pair = 8 * gl.arange(0, COLUMNS // 8, pair_layout)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 2), 3)
    parity_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole)))
    parity = gl.arange(0, 2, parity_layout)
    parity = gl.expand_dims(gl.expand_dims(gl.expand_dims(parity, 0), 1), 2)
    column = (pair + parity).to(gl.float32) + tile
    place = gl.expand_dims(gl.expand_dims(place, 1), 3) + tile
    biases = gl.fma(column, tile - column_step * slope, place)
    return gl.convert_layout(gl.abs(biases.reshape([ROWS, COLUMNS])), layout)
