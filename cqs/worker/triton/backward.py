"""The backward kernels: gradients of queries, and of keys and values, without atomics.

Given the lse and the output of *all* keys, the probability of any pair is ``exp(score - lse)``, so
what different tasks find adds up. Each kernel owns the rows that it writes, and the scores are
computed in both: seven matrix products instead of five, for the same bits in every run.
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

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_blocks", "num_heads", "num_rows"])
def row_statistics(
    output,
    grad_output,
    lse,
    lse_log2,
    delta,
    output_strides,
    grad_strides,
    num_blocks,
    num_heads,
    num_rows,
    value_dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write what the gradients need to know of some queries of one head.

    Args:
        output: ``[batch, num_heads, num_rows, value_dim]``; grad_output likewise.
        lse: float32 ``[batch, num_heads, num_rows]``, contiguous, as are the next two.
        lse_log2: The lse over ln 2, and +inf for queries that see no key, so that they keep no
            probability.
        delta: The sum of output times its gradient over the columns.
        output_strides: Four, as are ``grad_strides``.
        num_blocks: Of ``BLOCK_ROWS`` rows each, in one head.
    """
    rows = (tl.program_id(0) % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head_of_batch = head // num_heads, head % num_heads
    columns = tl.arange(0, BLOCK_V)
    exist = rows < num_rows
    mask = exist[:, None] & (columns < value_dim)[None, :]
    place = batch * output_strides[0] + head_of_batch * output_strides[1]
    place += rows[:, None] * output_strides[2] + columns[None, :] * output_strides[3]
    out = tl.load(output + place, mask=mask, other=0.0).to(tl.float32)
    place = batch * grad_strides[0] + head_of_batch * grad_strides[1]
    place += rows[:, None] * grad_strides[2] + columns[None, :] * grad_strides[3]
    grad = tl.load(grad_output + place, mask=mask, other=0.0).to(tl.float32)
    place = head * num_rows + rows
    log2 = tl.load(lse + place, mask=exist, other=0.0) * _LOG2E
    # Probabilities of exp2(score - lse) are 0 in rows without a live pair, and NaN in rows with a
    # score of +inf, as in PyTorch.
    log2 = tl.where(log2 == float("inf"), float("nan"), log2)
    tl.store(lse_log2 + place, tl.where(log2 == float("-inf"), float("inf"), log2), mask=exist)
    tl.store(delta + place, tl.sum(out * grad, 1), mask=exist)


@triton.jit(
    do_not_specialize=["num_tiles", "num_heads", "num_queries"],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def query_gradients(
    query,
    key,
    value,
    grad_output,
    lse_log2,
    delta,
    grad_query,
    tiles,
    runs,
    bits,
    dropout_bits,
    num_tiles,
    query_step,
    key_step,
    num_heads,
    num_queries,
    head_dim,
    scale,
    drop_below,
    keep_scale,
    GROUP_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SUM: tl.constexpr,
):
    """Write what one query tile of one head gathers for the gradient of its queries.

    Args:
        query: Descriptor of ``[batch, num_heads, query_step, rows, head_dim]``; key, value and
            grad_output accordingly.
        lse_log2: float32 ``[batch, num_heads, num_queries]``, contiguous; see ``row_statistics``.
        delta: Likewise.
        grad_query: ``[batch, num_heads, num_queries, head_dim]``, contiguous.
        tiles: int32 ``[num_tiles, 8]``, see tiles.py.
        runs: int32 ``[num_runs, 8]``.
        bits: int32, the words that runs name, or None if none does.
        dropout_bits: :class:`cqs.dropout.DropoutBits` of the rows, or None without dropout.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        num_queries: In all residues.
        scale: Factor on the scores.
        drop_below: Pairs with a random number below it, in [0, 2^32), are dropped.
        keep_scale: Factor on the probabilities of the rest.
        IS_SUM: Whether to add to what is there.
    """
    program = tl.program_id(0)
    head = program // num_tiles
    tile = tiles + program % num_tiles * 8
    batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
    query_start = tl.load(tile)
    query_stop = tl.load(tile + 1)
    query_residue = tl.load(tile + 7)

    positions = query_start + tl.arange(0, TILE_Q)
    in_tile = positions < query_stop
    rows = head.to(tl.int64) * num_queries + query_residue + positions * query_step
    corner = [batch, head % num_heads, query_residue, query_start, 0]
    q = query.load(corner).reshape(TILE_Q, BLOCK_D)
    grad_out = grad_output.load(corner).reshape(TILE_Q, BLOCK_V)
    lses = tl.load(lse_log2 + rows, mask=in_tile, other=float("inf"))
    deltas = tl.load(delta + rows, mask=in_tile, other=0.0)
    if dropout_bits is not None:
        multiplier, increment = load_query_bits(dropout_bits, rows, in_tile)
    acc = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    for run in range(tl.load(tile + 3), tl.load(tile + 5)):
        start, stop, band, bits_of_run, residue = load_run(runs, run)
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            keys = k0 + tl.arange(0, TILE_K)
            is_visible = visible(
                bits, bits_of_run, positions, keys, start, stop, band, query_step, key_step
            )
            p = tl.exp2(scores * (scale * _LOG2E) - lses[:, None])
            grad_p = tl.dot(grad_out, v.T, input_precision=PRECISION)
            if dropout_bits is not None:
                key_bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)[
                    None, :
                ]
                kept = is_kept(multiplier[:, None], increment[:, None], key_bits, drop_below)
                grad_p = tl.where(kept, grad_p * keep_scale, 0.0)
            grad_scores = tl.where(is_visible, p * (grad_p - deltas[:, None]), 0.0)
            acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    _write(grad_query, acc * scale, rows, in_tile, head_dim, BLOCK_D, IS_SUM)


@triton.jit(
    do_not_specialize=["num_tiles", "num_heads", "num_queries", "num_keys"],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def key_gradients(
    query,
    key,
    value,
    grad_output,
    lse_log2,
    delta,
    grad_key,
    grad_value,
    tiles,
    runs,
    bits,
    dropout_bits,
    num_tiles,
    key_step,
    query_step,
    num_heads,
    num_queries,
    num_keys,
    head_dim,
    value_dim,
    scale,
    drop_below,
    keep_scale,
    GROUP_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SUM: tl.constexpr,
):
    """Write what one key tile of one key head gathers for the gradients of its keys and values.

    Arguments as for :func:`query_gradients`; here tiles are of keys and runs of queries.
    """
    program = tl.program_id(0)
    kv_head = program // num_tiles
    tile = tiles + program % num_tiles * 8
    num_kv_heads = num_heads // GROUP_SIZE
    batch = kv_head // num_kv_heads
    key_start = tl.load(tile)
    key_stop = tl.load(tile + 1)
    key_residue = tl.load(tile + 7)

    positions = key_start + tl.arange(0, TILE_K)
    in_tile = positions < key_stop
    tokens = key_residue + positions * key_step
    corner = [batch, kv_head % num_kv_heads, key_residue, key_start, 0]
    k = key.load(corner).reshape(TILE_K, BLOCK_D)
    v = value.load(corner).reshape(TILE_K, BLOCK_V)
    if dropout_bits is not None:
        key_bits = load_key_bits(dropout_bits, tokens, in_tile)[:, None]
    acc_k = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    acc_v = tl.zeros([TILE_K, BLOCK_V], tl.float32)
    for member in range(GROUP_SIZE):
        head = kv_head % num_kv_heads * GROUP_SIZE + member
        first_row = (batch * num_heads + head).to(tl.int64) * num_queries
        for run in range(tl.load(tile + 3), tl.load(tile + 5)):
            start, stop, band, bits_of_run, residue = load_run(runs, run)
            for q0 in range(start, stop, TILE_Q):
                q = query.load([batch, head, residue, q0, 0]).reshape(TILE_Q, BLOCK_D)
                grad_out = grad_output.load([batch, head, residue, q0, 0]).reshape(TILE_Q, BLOCK_V)
                queries = q0 + tl.arange(0, TILE_Q)
                in_run = queries < stop
                place = first_row + residue + queries * query_step
                lses = tl.load(lse_log2 + place, mask=in_run, other=float("inf"))
                deltas = tl.load(delta + place, mask=in_run, other=0.0)
                scores = tl.dot(k, q.T, input_precision=PRECISION)
                p = tl.exp2(scores * (scale * _LOG2E) - lses[None, :])
                is_visible = visible(
                    bits, bits_of_run, positions, queries, start, stop, band, key_step, query_step
                )
                p = tl.where(is_visible, p, 0.0)
                grad_p = tl.dot(v, grad_out.T, input_precision=PRECISION)
                kept_p = p
                if dropout_bits is not None:
                    multiplier, increment = load_query_bits(dropout_bits, place, in_run)
                    kept = is_kept(multiplier[None, :], increment[None, :], key_bits, drop_below)
                    grad_p = tl.where(kept, grad_p * keep_scale, 0.0)
                    kept_p = tl.where(kept, p, 0.0)
                acc_v = tl.dot(kept_p.to(v.dtype), grad_out, acc_v, input_precision=PRECISION)
                grad_scores = p * (grad_p - deltas[None, :])
                acc_k = tl.dot(grad_scores.to(k.dtype), q, acc_k, input_precision=PRECISION)
    if dropout_bits is not None:
        acc_v *= keep_scale
    rows = kv_head.to(tl.int64) * num_keys + tokens
    _write(grad_key, acc_k * scale, rows, in_tile, head_dim, BLOCK_D, IS_SUM)
    _write(grad_value, acc_v, rows, in_tile, value_dim, BLOCK_V, IS_SUM)


@triton.jit
def _write(target, values, rows, in_tile, dim, BLOCK: tl.constexpr, IS_SUM: tl.constexpr):
    """Write a tile to rows of a gradient that no other program touches, or add it."""
    columns = tl.arange(0, BLOCK)
    place = target + rows[:, None] * dim + columns[None, :]
    mask = in_tile[:, None] & (columns < dim)[None, :]
    if IS_SUM:
        values += tl.load(place, mask=mask, other=0.0)
    tl.store(place, values.to(target.dtype.element_ty), mask=mask)
