"""The backward kernels for Hopper GPUs; backward.py explains what they compute.

As in the forward kernel, a producer warp copies and two consumers compute, each with half of a
tile's rows; hopper_queue.py explains the barriers. A tile stays in shared memory while the blocks
that it meets pass through a ring of buffers.
"""

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
    TILE_FIELDS,
    TILE_FULL_BLOCKS,
    TILE_OUTPUT_ROW,
    TILE_RESIDUE,
    TILE_ROW_START,
    TILE_ROW_STOP,
    TILE_RUN_START,
    TILE_RUN_STOP,
)
from cqs.worker.triton.hopper_pairs import alibi, tanh, visible
from cqs.worker.triton.hopper_queue import (
    ITEM_HEAD,
    ITEM_INDEX,
    async_load,
    item_field,
    load_offset,
    load_place,
    load_run,
    make_queue,
    next_item,
    place_of,
    publish_item,
)

_CONSUMERS = gl.constexpr(2)
_LOG2E = gl.constexpr(1.4426950408889634)


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
    queue = make_queue(_CONSUMERS)
    memory = _allocate(query, grad_output, key, value, STAGES)
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
            (_produce, (queue, memory, work, sources, counter, num_heads, GROUP_SIZE, False)),
        ],
        [4, 1],
        [240, 24],
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
    queue = make_queue(_CONSUMERS)
    memory = _allocate(key, value, query, grad_output, STAGES)
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
            (_produce, (queue, memory, work, sources, counter, num_heads, GROUP_SIZE, True)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _allocate(fixed_a, fixed_b, moving_a, moving_b, STAGES: gl.constexpr):
    """Allocate two tiles, the current and the next, and a ring of ``STAGES`` blocks.

    Args:
        fixed_a: Descriptor of a tensor of the tiles: queries, or keys.
        fixed_b: Descriptor of the other tensor of the tiles: the output's gradient, or values.
        moving_a: Descriptor of a tensor of the blocks: keys, or queries.
        moving_b: Descriptor of the other tensor of the blocks: values, or the output's gradient.
        STAGES: Number of blocks in the ring.

    Returns:
        Shared memory of tiles (index: twice the tile plus the half) and blocks, and their barriers.
    """
    # At head_dim 128 a tile takes 64 KiB and a block 32 KiB: two tiles and three stages are 224 of
    # the 227 KiB of shared memory that a program can have, so a fourth stage does not fit.
    dtype: gl.constexpr = fixed_a.dtype
    ROWS: gl.constexpr = fixed_a.block_shape[3]
    BLOCK: gl.constexpr = moving_a.block_shape[3]
    DIM_A: gl.constexpr = fixed_a.block_shape[4]
    DIM_B: gl.constexpr = fixed_b.block_shape[4]
    a = gl.allocate_shared_memory(dtype, [4, 1, 1, 1, ROWS, DIM_A], fixed_a.layout)
    b = gl.allocate_shared_memory(dtype, [4, 1, 1, 1, ROWS, DIM_B], fixed_b.layout)
    ring_a = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK, DIM_A], moving_a.layout)
    ring_b = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK, DIM_B], moving_b.layout)
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_free.index(i), count=_CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=_CONSUMERS)
    return a, b, ring_a, ring_b, tile_ready, tile_free, ready, free


@gluon.jit
def _produce(
    queue,
    memory,
    work,
    sources,
    counter,
    num_heads,
    GROUP_SIZE: gl.constexpr,
    TILES_ARE_KEYS: gl.constexpr,
):
    """Copy the tile of each item and the blocks of its runs, in their order.

    Args:
        queue: Return value of ``make_queue``.
        memory: Return value of :func:`_allocate`.
        work: Tiles, runs, mask bits and the numbers of tiles, long tiles and items.
        sources: Descriptors in the order of the arguments of :func:`_allocate`.
        counter: int32 ``[2]``: the first element is the number of items that programs took after
            their first.
        num_heads: Number of query heads.
        GROUP_SIZE: Number of query heads that share a KV head.
        TILES_ARE_KEYS: Whether tiles are of keys, each of which meets the queries of all heads of
            its group, one head after another.
    """
    a, b, ring_a, ring_b, tile_ready, tile_free, ready, free = memory
    fixed_a, fixed_b, moving_a, moving_b = sources
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    ROWS: gl.constexpr = fixed_a.block_shape[3]
    BLOCK: gl.constexpr = moving_a.block_shape[3]
    STAGES: gl.constexpr = ring_a.shape[0]
    TILE_BYTES: gl.constexpr = 2 * (fixed_a.block_type.nbytes + fixed_b.block_type.nbytes)
    BLOCK_BYTES: gl.constexpr = moving_a.block_type.nbytes + moving_b.block_type.nbytes
    num_members = 1
    num_tile_heads = num_heads
    if TILES_ARE_KEYS:
        num_members = GROUP_SIZE
        num_tile_heads = num_heads // GROUP_SIZE
    index = gl.program_id(0)
    turn = 0
    i = 0
    while index < num_items:
        # Taken before this item's copies, so that the atomic operation's latency overlaps them.
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        publish_item(queue, work, turn, index)
        head, number = place_of(work, index)
        batch, head = head // num_tile_heads, head % num_tile_heads
        tile = tiles + number * TILE_FIELDS
        arrived = tile_ready.index(turn & 1)
        # Two tile buffers: turn `n` is use `n >> 1` of buffer `n & 1`. The next tile loads while
        # the consumers compute this one, and its first blocks follow.
        mbarrier.wait(tile_free.index(turn & 1), turn >> 1 & 1 ^ 1)
        mbarrier.expect(arrived, TILE_BYTES)
        for half in gl.static_range(2):
            # Not called `residue`: a name that a loop below assigns is carried through that loop.
            tile_residue = gl.load(tile + TILE_RESIDUE)
            place = [batch, head, tile_residue, gl.load(tile + TILE_ROW_START) + half * ROWS, 0]
            buffer = (turn & 1) * 2 + half
            async_load(fixed_a, place, arrived, a.index(buffer))
            async_load(fixed_b, place, arrived, b.index(buffer))
        for member in range(num_members):
            other_head = head // GROUP_SIZE
            if TILES_ARE_KEYS:
                other_head = head * GROUP_SIZE + member
            for run in range(gl.load(tile + TILE_RUN_START), gl.load(tile + TILE_RUN_STOP)):
                start, stop, residue = load_place(runs, run)
                for row in range(start, stop, BLOCK):
                    stage = i % STAGES
                    mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
                    mbarrier.expect(ready.index(stage), BLOCK_BYTES)
                    place = [batch, other_head, residue, row, 0]
                    arrived = ready.index(stage)
                    async_load(moving_a, place, arrived, ring_a.index(stage))
                    async_load(moving_b, place, arrived, ring_b.index(stage))
                    i += 1
        index = following
        turn += 1
    publish_item(queue, work, turn, index)


@gluon.jit
def _tile_of(memory, turn, half: gl.constexpr):
    """Return one half of the current tile: the shared memory of its two tensors."""
    a, b, _, _, _, _, _, _ = memory
    buffer = (turn & 1) * 2 + half
    rows_a = a.index(buffer).reshape([a.shape[4], a.shape[5]])
    return rows_a, b.index(buffer).reshape([b.shape[4], b.shape[5]])


@gluon.jit
def _same_tile(memory, turn, half: gl.constexpr, count):
    """Return the result of :func:`_tile_of` by a computation that compilers cannot recognise.

    If two loops share the tile's addresses, ptxas 12.8 computes them only on the path into the
    first loop. If that loop is skipped, because the tile has no banded run, the second loop reads
    from undefined addresses.

    Args:
        memory: Return value of :func:`_allocate`.
        turn: Number of items so far.
        half: Half of the tile, 0 or 1.
        count: A number of at least 0: ``count >> 31`` is then 0, which compilers do not know.
    """
    return _tile_of(memory, turn + (count >> 31), half)


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
        of_rows = (gl.expand_dims(lses, 1), gl.expand_dims(deltas, 1), terms)
        slope = None
        if slopes is not None:
            slope = gl.load(slopes + item_field(item, ITEM_HEAD))
        tile = _tile_of(memory, turn, half)
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
                    tile, ring, i, first, acc, grad_scores, of_rows, slope, place, True, HAS_BITS
                )
                i += 1
        tile = _same_tile(memory, turn, half, full_blocks)
        no_run = (0, 0, (0, 0), 0)
        if slopes is None:
            for j in range(i, i + full_blocks):
                place = (mask_bits, no_run, steps, query_start, 0, 0, 0)
                acc, grad_scores = _query_step(
                    tile, ring, j, first, acc, grad_scores, of_rows, slope, place, False, False
                )
            i += full_blocks
        else:
            for number in range(banded_stop, run_stop):
                start, stop, _ = load_place(runs, number)
                offset = load_offset(runs, number)
                for k0 in range(start, stop, BLOCK):
                    place = (
                        mask_bits,
                        no_run,
                        steps,
                        query_start,
                        k0,
                        load_offset(runs, number),
                        0,
                    )
                    acc, grad_scores = _query_step(
                        tile, ring, i, first, acc, grad_scores, of_rows, slope, place, False, False
                    )
                    i += 1
        # No product reads the tile any more: the last one, below, reads the last key block.
        mbarrier.arrive(tile_free.index(turn & 1), count=1)
        keys = ring_a.index((i - 1) % STAGES).reshape([BLOCK, BLOCK_D])
        acc = warpgroup_mma(grad_scores, keys, acc)
        mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
        num_rows = query_stop - query_start
        _write(grad_query, acc * scale, first_row, query_step, num_rows, head_dim, IS_SUM)
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
    scores = _issue_product(q, keys.permute([1, 0]), layout)
    grad_p = _issue_product(grad_out, values.permute([1, 0]), layout)
    # The first block reads its own keys, times zeros; `pred` below does not release them.
    last = gl.maximum(i - 1, first)
    last_keys = ring_a.index(last % STAGES).reshape([BLOCK, BLOCK_D])
    adding = warpgroup_mma(last_grad_scores, last_keys, acc, is_async=True)
    scores = warpgroup_mma_wait(2, [scores])
    p, capped = _probabilities(scores, lses, terms, slope, place, IS_BANDED, HAS_BITS)
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
        tile = _tile_of(memory, turn, half)
        tile_again = _same_tile(memory, turn, half, run_stop - banded_stop)
        mbarrier.wait(tile_ready.index(turn & 1), turn >> 1 & 1)
        acc_k = gl.zeros([ROWS, BLOCK_D], gl.float32, key_layout)
        acc_v = gl.zeros([ROWS, BLOCK_V], gl.float32, value_layout)
        for member in range(GROUP_SIZE):
            first_row = (kv_head * GROUP_SIZE + member).to(gl.int64) * num_queries
            of_columns = (lse_log2 + first_row, delta + first_row, terms)
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
                        tile, ring, i, acc_k, acc_v, of_columns, slope, place, True, HAS_BITS
                    )
                    i += 1
            for number in range(banded_stop, run_stop):
                start, stop, residue = load_place(runs, number)
                offset = load_offset(runs, number)
                for q0 in range(start, stop, BLOCK):
                    run = (start, stop, (0, 0), 0)
                    place = (mask_bits, run, steps, key_start, q0, offset, residue)
                    acc_k, acc_v = _key_step(
                        tile_again, ring, i, acc_k, acc_v, of_columns, slope, place, False, False
                    )
                    i += 1
        mbarrier.arrive(tile_free.index(turn & 1), count=1)
        first_row = kv_head.to(gl.int64) * num_keys + item_field(item, 2)
        first_row += half * ROWS * key_step
        num_rows = key_stop - key_start
        _write(grad_key, acc_k * scale, first_row, key_step, num_rows, head_dim, IS_SUM)
        _write(grad_value, acc_v, first_row, key_step, num_rows, value_dim, IS_SUM)
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
    scores = _issue_product(k, queries.permute([1, 0]), layout)
    grad_p = _issue_product(v, grad_out.permute([1, 0]), layout)
    scores = warpgroup_mma_wait(1, [scores])
    lses = gl.expand_dims(lses, 0)
    p, capped = _probabilities(scores, lses, terms, slope, place, IS_BANDED, HAS_BITS)
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


@gluon.jit
def _probabilities(
    products, lses, terms, slope, place, IS_BANDED: gl.constexpr, HAS_BITS: gl.constexpr
):
    """Return the probabilities of a block, and the hyperbolic tangents of its soft cap, if any.

    Args:
        products: Products of queries and keys, float32 ``[rows, columns]``.
        lses: LSE of the queries divided by ln 2, broadcastable to the products.
        terms: Factor on the scores divided by ln 2, soft cap, and slopes.
        slope: Slope of the head, or None.
        place: Mask bits, run, steps, first row, first column, offset and residue of the block.
        IS_BANDED: Whether pairs may be masked out.
        HAS_BITS: Whether any run has mask bits.
    """
    scale_log2, softcap, _ = terms
    mask_bits, run, steps, row_start, column_start, offset, _ = place
    layout: gl.constexpr = products.type.layout
    capped, unit = products, scale_log2
    if softcap is not None:
        if IS_BANDED:  # NaN of a masked pair would spread
            live = visible(layout, mask_bits, run, steps, row_start, column_start, HAS_BITS)
            products = gl.where(live, products, 0.0)
        capped, unit = tanh(products, 2 * scale_log2 / softcap), softcap * _LOG2E
    exponents = capped * unit - lses
    if slope is not None:
        exponents -= alibi(layout, slope, offset, steps, row_start, column_start)
    return gl.exp2(exponents), capped


@gluon.jit
def _issue_product(a, b, layout: gl.constexpr):
    """Start the product of two tiles in shared memory, float32 in ``layout``."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _write(target, values, first_row, step, num_rows, dim, IS_SUM: gl.constexpr):
    """Write or add a tile to rows of a gradient that no other program reads or writes."""
    ROWS: gl.constexpr = values.shape[0]
    BLOCK: gl.constexpr = values.shape[1]
    layout: gl.constexpr = values.type.layout
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, layout)), 0)
    place = target + (first_row + rows * step) * dim + columns
    mask = (rows < num_rows) & (columns < dim)
    if IS_SUM:
        values += gl.load(place, mask=mask, other=0.0)
    gl.store(place, values.to(target.dtype.element_ty), mask=mask)
