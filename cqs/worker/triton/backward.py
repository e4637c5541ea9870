"""The plain backward kernels: gradients of queries, and of keys and values, without atomics.

Given the LSE of *all* keys, the probability of any pair is ``exp(score - lse)``, so that the
gradients of disjoint pairs add up. Every program alone writes its rows, so that results are
deterministic. Both kernels compute the scores: seven matrix products, where one kernel with atomic
additions needs five.
"""

import triton
import triton.language as tl

from cqs.worker.triton.fields import (
    TILE_FIELDS,
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
    IN_BLOCKS_OF: tl.constexpr,
):
    """Write the statistics that the gradients require, for some queries of one head.

    Args:
        output: ``[batch, num_heads, num_rows, value_dim]``.
        grad_output: Gradient of the output, in its shape.
        lse: float32 ``[batch, num_heads, num_rows]``, contiguous.
        lse_log2: float32 in the shape of ``lse``; written to: the LSE divided by ln 2; +inf for
            queries without a live pair, NaN for an LSE of +inf.
        delta: float32 in the shape of ``lse``; written to: the sum over the columns of the output
            times its gradient (Dao et al., "FlashAttention", 2022).
        output_strides: The four strides of ``output``.
        grad_strides: The four strides of ``grad_output``.
        num_blocks: Number of blocks of ``BLOCK_ROWS`` rows in one head.
        num_heads: Number of query heads.
        num_rows: Number of queries.
        value_dim: Number of columns of the output.
        BLOCK_ROWS: Rows of a program.
        BLOCK_V: value_dim, rounded up to a power of two.
        IN_BLOCKS_OF: Rows of a block, if the statistics of blocks alternate in memory, else 0. In
            blocks they are negative, and those of rows beyond the last are -inf and 0.
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
    # Probabilities exp2(score - lse) are 0 in rows without a live pair, and NaN in rows with a
    # score of +inf, as in PyTorch.
    log2 = tl.where(log2 == float("inf"), float("nan"), log2)
    log2 = tl.where(log2 == float("-inf"), float("inf"), log2)
    deltas = tl.sum(out * grad, 1)
    if IN_BLOCKS_OF:
        num_padded = num_blocks * BLOCK_ROWS
        place = head * 2 * num_padded + rows // IN_BLOCKS_OF * IN_BLOCKS_OF + rows
        tl.store(lse_log2 + place, tl.where(exist, -log2, float("-inf")))
        tl.store(delta + place, -deltas)
    else:
        tl.store(lse_log2 + place, log2, mask=exist)
        tl.store(delta + place, deltas, mask=exist)


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
    mask_bits,
    dropout_bits,
    slopes,
    bias,
    num_tiles,
    query_step,
    key_step,
    num_heads,
    num_queries,
    head_dim,
    scale,
    bias_strides,
    softcap,
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
    """Write the gradient of one query tile of one head.

    Args:
        query: Descriptor of the queries, ``[batch, num_heads, query_step, rows, head_dim]``.
        key: Descriptor of the keys, ``[batch, num_heads / GROUP_SIZE, key_step, rows, head_dim]``.
        value: Descriptor of the values, ``[batch, num_heads / GROUP_SIZE, key_step, rows,
            value_dim]``.
        grad_output: Descriptor of the gradient of the output, ``[batch, num_heads, query_step,
            rows, value_dim]``.
        lse_log2: float32 ``[batch, num_heads, num_queries]``, contiguous; see
            :func:`row_statistics`.
        delta: float32 ``[batch, num_heads, num_queries]``, contiguous; see :func:`row_statistics`.
        grad_query: ``[batch, num_heads, num_queries, head_dim]``, contiguous; written to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs, or None if no run has any.
        dropout_bits: :class:`cqs.problem.dropout.DropoutBits` of the rows, or None without dropout.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        bias: ``[batch, num_heads, rows_q, rows_kv]``, or None.
        num_tiles: Number of tiles, the same for every head.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        num_heads: Number of query heads.
        num_queries: Number of queries of all residues.
        head_dim: Number of columns of the queries.
        scale: Factor on the scores.
        bias_strides: The four strides of ``bias``, 0 for dimensions that broadcast.
        softcap: The soft cap, or None.
        drop_below: Pairs with a random number below it, in [0, 2^32), are dropped.
        keep_scale: Factor on the probabilities of the pairs that stay.
        GROUP_SIZE: Number of query heads that share a KV head.
        TILE_Q: Rows of a tile.
        TILE_K: Columns of a block.
        BLOCK_D: head_dim, rounded up to a power of two.
        BLOCK_V: value_dim, rounded up to a power of two.
        PRECISION: Precision of the matrix products of float32.
        IS_SUM: Whether to add to ``grad_query`` instead of overwriting it.
    """
    program = tl.program_id(0)
    head = program // num_tiles
    tile = tiles + program % num_tiles * TILE_FIELDS
    batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
    query_start = tl.load(tile + TILE_ROW_START)
    query_stop = tl.load(tile + TILE_ROW_STOP)
    query_residue = tl.load(tile + TILE_RESIDUE)

    positions = query_start + tl.arange(0, TILE_Q)
    in_tile = positions < query_stop
    rows = head.to(tl.int64) * num_queries + query_residue + positions * query_step
    corner = [batch, head % num_heads, query_residue, query_start, 0]
    q = query.load(corner).reshape(TILE_Q, BLOCK_D)
    grad_out = grad_output.load(corner).reshape(TILE_Q, BLOCK_V)
    # Rows beyond the tile get an LSE of +inf: their probabilities are 0, and they are not stored.
    lses = tl.load(lse_log2 + rows, mask=in_tile, other=float("inf"))
    deltas = tl.load(delta + rows, mask=in_tile, other=0.0)
    if dropout_bits is not None:
        multiplier, increment = load_query_bits(dropout_bits, rows, in_tile)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head)
    tokens = (query_residue + positions * query_step)[:, None]
    bias_rows = bias, bias_strides, batch, head % num_heads, tokens
    steps = query_step, key_step
    acc = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    for index in range(tl.load(tile + TILE_RUN_START), tl.load(tile + TILE_RUN_STOP)):
        run = load_run(runs, index)
        start, stop, _, _, residue, _ = run
        for k0 in range(start, stop, TILE_K):
            k = key.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_D)
            v = value.load([batch, kv_head, residue, k0, 0]).reshape(TILE_K, BLOCK_V)
            products = tl.dot(q, k.T, input_precision=PRECISION)
            keys = k0 + tl.arange(0, TILE_K)
            is_visible = visible(mask_bits, run, positions, keys, query_step, key_step)
            in_run = (keys < stop)[None, :]
            columns = (residue + keys * key_step)[None, :]
            pair_bias = load_bias(*bias_rows, columns, in_tile[:, None] & in_run)
            scores, unit, capped = apply_terms(
                products, scale * _LOG2E, softcap, slope, pair_bias, run, positions, k0, *steps
            )
            p = tl.exp2(scores * unit - lses[:, None])
            grad_p = tl.dot(grad_out, v.T, input_precision=PRECISION)
            if dropout_bits is not None:
                bits = load_key_bits(dropout_bits, residue + keys * key_step, keys < stop)
                kept = is_kept(multiplier[:, None], increment[:, None], bits[None, :], drop_below)
                grad_p = tl.where(kept, grad_p * keep_scale, 0.0)
            # The select comes after the product: p of a masked pair may be inf, and inf * 0 is NaN.
            grad_scores = p * (grad_p - deltas[:, None])
            if softcap is not None:
                grad_scores *= 1 - capped * capped
            grad_scores = tl.where(is_visible, grad_scores, 0.0)
            acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    _write_tile(grad_query, acc * scale, rows, in_tile, head_dim, BLOCK_D, IS_SUM)


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
    mask_bits,
    dropout_bits,
    slopes,
    bias,
    num_tiles,
    key_step,
    query_step,
    num_heads,
    num_queries,
    num_keys,
    head_dim,
    value_dim,
    scale,
    bias_strides,
    softcap,
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
    """Write the gradients of one tile of keys and values of one KV head.

    Tiles are of keys, and runs are of queries.

    Args:
        query: Descriptor of the queries, ``[batch, num_heads, query_step, rows, head_dim]``.
        key: Descriptor of the keys, ``[batch, num_heads / GROUP_SIZE, key_step, rows, head_dim]``.
        value: Descriptor of the values, ``[batch, num_heads / GROUP_SIZE, key_step, rows,
            value_dim]``.
        grad_output: Descriptor of the gradient of the output, ``[batch, num_heads, query_step,
            rows, value_dim]``.
        lse_log2: float32 ``[batch, num_heads, num_queries]``, contiguous; see
            :func:`row_statistics`.
        delta: float32 ``[batch, num_heads, num_queries]``, contiguous; see :func:`row_statistics`.
        grad_key: ``[batch, num_heads / GROUP_SIZE, num_keys, head_dim]``, contiguous; written to.
        grad_value: ``[batch, num_heads / GROUP_SIZE, num_keys, value_dim]``, contiguous; written
            to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs, or None if no run has any.
        dropout_bits: :class:`cqs.problem.dropout.DropoutBits` of the rows, or None without dropout.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        bias: ``[batch, num_heads, rows_q, rows_kv]``, or None.
        num_tiles: Number of tiles, the same for every KV head.
        key_step: Tokens between two rows.
        query_step: Tokens between two columns.
        num_heads: Number of query heads.
        num_queries: Number of queries of all residues.
        num_keys: Number of keys of all residues.
        head_dim: Number of columns of the keys.
        value_dim: Number of columns of the values.
        scale: Factor on the scores.
        bias_strides: The four strides of ``bias``, 0 for dimensions that broadcast.
        softcap: The soft cap, or None.
        drop_below: Pairs with a random number below it, in [0, 2^32), are dropped.
        keep_scale: Factor on the probabilities of the pairs that stay.
        GROUP_SIZE: Number of query heads that share a KV head.
        TILE_Q: Columns of a block.
        TILE_K: Rows of a tile.
        BLOCK_D: head_dim, rounded up to a power of two.
        BLOCK_V: value_dim, rounded up to a power of two.
        PRECISION: Precision of the matrix products of float32.
        IS_SUM: Whether to add to the gradients instead of overwriting them.
    """
    program = tl.program_id(0)
    kv_head = program // num_tiles
    tile = tiles + program % num_tiles * TILE_FIELDS
    num_kv_heads = num_heads // GROUP_SIZE
    batch = kv_head // num_kv_heads
    key_start = tl.load(tile + TILE_ROW_START)
    key_stop = tl.load(tile + TILE_ROW_STOP)
    key_residue = tl.load(tile + TILE_RESIDUE)

    positions = key_start + tl.arange(0, TILE_K)
    in_tile = positions < key_stop
    tokens = key_residue + positions * key_step
    steps = key_step, query_step
    corner = [batch, kv_head % num_kv_heads, key_residue, key_start, 0]
    k = key.load(corner).reshape(TILE_K, BLOCK_D)
    v = value.load(corner).reshape(TILE_K, BLOCK_V)
    if dropout_bits is not None:
        key_bits = load_key_bits(dropout_bits, tokens, in_tile)[:, None]
    acc_k = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    acc_v = tl.zeros([TILE_K, BLOCK_V], tl.float32)
    # The query heads of a KV head, in a fixed order: their sum stays in registers, without atomics.
    for member in range(GROUP_SIZE):
        head = kv_head % num_kv_heads * GROUP_SIZE + member
        first_row = (batch * num_heads + head).to(tl.int64) * num_queries
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + batch * num_heads + head)
        for index in range(tl.load(tile + TILE_RUN_START), tl.load(tile + TILE_RUN_STOP)):
            run = load_run(runs, index)
            start, stop, _, _, residue, _ = run
            for q0 in range(start, stop, TILE_Q):
                q = query.load([batch, head, residue, q0, 0]).reshape(TILE_Q, BLOCK_D)
                grad_out = grad_output.load([batch, head, residue, q0, 0]).reshape(TILE_Q, BLOCK_V)
                queries = q0 + tl.arange(0, TILE_Q)
                in_run = queries < stop
                in_pairs = in_tile[:, None] & in_run[None, :]
                # Queries beyond the run may be in another run: an LSE of +inf removes them here.
                place = first_row + residue + queries * query_step
                lses = tl.load(lse_log2 + place, mask=in_run, other=float("inf"))
                deltas = tl.load(delta + place, mask=in_run, other=0.0)
                products = tl.dot(k, q.T, input_precision=PRECISION)
                columns = (residue + queries * query_step)[None, :]
                pair_bias = load_bias(
                    bias, bias_strides, batch, head, columns, tokens[:, None], in_pairs
                )
                scores, unit, capped = apply_terms(
                    products, scale * _LOG2E, softcap, slope, pair_bias, run, positions, q0, *steps
                )
                p = tl.exp2(scores * unit - lses[None, :])
                is_visible = visible(mask_bits, run, positions, queries, key_step, query_step)
                p = tl.where(is_visible, p, 0.0)
                grad_p = tl.dot(v, grad_out.T, input_precision=PRECISION)
                # dV has the probabilities after dropout. dS has those before: only dP is dropped.
                kept_p = p
                if dropout_bits is not None:
                    multiplier, increment = load_query_bits(dropout_bits, place, in_run)
                    kept = is_kept(multiplier[None, :], increment[None, :], key_bits, drop_below)
                    grad_p = tl.where(kept, grad_p * keep_scale, 0.0)
                    kept_p = tl.where(kept, p, 0.0)
                acc_v = tl.dot(kept_p.to(v.dtype), grad_out, acc_v, input_precision=PRECISION)
                grad_scores = p * (grad_p - deltas[None, :])
                if softcap is not None:  # NaN of a masked pair would not vanish by p = 0
                    grad_scores = tl.where(is_visible, grad_scores * (1 - capped * capped), 0.0)
                acc_k = tl.dot(grad_scores.to(k.dtype), q, acc_k, input_precision=PRECISION)
    if dropout_bits is not None:
        acc_v *= keep_scale
    rows = kv_head.to(tl.int64) * num_keys + tokens
    _write_tile(grad_key, acc_k * scale, rows, in_tile, head_dim, BLOCK_D, IS_SUM)
    _write_tile(grad_value, acc_v, rows, in_tile, value_dim, BLOCK_V, IS_SUM)


@triton.jit
def _write_tile(target, values, rows, in_tile, dim, BLOCK: tl.constexpr, IS_SUM: tl.constexpr):
    """Write or add a tile to rows of a gradient that no other program reads or writes."""
    columns = tl.arange(0, BLOCK)
    place = target + rows[:, None] * dim + columns[None, :]
    mask = in_tile[:, None] & (columns < dim)[None, :]
    if IS_SUM:
        values += tl.load(place, mask=mask, other=0.0)
    tl.store(place, values.to(target.dtype.element_ty), mask=mask)
