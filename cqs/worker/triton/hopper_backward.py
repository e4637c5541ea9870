"""Functions of both backward kernels for Hopper GPUs; backward.py explains the gradients.

As in the forward kernel, a producer warp copies and two consumers compute, each with half of a
tile's rows; hopper_queue.py explains the barriers. A tile stays in shared memory while the blocks
that it meets pass through a ring of buffers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
)

from cqs.worker.triton.fields import (
    TILE_FIELDS,
    TILE_RESIDUE,
    TILE_ROW_START,
    TILE_RUN_START,
    TILE_RUN_STOP,
)
from cqs.worker.triton.hopper_pairs import alibi, tanh, visible
from cqs.worker.triton.hopper_queue import (
    async_load,
    load_place,
    place_of,
    publish_item,
)

CONSUMERS = gl.constexpr(2)
"""Number of consumers of a program."""
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def allocate_tiles(fixed_a, fixed_b, moving_a, moving_b, STAGES: gl.constexpr):
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
        mbarrier.init(tile_free.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return a, b, ring_a, ring_b, tile_ready, tile_free, ready, free


@gluon.jit
def produce(
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
        memory: Return value of :func:`allocate_tiles`.
        work: Tiles, runs, mask bits and the numbers of tiles, long tiles and items.
        sources: Descriptors in the order of the arguments of :func:`allocate_tiles`.
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
def tile_of(memory, turn, half: gl.constexpr):
    """Return one half of the current tile: the shared memory of its two tensors."""
    a, b, _, _, _, _, _, _ = memory
    buffer = (turn & 1) * 2 + half
    rows_a = a.index(buffer).reshape([a.shape[4], a.shape[5]])
    return rows_a, b.index(buffer).reshape([b.shape[4], b.shape[5]])


@gluon.jit
def same_tile(memory, turn, half: gl.constexpr, count):
    """Return the result of :func:`tile_of` by a computation that compilers cannot recognise.

    If two loops share the tile's addresses, ptxas 12.8 computes them only on the path into the
    first loop. If that loop is skipped, because the tile has no banded run, the second loop reads
    from undefined addresses.

    Args:
        memory: Return value of :func:`allocate_tiles`.
        turn: Number of items so far.
        half: Half of the tile, 0 or 1.
        count: A number of at least 0: ``count >> 31`` is then 0, which compilers do not know.
    """
    return tile_of(memory, turn + (count >> 31), half)


@gluon.jit
def probabilities(
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
def issue_product(a, b, layout: gl.constexpr):
    """Start the product of two tiles in shared memory, float32 in ``layout``."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def write_rows(target, values, first_row, step, num_rows, dim, IS_SUM: gl.constexpr):
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
