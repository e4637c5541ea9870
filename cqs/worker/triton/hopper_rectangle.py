"""The backward kernel for Hopper GPUs with five products per block.

It computes a rectangle of scores, dense or causal, with all queries and keys of its tensors; or the
pairs of a list of visits, see visits.py. backward.py explains the gradients. The other kernels
compute the scores twice; this one computes all three gradients from the same scores, and adds those
of the queries to float32 sums in memory.

An item is a tile of 128 keys of one KV head, which visits the blocks of 64 queries that see it:

- The producer, a warp, takes items and copies tiles and blocks to shared memory.
- Each of two consumers, four warps with 64 keys, computes S^T, dP^T and its part of dV and dK. The
  consumers exchange dS^T in shared memory, and each computes half of the columns of the block's dQ.
- Two writers, a warp each, take turns. Each adds a block of dQ to memory with one reducing bulk
  copy of the TMA unit.

The additions to a block have a fixed order, that of the tiles: the gradients are deterministic. A
counter for each block is the number of tiles that have visited it. If the rectangle is the only
one, the first tile overwrites, so that the sums need no zeros; otherwise launches add up.

Nobody waits forever, however many programs run at the same time. Programs take items from one
counter: tile 0 of all heads, tile 1 of all heads, and so on. A visit waits only for the visits of
lower tiles, whose items were taken before by programs that are running. So of the items that are
not finished, the first in the queue waits for no other item. An order in which a tile waits for a
later one would deadlock if fewer programs run than there are items.

All tiles visit blocks from the last to the first. Tiles that are taken one after another then
follow each other through the blocks, and causal items are taken longest first. All query heads of
the KV head visit a block before the next block: if a tile visited all blocks of one query head
before the next head, the tiles after it, which are shorter, would wait for it at every head. In a
window tiles begin at different blocks, and are faster if each query head visits all blocks.

hopper_queue.py explains the barriers and their parities.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cqs.worker.triton.fields import VISIT_BLOCK, VISIT_FIELDS, VISIT_MASK, VISIT_TURN
from cqs.worker.triton.hopper_pairs import are_set
from cqs.worker.triton.hopper_queue import async_load

TILE_KEYS = gl.constexpr(128)
"""Keys of a tile."""
BLOCK_QUERIES = gl.constexpr(64)
"""Queries of a block."""
STATE_ITEM = gl.constexpr(0)
"""Field of the state: number of items that programs have taken."""
STATE_TURNS = gl.constexpr(32)
"""First of the fields of the state that hold the turns of the blocks, in another cache line."""

# All 32 threads of a writer poll one address. The fences order the bulk copy of this turn, which
# uses the asynchronous proxy, after that of the turn before.
_WAIT_FOR_TURN = gl.constexpr("""
{
.reg .pred is_reached;
.reg .b32 turn;
POLL:
ld.acquire.gpu.global.b32 turn, [$1];
setp.ge.s32 is_reached, turn, $2;
@!is_reached bra POLL;
bar.warp.sync 0xffffffff;
fence.proxy.async.global;
mov.b32 $0, turn;
}
""")
# The thread that issued the copy waits until its writes are visible; the wait of Gluon ends when
# shared memory has been read. Then one thread passes the turn on with release semantics.
_PASS_TURN_ON = gl.constexpr("""
{
.reg .pred is_first;
.reg .b32 thread;
cp.async.bulk.wait_group 0;
fence.proxy.async.global;
bar.warp.sync 0xffffffff;
mov.u32 thread, %laneid;
setp.eq.u32 is_first, thread, 0;
@is_first red.release.gpu.global.add.s32 [$1], 1;
mov.b32 $0, thread;
}
""")


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory: Triton 3.6 has no name for the operation."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@builtin
def _reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Return memory with another shape and layout; the method depends on Triton's version."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


async_add = getattr(tma, "async_atomic_add", None) or _async_add
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def place_of_item(index, sizes, IS_CAUSAL: gl.constexpr):
    """Return the KV head and the tile of an item, and the first block that sees the tile.

    It uses nothing but arithmetic, so that ``place_of_item.fn`` computes the same with integers.

    Args:
        index: Index of the item in the queue.
        sizes: The numbers that ``rectangle_gradients`` names.
        IS_CAUSAL: Whether pairs above the diagonal are masked out.
    """
    num_kv_heads, num_tiles, num_blocks, num_keys, group, together, offset = sizes
    start = index // (together * num_tiles) * together
    rest = index - start * num_tiles
    size = together
    if num_kv_heads - start < together:
        size = num_kv_heads - start
    tile = rest // size
    first = tile * TILE_KEYS - offset
    if first < 0:
        first = first * 0
    if not IS_CAUSAL:
        first = first * 0
    return start + rest - tile * size, tile, first // BLOCK_QUERIES


@gluon.jit(
    do_not_specialize=[
        "num_kv_heads",
        "num_tiles",
        "num_blocks",
        "num_keys",
        "group",
        "together",
        "offset",
        "heads_of_batch",
        "rows_of_head",
    ]
)
def rectangle_gradients(
    query,
    key,
    value,
    grad_output,
    key_halves,
    statistics,
    grad_query,
    grad_key,
    grad_value,
    state,
    starts,
    visits,
    visit_records,
    mask_bits,
    num_kv_heads,
    num_tiles,
    num_blocks,
    num_keys,
    group,
    together,
    offset,
    heads_of_batch,
    rows_of_head,
    scale,
    scale_log2,
    BLOCK_D: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    IS_SUM: gl.constexpr,
    HEADS_ALTERNATE: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Compute the gradients of queries, keys and values of a rectangle of scores.

    Args:
        query: Descriptor of ``[batch, num_heads, 1, num_queries, BLOCK_D]``, blocks of 64 queries.
        key: Descriptor of ``[batch, kv_heads, 1, num_keys, BLOCK_D]``, blocks of 64 keys.
        value: Descriptor of the values, as of the keys.
        grad_output: Descriptor of the output's gradient, as of the queries.
        key_halves: Descriptor of the keys with blocks of half of the columns; read if BLOCK_D = 64.
        statistics: Descriptor of the statistics of ``row_statistics`` in blocks of 64 queries.
        grad_query: Descriptor of the sums of dQ, float32 ``[num_heads * num_blocks * BLOCK_D / 4,
            256]``, in the order of :func:`convert_query_gradient`; overwritten or added to.
        grad_key: ``[batch, kv_heads, num_keys, BLOCK_D]`` with contiguous rows; overwritten or
            added to.
        grad_value: The gradient of the values in the same shape; overwritten or added to.
        state: int32 zeros ``[STATE_TURNS + num_heads * num_blocks]``.
        starts: int32 ``[num_tiles + 1]``: first visit of each tile, see visits.py. ``None`` means
            that tiles visit all blocks, or all at and below the diagonal.
        visits: int32 ``[num_visits, VISIT_FIELDS]``, or ``None``.
        visit_records: Descriptor of the visits, flat, in blocks of 32 integers, or ``None``.
        mask_bits: int32 mask bits of the visits, or ``None``.
        num_kv_heads: Number of KV heads of all batch elements.
        num_tiles: Number of tiles of 128 keys of a head.
        num_blocks: Number of blocks of 64 queries of a head.
        num_keys: Number of keys.
        group: Number of query heads of a KV head.
        together: Number of KV heads whose tiles alternate in the queue.
        offset: Number of keys minus number of queries: query i sees keys up to ``i + offset``.
        heads_of_batch: Number of KV heads of one batch element.
        rows_of_head: Rows from a head of ``grad_key`` and ``grad_value`` to the next one.
        scale: Factor on the scores.
        scale_log2: The same divided by ln 2.
        BLOCK_D: Columns of the tensors: 64 or 128.
        IS_CAUSAL: Whether pairs above the diagonal are masked out.
        IS_RAGGED: Whether the last tile of a head has fewer than 128 keys.
        IS_SUM: Whether to add to the results instead of overwriting them.
        HEADS_ALTERNATE: Whether all query heads of a KV head visit a block before the next block;
            otherwise each of them visits all blocks.
        STAGES: Blocks of queries and of the output's gradient in shared memory.
        BUFFERS: Blocks of dQ in shared memory.
    """
    dtype: gl.constexpr = query.dtype
    HALF: gl.constexpr = TILE_KEYS // 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], swizzled)
    v = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], swizzled)
    # K of the products for dQ, by halves of the keys and of the columns. Swizzled memory stores 128
    # columns as two matrices of 64, one after another.
    if BLOCK_D == 128:
        halves = _reinterpret(k, dtype, [4, HALF, BLOCK_D // 2], swizzled)
    else:
        halves = gl.allocate_shared_memory(
            dtype, [4, HALF, BLOCK_D // 2], gl.NVMMASharedLayout(BLOCK_D, 16, 2)
        )
    q = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_QUERIES, BLOCK_D], swizzled)
    do = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_QUERIES, BLOCK_D], swizzled)
    # dS^T of even and of odd visits, each in two halves of 64 keys.
    ds = gl.allocate_shared_memory(dtype, [4, HALF, BLOCK_QUERIES], swizzled)
    ROWS: gl.constexpr = grad_query.block_shape[0]
    dq = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS, 256], grad_query.layout)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_QUERIES], statistics.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_QUERIES], statistics.layout)
    item = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Of even and of odd visits, one for each writer: it waits for every phase of its own barrier.
    dq_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_free.index(i), count=4)  # two consumers and two writers
        mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(dq_ready.index(i), count=2)
        mbarrier.init(dq_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(tile_ready.index(0), count=1)
    mbarrier.init(tile_free.index(0), count=2)

    queue = (item, item_ready, item_free)
    sizes = (num_kv_heads, num_tiles, num_blocks, num_keys, group, together, offset)
    tile = (k, v, halves, tile_ready, tile_free)
    ring = (q, do, lse, delta, visits, ready, free)  # without visits there are no records
    if visits is not None:
        records = gl.allocate_shared_memory(gl.int32, [STAGES, 32], visit_records.layout)
        ring = (q, do, lse, delta, records, ready, free)
    exchange = (ds, ds_ready, dq, dq_ready, dq_free)
    target = (grad_key, grad_value, rows_of_head, scale, scale_log2)
    sources = (
        query,
        key,
        value,
        grad_output,
        key_halves,
        statistics,
        visit_records,
        heads_of_batch,
    )
    lists = (starts, visits, mask_bits)
    context = (queue, sizes, tile, ring, exchange, target, lists)
    # The consumers' accumulators take all registers that the three other warps can spare.
    producing = (queue, sizes, tile, ring, sources, lists, state, IS_CAUSAL, HEADS_ALTERNATE)
    even = (queue, sizes, exchange, grad_query, lists, state, IS_CAUSAL, IS_SUM, HEADS_ALTERNATE, 0)
    odd = (queue, sizes, exchange, grad_query, lists, state, IS_CAUSAL, IS_SUM, HEADS_ALTERNATE, 1)
    gl.warp_specialize(
        [
            (_consume, (context, IS_CAUSAL, IS_RAGGED, IS_SUM, 0)),
            (_consume, (context, IS_CAUSAL, IS_RAGGED, IS_SUM, 1)),
            (_produce, producing),
            (_write_query_gradients, even),
            (_write_query_gradients, odd),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


@gluon.jit
def _publish(queue, turn, index):
    """Publish an item to consumers and writers; an ``index`` beyond the last ends them."""
    item, item_ready, item_free = queue
    values = gl.full([16], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + index
    mbarrier.wait(item_free.index(turn & 1), turn >> 1 & 1 ^ 1)
    item.index(turn & 1).store(values)
    mbarrier.arrive(item_ready.index(turn & 1), count=1)


@gluon.jit
def _next(queue, turn):
    """Wait for the next item and return its index."""
    item, item_ready, item_free = queue
    mbarrier.wait(item_ready.index(turn & 1), turn >> 1 & 1)
    layout: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    index = gl.max(item.index(turn & 1).load(layout), 0)
    mbarrier.arrive(item_free.index(turn & 1), count=1)
    return index


@gluon.jit
def _load_block(source, coordinates, barrier, target):
    """Copy a block to shared memory of the same size and swizzling in another shape."""
    target = _reinterpret(target, source.dtype, source.block_shape, source.layout)
    async_load(source, coordinates, barrier, target)


@gluon.jit
def _visits_of(tile, first, sizes, lists):
    """Return the number of a tile's first visit, the number of visits, and the step between them.

    They are the same for each query head. Without a list the number of a visit is its block.
    """
    starts, _, _ = lists
    _, _, num_blocks, _, _, _, _ = sizes
    number = num_blocks - 1
    count = num_blocks - first
    step = -1
    if starts is not None:
        number = gl.load(starts + tile)
        count = gl.load(starts + tile + 1) - number
        step = 1
    return number, count, step


@gluon.jit
def _following(query_head, number, head, group, place, HEADS_ALTERNATE: gl.constexpr):
    """Return the query head and the number of a tile's next visit.

    Args:
        query_head: Query head of this visit.
        number: Number of this visit.
        head: KV head of the tile.
        group: Number of query heads of a KV head.
        place: Number of the tile's first visit, the number of visits, and the step between them.
        HEADS_ALTERNATE: Whether all query heads visit a block before the next block.
    """
    first, count, step = place
    if HEADS_ALTERNATE:
        is_last = query_head == head * group + group - 1
        following = gl.where(is_last, number + step, number)
        following_head = gl.where(is_last, head * group, query_head + 1)
    else:
        is_last = number == first + (count - 1) * step
        following = gl.where(is_last, first, number + step)
        following_head = gl.where(is_last, query_head + 1, query_head)
    return following_head, following


@gluon.jit
def _produce(
    queue,
    sizes,
    tile_memory,
    ring,
    sources,
    lists,
    state,
    IS_CAUSAL: gl.constexpr,
    HEADS_ALTERNATE: gl.constexpr,
):
    """Take items, publish them, and copy their tiles and blocks to shared memory."""
    k, v, halves, tile_ready, tile_free = tile_memory
    q, do, lse, delta, records, ready, free = ring
    query, key, value, grad_output, key_halves, statistics, visit_records, heads_of_batch = sources
    _, visits, _ = lists
    num_kv_heads, num_tiles, num_blocks, _, group, _, _ = sizes
    STAGES: gl.constexpr = q.shape[0]
    HALF: gl.constexpr = k.shape[1]
    BLOCK_D: gl.constexpr = k.shape[2]
    TILE_BYTES: gl.constexpr = (2 if BLOCK_D == 128 else 3) * 2 * key.block_type.nbytes
    BLOCK_BYTES: gl.constexpr = (
        query.block_type.nbytes
        + grad_output.block_type.nbytes
        + 2 * statistics.block_type.nbytes
        + (0 if visits is None else 32 * 4)
    )
    num_items = num_kv_heads * num_tiles
    # The first item comes from the counter too: a tile may only wait for programs that run.
    index = gl.atomic_add(state + STATE_ITEM, 1)
    turn = 0
    i = 0
    while index < num_items:
        _publish(queue, turn, index)
        head, tile, first = place_of_item(index, sizes, IS_CAUSAL)
        batch = head // heads_of_batch
        head_of_batch = head - batch * heads_of_batch
        arrived = tile_ready.index(0)
        mbarrier.wait(tile_free.index(0), turn & 1 ^ 1)
        mbarrier.expect(arrived, TILE_BYTES)
        for half in gl.static_range(2):
            first_key = tile * TILE_KEYS + half * HALF
            _load_block(key, [batch, head_of_batch, 0, first_key, 0], arrived, k.index(half))
            _load_block(value, [batch, head_of_batch, 0, first_key, 0], arrived, v.index(half))
            if BLOCK_D != 128:
                for part in gl.static_range(2):
                    corner = [batch, head_of_batch, 0, first_key, part * (BLOCK_D // 2)]
                    _load_block(key_halves, corner, arrived, halves.index(half * 2 + part))
        query_head = head * group
        tile_visits = _visits_of(tile, first, sizes, lists)
        number, count, _ = tile_visits
        for _visit in range(count * group):
            block = number
            if visits is not None:
                block = gl.load(visits + number * VISIT_FIELDS + VISIT_BLOCK)
            stage = i % STAGES
            arrived = ready.index(stage)
            mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
            mbarrier.expect(arrived, BLOCK_BYTES)
            row = block * BLOCK_QUERIES
            batch_query_head = query_head - batch * heads_of_batch * group
            statistics_start = (query_head * num_blocks + block) * (2 * BLOCK_QUERIES)
            _load_block(query, [batch, batch_query_head, 0, row, 0], arrived, q.index(stage))
            async_load(statistics, [statistics_start], arrived, lse.index(stage))
            _load_block(grad_output, [batch, batch_query_head, 0, row, 0], arrived, do.index(stage))
            async_load(statistics, [statistics_start + BLOCK_QUERIES], arrived, delta.index(stage))
            if visits is not None:
                async_load(visit_records, [number * VISIT_FIELDS], arrived, records.index(stage))
            query_head, number = _following(
                query_head, number, head, group, tile_visits, HEADS_ALTERNATE
            )
            i += 1
        # Taken late, so that items start in the order of the queue.
        index = gl.atomic_add(state + STATE_ITEM, 1)
        turn += 1
    _publish(queue, turn, index)


@gluon.jit
def _write_query_gradients(
    queue,
    sizes,
    exchange,
    grad_query,
    lists,
    state,
    IS_CAUSAL: gl.constexpr,
    IS_SUM: gl.constexpr,
    HEADS_ALTERNATE: gl.constexpr,
    writer: gl.constexpr,
):
    """Add the blocks of dQ of even visits, or those of odd visits, to memory."""
    _, _, dq, dq_ready, dq_free = exchange
    _, visits, _ = lists
    num_kv_heads, num_tiles, num_blocks, _, group, _, _ = sizes
    BUFFERS: gl.constexpr = dq.shape[0]
    ROWS: gl.constexpr = grad_query.block_shape[0]
    NUM_OVERWRITING: gl.constexpr = 0 if IS_SUM else 1  # tiles
    num_items = num_kv_heads * num_tiles
    turn = 0
    i = 0
    index = _next(queue, turn)
    while index < num_items:
        head, tile, first = place_of_item(index, sizes, IS_CAUSAL)
        query_head = head * group
        tile_visits = _visits_of(tile, first, sizes, lists)
        number, count, _ = tile_visits
        for _visit in range(count * group):
            if i % 2 == writer:
                block = number
                turn_of_visit = tile
                if visits is not None:
                    block = gl.load(visits + number * VISIT_FIELDS + VISIT_BLOCK)
                    turn_of_visit = gl.load(visits + number * VISIT_FIELDS + VISIT_TURN)
                place = query_head * num_blocks + block
                turn_address = (state + STATE_TURNS + place).to(gl.int64)
                gl.inline_asm_elementwise(
                    _WAIT_FOR_TURN,
                    "=r,l,r",
                    [turn_address, turn_of_visit],
                    dtype=gl.int32,
                    is_pure=False,
                    pack=1,
                )
                mbarrier.wait(dq_ready.index(i & 1), i >> 1 & 1)
                if turn_of_visit < NUM_OVERWRITING:
                    async_store(grad_query, [place * ROWS, 0], dq.index(i % BUFFERS))
                else:
                    async_add(grad_query, [place * ROWS, 0], dq.index(i % BUFFERS))
                tma.store_wait(0)
                mbarrier.arrive(dq_free.index(i & 1), count=1)
                gl.inline_asm_elementwise(
                    _PASS_TURN_ON, "=r,l", [turn_address], dtype=gl.int32, is_pure=False, pack=1
                )
            query_head, number = _following(
                query_head, number, head, group, tile_visits, HEADS_ALTERNATE
            )
            i += 1
        turn += 1
        index = _next(queue, turn)


@gluon.jit
def _consume(
    context,
    IS_CAUSAL: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    IS_SUM: gl.constexpr,
    half: gl.constexpr,
):
    """Compute the gradients of 64 keys of each tile, and half of the columns of dQ."""
    queue, sizes, tile_memory, _, _, target, lists = context
    k, _, _, tile_ready, tile_free = tile_memory
    num_kv_heads, num_tiles, num_blocks, num_keys, group, _, offset = sizes
    grad_key, grad_value, rows_of_head, scale, _ = target
    HALF: gl.constexpr = k.shape[1]
    BLOCK_D: gl.constexpr = k.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    num_items = num_kv_heads * num_tiles
    turn = 0
    i = 0
    index = _next(queue, turn)
    while index < num_items:
        head, tile, first = place_of_item(index, sizes, IS_CAUSAL)
        mbarrier.wait(tile_ready.index(0), turn & 1)
        acc_v = gl.zeros([HALF, BLOCK_D], gl.float32, layout)
        acc_k = gl.zeros([HALF, BLOCK_D], gl.float32, layout)
        # The distance from the first key of this half to the last key that the first query of the
        # block sees or, without a causal mask, to the end of the keys.
        row = tile * TILE_KEYS + half * HALF
        if IS_CAUSAL:
            distance = (num_blocks - 1) * BLOCK_QUERIES + offset - row
        else:
            distance = num_keys - row
        member = 0
        tile_visits = _visits_of(tile, first, sizes, lists)
        for _visit in range(tile_visits[1] * group):
            acc_k, acc_v = _add_products(
                context, i, acc_k, acc_v, distance, IS_CAUSAL, IS_RAGGED, half
            )
            if IS_CAUSAL:
                member += 1
                distance = gl.where(member == group, distance - BLOCK_QUERIES, distance)
                member = gl.where(member == group, 0, member)
            i += 1
        mbarrier.arrive(tile_free.index(0), count=1)
        start = head.to(gl.int64) * rows_of_head + row
        _store(grad_key, acc_k * scale, start, num_keys - row, IS_RAGGED, IS_SUM)
        _store(grad_value, acc_v, start, num_keys - row, IS_RAGGED, IS_SUM)
        turn += 1
        index = _next(queue, turn)


@gluon.jit
def _store(target, values, start, num_rows, IS_RAGGED: gl.constexpr, IS_SUM: gl.constexpr):
    """Write or add 64 rows of the gradient of keys or values, without those beyond the last key."""
    ROWS: gl.constexpr = values.shape[0]
    BLOCK_D: gl.constexpr = values.shape[1]
    layout: gl.constexpr = values.type.layout
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout)), 0)
    place = target + start * BLOCK_D + rows * BLOCK_D + columns
    exist = rows < num_rows
    if IS_SUM:
        if IS_RAGGED:
            values += gl.load(place, mask=exist, other=0.0)
        else:
            values += gl.load(place)
    values = values.to(target.dtype.element_ty)
    if IS_RAGGED:
        gl.store(place, values, mask=exist)
    else:
        gl.store(place, values)


@gluon.jit
def _pin(values):
    """Compute values here: moves between two products in flight would make ptxas wait."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _own_layout(columns):
    """Return the layout of dQ in shared memory that takes no exchange between threads.

    A thread's registers are stored as vectors of 16 bytes, at ``(vector * 128 + thread) * 16``.
    """
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout(bases + [[0, x] for x in (8, 16, 32) if x < columns])


@gluon.jit
def _live(layout: gl.constexpr, distance):
    """Return which pairs of 64 keys and a block are live, bool ``[keys, queries]``."""
    keys = gl.arange(0, TILE_KEYS // 2, gl.SliceLayout(1, layout)) - distance
    queries = gl.arange(0, BLOCK_QUERIES, gl.SliceLayout(0, layout))
    return gl.expand_dims(queries, 0) >= gl.expand_dims(keys, 1)


@gluon.jit
def _mask_of(record):
    """Return the index of the mask bits of a visit, or -1, given its record in shared memory."""
    values = record.load(gl.BlockedLayout([32], [32], [gl.num_warps()], [0]))
    field = gl.arange(0, 32, values.type.layout)
    return gl.sum(gl.where(field == VISIT_MASK, values, 0), 0)


@gluon.jit
def _add_products(
    context,
    i,
    acc_k,
    acc_v,
    distance,
    IS_CAUSAL: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    half: gl.constexpr,
):
    """Add the products of a block to dK and dV, and hand over its dQ to a writer.

    Args:
        context: Queue, sizes, tile, ring, exchange, target and lists of ``rectangle_gradients``.
        i: Number of visits so far.
        acc_k: Gradient of the keys so far, float32 ``[64, BLOCK_D]``.
        acc_v: Gradient of the values so far, float32 ``[64, BLOCK_D]``.
        distance: Key that the first query of the block sees last, or the end of the keys, minus the
            first key of this half.
        IS_CAUSAL: Whether pairs above the diagonal are masked out.
        IS_RAGGED: Whether the last tile of a head has fewer than 128 keys.
        half: The consumer, which is its half of the tile's keys and of the columns of dQ.

    Returns:
        ``acc_k`` and ``acc_v``.
    """
    _, _, tile_memory, ring, exchange, target, lists = context
    k_tile, v_tile, halves, _, _ = tile_memory
    q_ring, do_ring, lse_ring, delta_ring, records, ready, free = ring
    _, _, mask_bits = lists
    ds, ds_ready, dq_buffers, dq_ready, dq_free = exchange
    _, _, _, _, scale_log2 = target
    STAGES: gl.constexpr = q_ring.shape[0]
    BUFFERS: gl.constexpr = dq_buffers.shape[0]
    HALF: gl.constexpr = k_tile.shape[1]
    COLUMNS: gl.constexpr = k_tile.shape[2] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_QUERIES, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_v.type.layout, 2)
    stage = i % STAGES
    buffer = i & 1
    q = q_ring.index(stage)
    do = do_ring.index(stage)
    zeros = gl.zeros([HALF, BLOCK_QUERIES], gl.float32, layout)
    mbarrier.wait(ready.index(stage), i // STAGES & 1)
    # The statistics are negative: dP starts from -delta, which then needs no registers of its own.
    deltas = _pin(zeros + gl.expand_dims(delta_ring.index(stage).load(column_layout), 0))
    s = warpgroup_mma(k_tile.index(half), q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile.index(half), do.permute([1, 0]), deltas, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    lses = lse_ring.index(stage).load(column_layout)
    p = gl.exp2(s * scale_log2 + gl.expand_dims(lses, 0))
    mask = -1
    if mask_bits is not None:
        mask = _mask_of(records.index(stage))
        if mask >= 0:
            live = are_set(layout, mask_bits + mask + half * HALF * 4, mask >= 0, 0)
            p = gl.where(live, p, 0.0)
    elif IS_CAUSAL:
        if distance < HALF - 1:
            p = gl.where(_live(layout, distance), p, 0.0)
    elif IS_RAGGED:
        if distance < HALF:
            keys = gl.arange(0, HALF, gl.SliceLayout(1, layout))
            p = gl.where(gl.expand_dims(keys, 1) < distance, p, 0.0)
    p_operand = gl.convert_layout(p.to(q.dtype), operand_layout)
    acc_v = warpgroup_mma(p_operand, do, acc_v, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    grad_s = p * dp
    if mask_bits is not None:
        if mask >= 0:
            live = are_set(layout, mask_bits + mask + half * HALF * 4, mask >= 0, 0)
            grad_s = gl.where(live, grad_s, 0.0)
    elif IS_CAUSAL:
        if distance < HALF - 1:  # NaN of a masked pair would not vanish by p = 0
            grad_s = gl.where(_live(layout, distance), grad_s, 0.0)
    grad_s = grad_s.to(q.dtype)
    # The other consumer has finished reading this buffer: it has come to the barrier of the visit
    # before, after its dQ of two visits before.
    ds.index(buffer * 2 + half).store(grad_s)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(buffer), count=1)
    grad_s = gl.convert_layout(grad_s, operand_layout)
    mbarrier.wait(ds_ready.index(buffer), i >> 1 & 1)
    dq = gl.zeros([BLOCK_QUERIES, COLUMNS], gl.float32, dq_layout)
    ds_0, ds_1 = ds.index(buffer * 2).permute([1, 0]), ds.index(buffer * 2 + 1).permute([1, 0])
    dq = warpgroup_mma(ds_0, halves.index(half), dq, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds_1, halves.index(2 + half), dq, is_async=True)
    acc_k = warpgroup_mma(grad_s, q, acc_k, is_async=True)
    dq, acc_v, p_operand = warpgroup_mma_wait(1, [dq, acc_v, p_operand])
    # The buffer is free when the writer of the visit BUFFERS before has read it. On new barriers
    # the wait returns at once, because -1 >> 1 and -2 >> 1 are odd.
    before = i - BUFFERS
    mbarrier.wait(dq_free.index(before & 1), before >> 1 & 1)
    own: gl.constexpr = _own_layout(COLUMNS)
    parts = _reinterpret(dq_buffers, gl.float32, [BUFFERS * 2, BLOCK_QUERIES, COLUMNS], own)
    parts.index(i % BUFFERS * 2 + half).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_ready.index(i & 1), count=1)
    acc_k, grad_s = warpgroup_mma_wait(0, [acc_k, grad_s])
    mbarrier.arrive(free.index(stage), count=1)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["num_queries", "num_blocks", "rows_of_head", "first"])
def convert_query_gradient(
    source, target, scale, num_queries, num_blocks, rows_of_head, first, BLOCK_D: tl.constexpr
):
    """Write the gradient of queries, given its sums in the order of the consumers' registers.

    A program converts half of the columns of a block.

    Args:
        source: float32 sums, 64 x BLOCK_D / 2 for each half of the columns of each block.
        target: ``[num_heads, num_queries, BLOCK_D]``, rows contiguous; overwritten.
        scale: Factor on the scores.
        num_queries: Number of queries.
        num_blocks: Number of blocks of 64 queries of a head.
        rows_of_head: Rows from a head of ``target`` to the next one.
        first: First block with sums. Queries before see no key and get gradient 0.
        BLOCK_D: Columns of the queries.
    """
    SIZE: tl.constexpr = BLOCK_D * 32
    number = tl.program_id(0)
    head = number // 2 // num_blocks
    block = number // 2 - head * num_blocks
    x = tl.load(
        source + number.to(tl.int64) * SIZE + tl.arange(0, SIZE),
        mask=(block + tl.zeros([SIZE], tl.int32)) >= first,
        other=0.0,
    )
    # columns / 8, warp, row % 8, column / 2 % 4, row / 8 % 2, column % 2
    x = tl.reshape(x, [BLOCK_D // 16, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, BLOCK_D // 2])
    row = block * 64 + tl.arange(0, 64)[:, None]
    column = number % 2 * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)[None, :]
    place = (head.to(tl.int64) * rows_of_head + row) * BLOCK_D + column
    tl.store(target + place, (x * scale).to(target.dtype.element_ty), mask=row < num_queries)
