"""The forward kernel: one partial result for every query tile of a list.

Scores are kept in units of log2, where an exponential is one instruction; what leaves is natural.
"""

import triton
import triton.language as tl

from cqs.worker.triton.pairs import (
    is_kept,
    load_key_bits,
    load_query_bits,
    load_run,
    visible,
)

_LN2 = tl.constexpr(0.6931471805599453)


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
    bits,
    dropout_bits,
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
    drop_below,
    keep_scale,
    GROUP_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with one query tile of one head; heads run one after another, for the cache.

    Args:
        query: Descriptor of ``[batch, num_heads, query_step, rows, head_dim]``, as are key and
            value with ``num_heads / GROUP_SIZE`` heads and ``key_step`` residues.
        output: ``[batch, num_heads, rows, value_dim]`` with adjacent columns.
        lse: float32 ``[batch, num_heads, rows]``.
        tiles: int32 ``[num_tiles, 8]``, see tiles.py.
        runs: int32 ``[num_runs, 8]``.
        bits: int32, the words that runs name, or None if none does.
        dropout_bits: :class:`cqs.dropout.DropoutBits` of the rows, or None without dropout.
        num_queries: In all residues.
        output_strides: Of batch, heads and rows; Triton looks whether 16 divides them.
        lse_batch_stride: Of ``lse``, like the next two, at which it does not look.
        lse_head_stride: Likewise.
        lse_row_stride: Likewise.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        scale_log2: Factor on the scores, over ln 2; positive.
        drop_below: Pairs with a random number below it, in [0, 2^32), are dropped.
        keep_scale: Factor on the probabilities of the rest.
    """
    program = tl.program_id(0)
    head = program // num_tiles
    tile = tiles + program % num_tiles * 8
    batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
    query_start = tl.load(tile)
    query_stop = tl.load(tile + 1)
    first_row = tl.load(tile + 2)
    first_run = tl.load(tile + 3)
    banded_stop = tl.load(tile + 4)
    run_stop = tl.load(tile + 5)
    query_residue = tl.load(tile + 7)

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
    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, BLOCK_V], tl.float32)
    for run in range(first_run, banded_stop):
        start, stop, band, bits_of_run, residue = load_run(runs, run)
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            keys = k0 + tl.arange(0, TILE_K)
            is_visible = visible(
                bits, bits_of_run, positions, keys, start, stop, band, query_step, key_step
            )
            scores = tl.where(is_visible, scores, float("-inf"))
            p, largest, total, decay = _exponentials(scores, largest, total, scale_log2, True)
            if dropout_bits is not None:
                key_bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)[
                    None, :
                ]
                kept = is_kept(multiplier[:, None], increment[:, None], key_bits, drop_below)
                p = tl.where(kept, p, 0.0)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            acc = acc * decay[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    for run in range(banded_stop, run_stop):
        start, stop, _, _, residue = load_run(runs, run)
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            p, largest, total, decay = _exponentials(scores, largest, total, scale_log2, False)
            if dropout_bits is not None:
                keys = k0 + tl.arange(0, TILE_K)
                key_bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)[
                    None, :
                ]
                kept = is_kept(multiplier[:, None], increment[:, None], key_bits, drop_below)
                p = tl.where(kept, p, 0.0)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            acc = acc * decay[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    columns = tl.arange(0, BLOCK_V)
    total = tl.where(total == 0, 1.0, total)
    acc = acc / total[:, None]
    if dropout_bits is not None:
        acc *= keep_scale
    batch, head = batch.to(tl.int64), (head % num_heads).to(tl.int64)
    rows = (first_row + tl.arange(0, TILE_Q) * query_step).to(tl.int64)
    place = output + batch * output_strides[0] + head * output_strides[1]
    tl.store(
        place + rows[:, None] * output_strides[2] + columns[None, :],
        acc.to(output.dtype.element_ty),
        mask=in_tile[:, None] & (columns < value_dim)[None, :],
    )
    place = lse + batch * lse_batch_stride + head * lse_head_stride + rows * lse_row_stride
    tl.store(place, (largest + tl.log2(total)) * _LN2, mask=in_tile)


@triton.jit
def _exponentials(scores, largest, total, scale_log2, MAY_BE_EMPTY: tl.constexpr):
    """Take one step of the running softmax; return also what the past decays by."""
    larger = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
    shift = larger
    if MAY_BE_EMPTY:
        shift = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(largest - shift)
    return p, larger, total * decay + tl.sum(p, 1), decay
