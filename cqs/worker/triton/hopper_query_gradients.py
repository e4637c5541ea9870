"""The backward kernel for Hopper GPUs whose tiles are of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cqs.worker.triton.fields import (
    TILE_BANDED_STOP,
    TILE_FULL_BLOCKS,
    TILE_OUTPUT_ROW,
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
    do_not_specialize=["num_tiles", "num_long", "num_items", "num_heads", "num_queries"],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def query_gradients_on_hopper(
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
    slopes,
    counter,
    num_tiles,
    num_long,
    num_items,
    query_step,
    key_step,
    num_heads,
    num_queries,
    head_dim,
    scale,
    scale_log2,
    softcap,
    GROUP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BITS: gl.constexpr,
    IS_SUM: gl.constexpr,
):
    """Write the gradients of the items of a queue, each a query tile of one head.

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
        grad_query: ``[batch, num_heads, num_queries, head_dim]``, contiguous; written to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs; a tensor even if no run has any.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        counter: int32 ``[2]``, zeros: the number of items that programs took after their first; the
            second element is not used.
        num_tiles: Number of tiles, the same for every head.
        num_long: Number of tiles at the start of the list that precede all others of all heads.
        num_items: Number of items: tiles times heads times batch.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        num_heads: Number of query heads.
        num_queries: Number of queries of all residues.
        head_dim: Number of columns of the queries.
        scale: Factor on the scores.
        scale_log2: ``scale`` divided by ln 2.
        softcap: The soft cap, at most ``LARGEST_SOFTCAP``, or None.
        GROUP_SIZE: Number of query heads that share a KV head.
        STAGES: Number of key and value blocks in shared memory.
        HAS_BITS: Whether any run has mask bits.
        IS_SUM: Whether to add to ``grad_query`` instead of overwriting it.
    """
    queue = make_queue(CONSUMERS)
    memory = allocate_tiles(query, grad_output, key, value, STAGES)
    work = (tiles, runs, mask_bits, num_tiles, num_long, num_items)
    steps = (query_step, key_step)
    sources = (query, grad_output, key, value)
    statistics = (lse_log2, delta, num_queries)
    terms = (scale_log2, softcap, slopes)
    target = (grad_query, head_dim, scale)
    context = (queue, memory, work, steps, statistics, terms, target)
    gl.warp_specialize(
        [
            (_consume_for_queries, (context, HAS_BITS, IS_SUM, 0)),
            (_consume_for_queries, (context, HAS_BITS, IS_SUM, 1)),
            (produce, (queue, memory, work, sources, counter, num_heads, GROUP_SIZE, False)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _consume_for_queries(context, HAS_BITS: gl.constexpr, IS_SUM: gl.constexpr, half: gl.constexpr):
    """Write the gradients of one half of each query tile's rows."""
    queue, memory, work, steps, statistics, terms, target = context
    a, b, ring_a, ring_b, tile_ready, tile_free, ready, free = memory
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    query_step, _ = steps
    lse_log2, delta, num_queries = statistics
    scale_log2, softcap, slopes = terms
    grad_query, head_dim, scale = target
    ROWS: gl.constexpr = a.shape[4]
    BLOCK: gl.constexpr = ring_a.shape[4]
    BLOCK_D: gl.constexpr = a.shape[5]
    STAGES: gl.constexpr = ring_a.shape[0]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ring = (ring_a, ring_b, ready, free)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    turn = 0
    i = 0
    item = next_item(queue, turn)
    index = item_field(item, ITEM_INDEX)
    while index < num_items:
        query_start = item_field(item, TILE_ROW_START) + half * ROWS
        query_stop = item_field(item, TILE_ROW_STOP)
        run_start = item_field(item, TILE_RUN_START)
        banded_stop = item_field(item, TILE_BANDED_STOP)
        run_stop = item_field(item, TILE_RUN_STOP)
        full_blocks = item_field(item, TILE_FULL_BLOCKS)
        first_row = item_field(item, ITEM_HEAD).to(gl.int64) * num_queries
        first_row += item_field(item, TILE_OUTPUT_ROW)
        first_row += half * ROWS * query_step
        # Rows beyond the tile have LSE +inf: their probabilities are 0, and they are not stored.
        in_tile = row + query_start < query_stop
        rows = first_row + row * query_step
        lses = gl.load(lse_log2 + rows, mask=in_tile, other=float("inf"))
        deltas = gl.load(delta + rows, mask=in_tile, other=0.0)
        stats = (gl.expand_dims(lses, 1), gl.expand_dims(deltas, 1), terms)
        slope = None
        if slopes is not None:
            slope = gl.load(slopes + item_field(item, ITEM_HEAD))
        tile = tile_of(memory, turn, half)
        mbarrier.wait(tile_ready.index(turn & 1), turn >> 1 & 1)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, acc_layout)
        first = i
        # Zeros stand for the gradients of the block before the first: no branch in the loop.
        grad_scores = gl.zeros([ROWS, BLOCK], a.dtype, gl.DotOperandLayout(0, acc_layout, 2))
        for number in range(run_start, banded_stop):
            start, stop, band, bits_start = load_run(runs, number)
            offset = load_offset(runs, number)
            for k0 in range(start, stop, BLOCK):
                run = (start, stop, band, bits_start)
                place = (mask_bits, run, steps, query_start, k0, offset, 0)
                acc, grad_scores = _query_step(
                    tile, ring, i, first, acc, grad_scores, stats, slope, place, True, HAS_BITS
                )
                i += 1
        tile = same_tile(memory, turn, half, full_blocks)
        no_run = (0, 0, (0, 0), 0)
        if slopes is None:
            for j in range(i, i + full_blocks):
                place = (mask_bits, no_run, steps, query_start, 0, 0, 0)
                acc, grad_scores = _query_step(
                    tile, ring, j, first, acc, grad_scores, stats, slope, place, False, False
                )
            i += full_blocks
        else:
            for number in range(banded_stop, run_stop):
                start, stop, _ = load_place(runs, number)
                offset = load_offset(runs, number)
                for k0 in range(start, stop, BLOCK):
                    place = (mask_bits, no_run, steps, query_start, k0, offset, 0)
                    acc, grad_scores = _query_step(
                        tile, ring, i, first, acc, grad_scores, stats, slope, place, False, False
                    )
                    i += 1
        # No product reads the tile any more: the last one, below, reads the last key block.
        mbarrier.arrive(tile_free.index(turn & 1), count=1)
        keys = ring_a.index((i - 1) % STAGES).reshape([BLOCK, BLOCK_D])
        acc = warpgroup_mma(grad_scores, keys, acc)
        mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
        num_rows = query_stop - query_start
        write_rows(grad_query, acc * scale, first_row, query_step, num_rows, head_dim, IS_SUM)
        turn += 1
        item = next_item(queue, turn)
        index = item_field(item, ITEM_INDEX)


@gluon.jit
def _query_step(
    tile,
    ring,
    i,
    first,
    acc,
    last_grad_scores,
    statistics,
    slope,
    place,
    IS_BANDED: gl.constexpr,
    HAS_BITS: gl.constexpr,
):
    """Compute the score gradients of block ``i``, and add the product of the block before.

    Args:
        tile: Queries and gradient of the output, in shared memory.
        ring: Key blocks, value blocks and their barriers.
        i: Number of blocks so far.
        first: Number of the tile's first block.
        acc: Gradient of the queries so far, float32 ``[ROWS, BLOCK_D]``.
        last_grad_scores: Score gradients of block ``i - 1``; zeros for the first block.
        statistics: LSE and delta of the rows; factor on the scores, soft cap and slopes.
        slope: Slope of the head, or None.
        place: Mask bits, run, steps, first row, first column, offset and residue of the block.
        IS_BANDED: Whether pairs may be masked out.
        HAS_BITS: Whether any run has mask bits.

    Returns:
        ``acc`` and the score gradients of block ``i``.
    """
    q, grad_out = tile
    ring_a, ring_b, ready, free = ring
    lses, deltas, terms = statistics
    _, softcap, _ = terms
    STAGES: gl.constexpr = ring_a.shape[0]
    BLOCK: gl.constexpr = ring_a.shape[4]
    BLOCK_D: gl.constexpr = ring_a.shape[5]
    BLOCK_V: gl.constexpr = ring_b.shape[5]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    keys = ring_a.index(i % STAGES).reshape([BLOCK, BLOCK_D])
    values = ring_b.index(i % STAGES).reshape([BLOCK, BLOCK_V])
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    # Three products in flight, and `wait(n)` awaits all but the last n: exponentials overlap the
    # second and third, the score gradients overlap the third.
    scores = issue_product(q, keys.permute([1, 0]), layout)
    grad_p = issue_product(grad_out, values.permute([1, 0]), layout)
    # The first block reads its own keys, times zeros; `pred` below does not release them.
    last = gl.maximum(i - 1, first)
    last_keys = ring_a.index(last % STAGES).reshape([BLOCK, BLOCK_D])
    adding = warpgroup_mma(last_grad_scores, last_keys, acc, is_async=True)
    scores = warpgroup_mma_wait(2, [scores])
    p, capped = probabilities(scores, lses, terms, slope, place, IS_BANDED, HAS_BITS)
    grad_p = warpgroup_mma_wait(1, [grad_p])
    grad_scores = p * (grad_p - deltas)
    if softcap is not None:
        grad_scores *= 1 - capped * capped
    if IS_BANDED:
        mask_bits, run, steps, row_start, column_start, _, _ = place
        live = visible(layout, mask_bits, run, steps, row_start, column_start, HAS_BITS)
        grad_scores = gl.where(live, grad_scores, 0.0)
    acc, last_grad_scores = warpgroup_mma_wait(0, [adding, last_grad_scores])
    mbarrier.arrive(free.index(last % STAGES), count=1, pred=i > first)
    acc_layout: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    return acc, gl.convert_layout(grad_scores.to(q.dtype), operand)
