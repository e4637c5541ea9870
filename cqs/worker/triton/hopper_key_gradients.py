"""The backward kernel for Hopper GPUs whose tiles are of keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cqs.worker.triton.fields import (
    RUN_FIELDS,
    RUN_RESIDUE,
    TILE_BANDED_STOP,
    TILE_ROW_START,
    TILE_ROW_STOP,
    TILE_RUN_START,
    TILE_RUN_STOP,
)
from cqs.worker.triton.hopper_backward import (
    CONSUMERS,
    allocate_tiles,
    issue_product,
    probabilities,
    produce,
    same_tile,
    tile_of,
    write_rows,
)
from cqs.worker.triton.hopper_pairs import visible
from cqs.worker.triton.hopper_queue import (
    ITEM_HEAD,
    ITEM_INDEX,
    item_field,
    load_offset,
    load_place,
    load_run,
    make_queue,
    next_item,
)


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "num_long",
        "num_items",
        "num_heads",
        "num_queries",
        "num_keys",
    ],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def key_gradients_on_hopper(
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
    slopes,
    counter,
    num_tiles,
    num_long,
    num_items,
    key_step,
    query_step,
    num_heads,
    num_queries,
    num_keys,
    head_dim,
    value_dim,
    scale,
    scale_log2,
    softcap,
    GROUP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BITS: gl.constexpr,
    IS_SUM: gl.constexpr,
):
    """Write the gradients of the items of a queue, each a tile of keys and values of one KV head.

    Tiles are of keys, and runs are of queries.

    Args:
        query: Descriptor of the queries, ``[batch, num_heads, query_step, rows, head_dim]``, in
            blocks of 64 rows, as all descriptors.
        key: Descriptor of the keys, ``[batch, num_heads / GROUP_SIZE, key_step, rows, head_dim]``.
        value: Descriptor of the values, ``[batch, num_heads / GROUP_SIZE, key_step, rows,
            value_dim]``.
        grad_output: Descriptor of the gradient of the output, ``[batch, num_heads, query_step,
            rows, value_dim]``.
        lse_log2: float32 ``[batch, num_heads, num_queries]``, contiguous; see ``row_statistics``.
        delta: float32 ``[batch, num_heads, num_queries]``, contiguous; see ``row_statistics``.
        grad_key: ``[batch, num_heads / GROUP_SIZE, num_keys, head_dim]``, contiguous; written to.
        grad_value: ``[batch, num_heads / GROUP_SIZE, num_keys, value_dim]``, contiguous; written
            to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs; a tensor even if no run has any.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        counter: int32 ``[2]``, zeros: the number of items that programs took after their first; the
            second element is not used.
        num_tiles: Number of tiles, the same for every KV head.
        num_long: Number of tiles at the start of the list that precede all others of all heads.
        num_items: Number of items: tiles times KV heads times batch.
        key_step: Tokens between two rows.
        query_step: Tokens between two columns.
        num_heads: Number of query heads.
        num_queries: Number of queries of all residues.
        num_keys: Number of keys of all residues.
        head_dim: Number of columns of the keys.
        value_dim: Number of columns of the values.
        scale: Factor on the scores.
        scale_log2: ``scale`` divided by ln 2.
        softcap: The soft cap, at most ``LARGEST_SOFTCAP``, or None.
        GROUP_SIZE: Number of query heads that share a KV head.
        STAGES: Number of query and gradient blocks in shared memory.
        HAS_BITS: Whether any run has mask bits.
        IS_SUM: Whether to add to the gradients instead of overwriting them.
    """
    queue = make_queue(CONSUMERS)
    memory = allocate_tiles(key, value, query, grad_output, STAGES)
    work = (tiles, runs, mask_bits, num_tiles, num_long, num_items)
    steps = (key_step, query_step)
    sources = (key, value, query, grad_output)
    statistics = (lse_log2, delta, num_queries)
    terms = (scale_log2, softcap, slopes)
    target = (grad_key, grad_value, num_keys, head_dim, value_dim, scale)
    context = (queue, memory, work, steps, statistics, terms, target)
    gl.warp_specialize(
        [
            (_consume_for_keys, (context, GROUP_SIZE, HAS_BITS, IS_SUM, 0)),
            (_consume_for_keys, (context, GROUP_SIZE, HAS_BITS, IS_SUM, 1)),
            (produce, (queue, memory, work, sources, counter, num_heads, GROUP_SIZE, True)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _consume_for_keys(
    context,
    GROUP_SIZE: gl.constexpr,
    HAS_BITS: gl.constexpr,
    IS_SUM: gl.constexpr,
    half: gl.constexpr,
):
    """Write the gradients of one half of each key tile's rows."""
    queue, memory, work, steps, statistics, terms, target = context
    a, b, ring_a, ring_b, tile_ready, tile_free, ready, free = memory
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    key_step, _ = steps
    lse_log2, delta, num_queries = statistics
    scale_log2, softcap, slopes = terms
    grad_key, grad_value, num_keys, head_dim, value_dim, scale = target
    ROWS: gl.constexpr = a.shape[4]
    BLOCK: gl.constexpr = ring_a.shape[4]
    BLOCK_D: gl.constexpr = a.shape[5]
    BLOCK_V: gl.constexpr = b.shape[5]
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    ring = (ring_a, ring_b, ready, free)
    turn = 0
    i = 0
    item = next_item(queue, turn)
    index = item_field(item, ITEM_INDEX)
    while index < num_items:
        key_start = item_field(item, TILE_ROW_START) + half * ROWS
        key_stop = item_field(item, TILE_ROW_STOP)
        run_start = item_field(item, TILE_RUN_START)
        banded_stop = item_field(item, TILE_BANDED_STOP)
        run_stop = item_field(item, TILE_RUN_STOP)
        kv_head = item_field(item, ITEM_HEAD)
        tile = tile_of(memory, turn, half)
        tile_again = same_tile(memory, turn, half, run_stop - banded_stop)
        mbarrier.wait(tile_ready.index(turn & 1), turn >> 1 & 1)
        acc_k = gl.zeros([ROWS, BLOCK_D], gl.float32, key_layout)
        acc_v = gl.zeros([ROWS, BLOCK_V], gl.float32, value_layout)
        for member in range(GROUP_SIZE):
            first_row = (kv_head * GROUP_SIZE + member).to(gl.int64) * num_queries
            head_stats = (lse_log2 + first_row, delta + first_row, terms)
            slope = None
            if slopes is not None:
                slope = gl.load(slopes + kv_head * GROUP_SIZE + member)
            for number in range(run_start, banded_stop):
                start, stop, band, bits_start = load_run(runs, number)
                residue = gl.load(runs + number * RUN_FIELDS + RUN_RESIDUE)
                offset = load_offset(runs, number)
                for q0 in range(start, stop, BLOCK):
                    run = (start, stop, band, bits_start)
                    place = (mask_bits, run, steps, key_start, q0, offset, residue)
                    acc_k, acc_v = _key_step(
                        tile, ring, i, acc_k, acc_v, head_stats, slope, place, True, HAS_BITS
                    )
                    i += 1
            for number in range(banded_stop, run_stop):
                start, stop, residue = load_place(runs, number)
                offset = load_offset(runs, number)
                for q0 in range(start, stop, BLOCK):
                    run = (start, stop, (0, 0), 0)
                    place = (mask_bits, run, steps, key_start, q0, offset, residue)
                    acc_k, acc_v = _key_step(
                        tile_again, ring, i, acc_k, acc_v, head_stats, slope, place, False, False
                    )
                    i += 1
        mbarrier.arrive(tile_free.index(turn & 1), count=1)
        first_row = kv_head.to(gl.int64) * num_keys + item_field(item, 2)
        first_row += half * ROWS * key_step
        num_rows = key_stop - key_start
        write_rows(grad_key, acc_k * scale, first_row, key_step, num_rows, head_dim, IS_SUM)
        write_rows(grad_value, acc_v, first_row, key_step, num_rows, value_dim, IS_SUM)
        turn += 1
        item = next_item(queue, turn)
        index = item_field(item, ITEM_INDEX)


@gluon.jit
def _key_step(
    tile,
    ring,
    i,
    acc_k,
    acc_v,
    statistics,
    slope,
    place,
    IS_BANDED: gl.constexpr,
    HAS_BITS: gl.constexpr,
):
    """Add the products of block ``i`` to the gradients of a key tile.

    The two accumulators leave no registers for score gradients of the block before, so that no
    product is in flight between blocks: the other consumer's products fill the gap.

    Args:
        tile: Keys and values, in shared memory.
        ring: Query blocks, blocks of the output's gradient and their barriers.
        i: Number of blocks so far.
        acc_k: Gradient of the keys so far, float32 ``[ROWS, BLOCK_D]``.
        acc_v: Gradient of the values so far, float32 ``[ROWS, BLOCK_V]``.
        statistics: LSE and delta of the head's queries; factor on the scores, soft cap and slopes.
        slope: Slope of the head, or None.
        place: Mask bits, run, steps, first row, first column, offset and residue of the block.
        IS_BANDED: Whether pairs may be masked out.
        HAS_BITS: Whether any run has mask bits.

    Returns:
        ``acc_k`` and ``acc_v``.
    """
    k, v = tile
    ring_a, ring_b, ready, free = ring
    lse_log2, delta, terms = statistics
    _, softcap, _ = terms
    mask_bits, run, steps, row_start, column_start, _, residue = place
    _, column_step = steps
    STAGES: gl.constexpr = ring_a.shape[0]
    BLOCK: gl.constexpr = ring_a.shape[4]
    BLOCK_D: gl.constexpr = ring_a.shape[5]
    BLOCK_V: gl.constexpr = ring_b.shape[5]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    queries = ring_a.index(i % STAGES).reshape([BLOCK, BLOCK_D])
    grad_out = ring_b.index(i % STAGES).reshape([BLOCK, BLOCK_V])
    column = column_start + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    # A full run needs no mask on columns; a banded one may end within the block.
    token = residue + column * column_step
    if IS_BANDED:
        lses = gl.load(lse_log2 + token, mask=column < run[1], other=float("inf"))
    else:
        lses = gl.load(lse_log2 + token)
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    scores = issue_product(k, queries.permute([1, 0]), layout)
    grad_p = issue_product(v, grad_out.permute([1, 0]), layout)
    scores = warpgroup_mma_wait(1, [scores])
    lses = gl.expand_dims(lses, 0)
    p, capped = probabilities(scores, lses, terms, slope, place, IS_BANDED, HAS_BITS)
    if IS_BANDED:
        live = visible(layout, mask_bits, run, steps, row_start, column_start, HAS_BITS)
        p = gl.where(live, p, 0.0)
    value_layout: gl.constexpr = acc_v.type.layout
    p_operand = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, value_layout, 2))
    acc_v = warpgroup_mma(p_operand, grad_out, acc_v, is_async=True)
    # Loaded only now: the deltas need no registers while the scores are computed.
    if IS_BANDED:
        deltas = gl.load(delta + token, mask=column < run[1], other=0.0)
    else:
        deltas = gl.load(delta + token)
    grad_p = warpgroup_mma_wait(1, [grad_p])
    grad_scores = p * (grad_p - gl.expand_dims(deltas, 0))
    if softcap is not None:
        grad_scores *= 1 - capped * capped
    key_layout: gl.constexpr = acc_k.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, key_layout, 2)
    grad_scores = gl.convert_layout(grad_scores.to(k.dtype), operand)
    acc_k = warpgroup_mma(grad_scores, queries, acc_k, is_async=True)
    acc_k, acc_v, p_operand, grad_scores = warpgroup_mma_wait(
        0, [acc_k, acc_v, p_operand, grad_scores]
    )
    mbarrier.arrive(free.index(i % STAGES), count=1)
    return acc_k, acc_v
