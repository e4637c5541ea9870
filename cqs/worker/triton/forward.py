"""The plain forward kernel: one partial output for every query tile of a list.

Maxima and exponents are in base 2, because the GPU has an instruction for ``2**x`` and none for
``e**x``. The LSE that the kernel writes is natural.
"""

import triton
import triton.language as tl

from cqs.worker.triton.fields import (
    TILE_BANDED_STOP,
    TILE_FIELDS,
    TILE_OUTPUT_ROW,
    TILE_RESIDUE,
    TILE_ROW_START,
    TILE_ROW_STOP,
    TILE_RUN_START,
    TILE_RUN_STOP,
)
from cqs.worker.triton.pairs import (
    apply_terms,
    is_kept,
    load_bias,
    load_key_bits,
    load_query_bits,
    load_run,
    visible,
)

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


# Triton compiles a kernel anew for each integer argument that is 1 or a multiple of 16. The numbers
# of tiles, heads and rows change from call to call, and the code gains nothing from those cases.
@triton.jit(
    do_not_specialize=[
        "num_tiles",
        "num_heads",
        "num_queries",
        "lse_batch_stride",
        "lse_head_stride",
        "lse_row_stride",
    ],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def attend_tiles(
    query,
    key,
    value,
    output,
    lse,
    tiles,
    runs,
    mask_bits,
    dropout_bits,
    slopes,
    bias,
    num_tiles,
    num_heads,
    num_queries,
    output_strides,
    lse_batch_stride,
    lse_head_stride,
    lse_row_stride,
    query_step,
    key_step,
    scale_log2,
    value_dim,
    bias_strides,
    softcap,
    sinks,
    drop_below,
    keep_scale,
    GROUP_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the partial output of one query tile of one head.

    With ``scores = terms(scale * q @ k.T)``, -inf where a pair is masked out, this is
    ``output = dropout(softmax(scores)) @ v`` and ``lse = logsumexp(scores, -1)``. A sink is
    one more score of each row, without a value.

    Args:
        query: Descriptor of the queries, ``[batch, num_heads, query_step, rows, head_dim]``.
        key: Descriptor of the keys, ``[batch, num_heads / GROUP_SIZE, key_step, rows, head_dim]``.
        value: Descriptor of the values, ``[batch, num_heads / GROUP_SIZE, key_step, rows,
            value_dim]``.
        output: ``[batch, num_heads, rows, value_dim]`` with a last stride of 1; written to.
        lse: float32 ``[batch, num_heads, rows]``; written to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs, or None if no run has any.
        dropout_bits: :class:`cqs.problem.dropout.DropoutBits` of the rows, or None without dropout.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        bias: ``[batch, num_heads, rows_q, rows_kv]``, or None.
        num_tiles: Number of tiles, the same for every head.
        num_heads: Number of query heads.
        num_queries: Number of queries of all residues.
        output_strides: Strides of batch, heads and rows. They are specialised: a store of 16 bytes
            requires that 16 divides them.
        lse_batch_stride: Stride of the batch of ``lse``.
        lse_head_stride: Stride of the heads of ``lse``.
        lse_row_stride: Stride of the rows of ``lse``.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        scale_log2: Factor on the scores divided by ln 2; positive.
        value_dim: Number of columns of the values.
        bias_strides: The four strides of ``bias``, 0 for dimensions that broadcast.
        softcap: The soft cap, or None.
        sinks: Sinks of the heads, ``[num_heads]``, or None.
        drop_below: Pairs with a random number below it, in [0, 2^32), are dropped.
        keep_scale: Factor on the probabilities of the pairs that stay.
        GROUP_SIZE: Number of query heads that share a KV head.
        TILE_Q: Rows of a tile.
        TILE_K: Columns of a block.
        BLOCK_D: head_dim, rounded up to a power of two.
        BLOCK_V: value_dim, rounded up to a power of two.
        PRECISION: Precision of the matrix products of float32.
    """
    # Programs run in the order of their ids: those of a head run together and share its keys in
    # the L2 cache.
    program = tl.program_id(0)
    head = program // num_tiles
    tile = tiles + program % num_tiles * TILE_FIELDS
    batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
    query_start = tl.load(tile + TILE_ROW_START)
    query_stop = tl.load(tile + TILE_ROW_STOP)
    output_row = tl.load(tile + TILE_OUTPUT_ROW)
    run_start = tl.load(tile + TILE_RUN_START)
    banded_stop = tl.load(tile + TILE_BANDED_STOP)
    run_stop = tl.load(tile + TILE_RUN_STOP)
    query_residue = tl.load(tile + TILE_RESIDUE)

    q = query.load([batch, head % num_heads, query_residue, query_start, 0]).reshape(
        TILE_Q, BLOCK_D
    )
    positions = query_start + tl.arange(0, TILE_Q)
    in_tile = positions < query_stop
    if dropout_bits is not None:
        multiplier, increment = load_query_bits(
            dropout_bits,
            head.to(tl.int64) * num_queries + query_residue + positions * query_step,
            in_tile,
        )
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head)
    tokens = (query_residue + positions * query_step)[:, None]
    bias_rows = bias, bias_strides, batch, head % num_heads, tokens
    steps = query_step, key_step
    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    if sinks is not None:  # a score of every row, without a value
        sink = tl.load(sinks + head % num_heads).to(tl.float32)
        largest = tl.zeros([TILE_Q], tl.float32) + sink * _LOG2E
        total += 1.0
    acc = tl.zeros([TILE_Q, BLOCK_V], tl.float32)
    # Two loops over the runs: the banded ones pay for the mask, the full ones, which are most of a
    # long sequence, do not.
    for index in range(run_start, banded_stop):
        run = load_run(runs, index)
        start, stop, _, _, residue, _ = run
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            products = tl.dot(q, k.T, input_precision=PRECISION)
            keys = k0 + tl.arange(0, TILE_K)
            in_run = (keys < stop)[None, :]
            columns = (residue + keys * key_step)[None, :]
            pair_bias = load_bias(*bias_rows, columns, in_tile[:, None] & in_run)
            scores, unit, capped = apply_terms(
                products, scale_log2, softcap, slope, pair_bias, run, positions, k0, *steps
            )
            is_visible = visible(mask_bits, run, positions, keys, query_step, key_step)
            scores = tl.where(is_visible, scores, float("-inf"))
            p, largest, total, decay = _exponentials(scores, largest, total, unit, True)
            if dropout_bits is not None:
                bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)
                kept = is_kept(multiplier[:, None], increment[:, None], bits[None, :], drop_below)
                p = tl.where(kept, p, 0.0)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            acc = acc * decay[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    for index in range(banded_stop, run_stop):
        run = load_run(runs, index)
        start, stop, _, _, residue, _ = run
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            products = tl.dot(q, k.T, input_precision=PRECISION)
            keys = k0 + tl.arange(0, TILE_K)
            columns = (residue + keys * key_step)[None, :]
            pair_bias = load_bias(*bias_rows, columns, in_tile[:, None])
            scores, unit, capped = apply_terms(
                products, scale_log2, softcap, slope, pair_bias, run, positions, k0, *steps
            )
            # A bias of -inf masks pairs out, of full runs too.
            p, largest, total, decay = _exponentials(scores, largest, total, unit, bias is not None)
            if dropout_bits is not None:
                bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)
                kept = is_kept(multiplier[:, None], increment[:, None], bits[None, :], drop_below)
                p = tl.where(kept, p, 0.0)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            acc = acc * decay[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    columns = tl.arange(0, BLOCK_V)
    # A row without a live pair has output 0 and LSE -inf: no division by 0, and log2(1) = 0.
    total = tl.where(total == 0, 1.0, total)
    acc = acc / total[:, None]
    if dropout_bits is not None:  # dropout does not change the denominator
        acc *= keep_scale
    # Offsets of more than 2^31 elements occur: 1M tokens of 32 heads of 128 are 2^32.
    batch, head = batch.to(tl.int64), (head % num_heads).to(tl.int64)
    rows = (output_row + tl.arange(0, TILE_Q) * query_step).to(tl.int64)
    place = output + batch * output_strides[0] + head * output_strides[1]
    tl.store(
        place + rows[:, None] * output_strides[2] + columns[None, :],
        acc.to(output.dtype.element_ty),
        mask=in_tile[:, None] & (columns < value_dim)[None, :],
    )
    place = lse + batch * lse_batch_stride + head * lse_head_stride + rows * lse_row_stride
    tl.store(place, (largest + tl.log2(total)) * _LN2, mask=in_tile)


@triton.jit
def _exponentials(scores, largest, total, unit, MAY_BE_EMPTY: tl.constexpr):
    """Take one step of the online softmax.

    Args:
        scores: Scores of a block, float32 ``[rows, columns]``.
        largest: Maximum of each row so far, times ``unit``.
        total: Denominator of each row so far, relative to its maximum.
        unit: Factor on the scores that makes them base-2 logarithms; positive.
        MAY_BE_EMPTY: Whether all scores of a row may be -inf.

    Returns:
        Probabilities relative to the new maximum, the new maximum, the new denominator, and the
        factor on the sums of earlier blocks.
    """
    larger = tl.maximum(largest, tl.max(scores, 1) * unit)
    shift = larger
    if MAY_BE_EMPTY:  # -inf - -inf would be NaN; a full run has no such row
        shift = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2(scores * unit - shift[:, None])
    decay = tl.exp2(largest - shift)
    return p, larger, total * decay + tl.sum(p, 1), decay
