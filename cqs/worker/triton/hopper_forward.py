"""The forward kernel for Hopper GPUs: warps that copy, and two groups of warps that compute.

One group's matrix products run while the other takes exponentials, and within a group the product
of scores with values is still at work when the next scores are taken.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cqs.worker.triton.hopper_pairs import visible
from cqs.worker.triton.hopper_queue import (
    HEAD,
    INDEX,
    async_load,
    item_field,
    load_place,
    load_run,
    make_queue,
    meet,
    next_item,
    place_of,
    publish_item,
)

_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "num_long",
        "num_items",
        "num_polls",
        "num_heads",
        "lse_batch_stride",
        "lse_head_stride",
        "lse_row_stride",
    ],
    do_not_specialize_on_alignment=["query_step", "key_step"],
)
def attend_tiles_on_hopper(
    query,
    key,
    value,
    output,
    lse,
    tiles,
    runs,
    bits,
    counter,
    num_tiles,
    num_long,
    num_items,
    num_polls,
    num_heads,
    output_strides,
    lse_batch_stride,
    lse_head_stride,
    lse_row_stride,
    query_step,
    key_step,
    scale_log2,
    value_dim,
    GROUP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BITS: gl.constexpr,
):
    """Attend with query tiles of heads until none is left; arguments as for ``attend_tiles``.

    Args:
        bits: Never None; read where HAS_BITS.
        counter: int32 ``[2]``, zero: items taken beyond the first of each program, and begun.
        num_long: Tiles, the first of the list, that come before all others of any head.
        num_items: Tiles times heads times batch.
        num_polls: How long to wait for other programs; see :func:`meet`.
    """
    HALF_Q: gl.constexpr = query.block_shape[3]
    TILE_K: gl.constexpr = key.block_shape[3]
    BLOCK_D: gl.constexpr = query.block_shape[4]
    BLOCK_V: gl.constexpr = value.block_shape[4]
    dtype: gl.constexpr = query.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, HALF_Q, BLOCK_D], query.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, TILE_K, BLOCK_D], key.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, TILE_K, BLOCK_V], value.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    mbarrier.init(q_free.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)

    queue = make_queue()
    memory = (q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free)
    work = (tiles, runs, bits, num_tiles, num_long, num_items)
    lse_strides = (lse_batch_stride, lse_head_stride, lse_row_stride)
    answer = (output, lse, output_strides, lse_strides, num_heads, scale_log2, value_dim)
    steps = (query_step, key_step)
    gl.warp_specialize(
        [
            (_consume, (queue, memory, work, answer, steps, HAS_BITS, 0)),
            (_consume, (queue, memory, work, answer, steps, HAS_BITS, 1)),
            (
                _produce,
                (queue, memory, work, query, key, value, counter, num_polls, num_heads, GROUP_SIZE),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(
    queue,
    memory,
    work,
    query,
    key,
    value,
    counter,
    num_polls,
    num_heads,
    GROUP_SIZE: gl.constexpr,
):
    """Take items; copy each one's query tile and, tile by tile, the keys and values of its runs."""
    q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free = memory
    tiles, runs, bits, num_tiles, num_long, num_items = work
    HALF_Q: gl.constexpr = query.block_shape[3]
    TILE_K: gl.constexpr = key.block_shape[3]
    STAGES: gl.constexpr = k.shape[0]
    index = gl.program_id(0)
    turn = 0
    i = 0
    while index < num_items:
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        publish_item(queue, work, turn, index)
        head, number = place_of(work, index)
        tile = tiles + number * 8
        batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
        query_start = gl.load(tile)
        query_residue = gl.load(tile + 7)
        mbarrier.wait(q_free.index(0), turn & 1 ^ 1)
        mbarrier.expect(q_ready.index(0), 2 * query.block_type.nbytes)
        for half in gl.static_range(2):
            place = [batch, head % num_heads, query_residue, query_start + half * HALF_Q, 0]
            async_load(query, place, q_ready.index(0), q.index(half))
        meet(counter + 1, num_items, num_polls)
        for run in range(gl.load(tile + 3), gl.load(tile + 5)):
            start, stop, residue = load_place(runs, run)
            for k0 in range(start, stop, TILE_K):
                stage = i % STAGES
                parity = i // STAGES & 1
                place = [batch, kv_head, residue, k0, 0]
                mbarrier.wait(k_free.index(stage), parity ^ 1)
                mbarrier.expect(k_ready.index(stage), key.block_type.nbytes)
                async_load(key, place, k_ready.index(stage), k.index(stage))
                mbarrier.wait(v_free.index(stage), parity ^ 1)
                mbarrier.expect(v_ready.index(stage), value.block_type.nbytes)
                async_load(value, place, v_ready.index(stage), v.index(stage))
                i += 1
        index = following
        turn += 1
    publish_item(queue, work, turn, index)


@gluon.jit
def _consume(queue, memory, work, answer, steps, HAS_BITS: gl.constexpr, half: gl.constexpr):
    """Attend with one half of each query tile's rows."""
    q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free = memory
    tiles, runs, bits, num_tiles, num_long, num_items = work
    output, lse, output_strides, lse_strides, num_heads, scale_log2, value_dim = answer
    HALF_Q: gl.constexpr = q.shape[4]
    TILE_K: gl.constexpr = k.shape[4]
    BLOCK_D: gl.constexpr = k.shape[5]
    BLOCK_V: gl.constexpr = v.shape[5]
    query_step, _ = steps
    STAGES: gl.constexpr = k.shape[0]
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    store_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_V, BLOCK_V // 8], [4, 1], [1, 0]
    )
    q_half = q.index(half).reshape([HALF_Q, BLOCK_D])
    turn = 0
    i = 0
    item = next_item(queue, turn)
    index = item_field(item, INDEX)
    while index < num_items:
        query_start = item_field(item, 0) + half * HALF_Q
        query_stop = item_field(item, 1)
        first_row = item_field(item, 2) + half * HALF_Q * query_step
        first_run = item_field(item, 3)
        banded_stop = item_field(item, 4)
        num_full = item_field(item, 6)
        start = item_field(item, 8)
        stop = item_field(item, 9)
        band = item_field(item, 10), item_field(item, 11)
        bits_of_run = item_field(item, 12)

        mbarrier.wait(q_ready.index(0), turn & 1)
        scores = warpgroup_mma_wait(0, [_issue_scores(q_half, k, k_ready, i)])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        run = (start, stop, band, bits_of_run)
        scores = _mask_out(scores, bits, run, steps, query_start, start, HAS_BITS)
        score_rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
        largest = gl.full([HALF_Q], float("-inf"), gl.float32, score_rows)
        total = gl.zeros([HALF_Q], gl.float32, score_rows)
        p, largest, total, decay = _exponentials(scores, largest, total, scale_log2, True)
        p = _as_operand(p, out_layout, v.dtype)
        acc = gl.zeros([HALF_Q, BLOCK_V], gl.float32, out_layout)
        i += 1
        first = start + TILE_K
        for number in range(first_run, banded_stop):
            if number > first_run:
                start, stop, band, bits_of_run = load_run(runs, number)
                first = start
            for k0 in range(first, stop, TILE_K):
                pending = _issue_scores(q_half, k, k_ready, i)
                adding = _issue_output(p, v, v_ready, i - 1, acc)
                scores = warpgroup_mma_wait(1, [pending])
                mbarrier.arrive(k_free.index(i % STAGES), count=1)
                run = (start, stop, band, bits_of_run)
                scores = _mask_out(scores, bits, run, steps, query_start, k0, HAS_BITS)
                p_next, largest, total, decay = _exponentials(
                    scores, largest, total, scale_log2, True
                )
                acc, p = warpgroup_mma_wait(0, [adding, p])
                mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)
                acc = acc * gl.expand_dims(gl.convert_layout(decay, row_layout), 1)
                p = _as_operand(p_next, out_layout, v.dtype)
                i += 1
        end = i + num_full
        if first_run == banded_stop:
            end -= 1
        for j in range(i, end):
            pending = _issue_scores(q_half, k, k_ready, j)
            adding = _issue_output(p, v, v_ready, j - 1, acc)
            scores = warpgroup_mma_wait(1, [pending])
            mbarrier.arrive(k_free.index(j % STAGES), count=1)
            p_next, largest, total, decay = _exponentials(scores, largest, total, scale_log2, False)
            acc, p = warpgroup_mma_wait(0, [adding, p])
            mbarrier.arrive(v_free.index((j - 1) % STAGES), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(decay, row_layout), 1)
            p = _as_operand(p_next, out_layout, v.dtype)
        i = end
        mbarrier.arrive(q_free.index(0), count=1)
        acc, p = warpgroup_mma_wait(0, [_issue_output(p, v, v_ready, i - 1, acc), p])
        mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)

        total = gl.convert_layout(total, row_layout)
        largest = gl.convert_layout(largest, row_layout)
        total = gl.where(total == 0, 1.0, total)
        acc = acc * gl.expand_dims(1.0 / total, 1)
        head = item_field(item, HEAD)
        batch, head = (head // num_heads).to(gl.int64), (head % num_heads).to(gl.int64)
        row = gl.arange(0, HALF_Q, row_layout)
        place = lse + batch * lse_strides[0] + head * lse_strides[1]
        place += (first_row + row * query_step).to(gl.int64) * lse_strides[2]
        in_tile = row + query_start < query_stop
        gl.store(place, (largest + gl.log2(total)) * _LN2, mask=in_tile)
        out = gl.convert_layout(acc.to(output.dtype.element_ty), store_layout)
        row = gl.arange(0, HALF_Q, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, BLOCK_V, gl.SliceLayout(0, store_layout))
        mask = gl.expand_dims(row + query_start < query_stop, 1)
        mask &= gl.expand_dims(column < value_dim, 0)
        row = (first_row + row * query_step).to(gl.int64) * output_strides[2]
        place = output + batch * output_strides[0] + head * output_strides[1]
        gl.store(place + gl.expand_dims(row, 1) + gl.expand_dims(column, 0), out, mask=mask)
        turn += 1
        item = next_item(queue, turn)
        index = item_field(item, INDEX)


@gluon.jit
def _issue_scores(q_half, k, k_ready, i):
    """Wait for the i-th tile of keys and begin to multiply it with the queries."""
    TILE_K: gl.constexpr = k.shape[4]
    BLOCK_D: gl.constexpr = k.shape[5]
    stage = i % k.shape[0]
    mbarrier.wait(k_ready.index(stage), i // k.shape[0] & 1)
    keys = k.index(stage).reshape([TILE_K, BLOCK_D]).permute([1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    HALF_Q: gl.constexpr = q_half.shape[0]
    zeros = gl.zeros([HALF_Q, TILE_K], gl.float32, layout)
    return warpgroup_mma(q_half, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, v, v_ready, i, acc):
    """Wait for the i-th tile of values and begin to add its product with the probabilities."""
    TILE_K: gl.constexpr = v.shape[4]
    BLOCK_V: gl.constexpr = v.shape[5]
    stage = i % v.shape[0]
    mbarrier.wait(v_ready.index(stage), i // v.shape[0] & 1)
    return warpgroup_mma(p, v.index(stage).reshape([TILE_K, BLOCK_V]), acc, is_async=True)


@gluon.jit
def _mask_out(scores, bits, run, steps, query_start, key_start, HAS_BITS: gl.constexpr):
    """Set the scores of pairs that are masked out to -inf."""
    layout: gl.constexpr = scores.type.layout
    live = visible(layout, bits, run, steps, query_start, key_start, HAS_BITS)
    return gl.where(live, scores, float("-inf"))


@gluon.jit
def _exponentials(scores, largest, total, scale_log2, MAY_BE_EMPTY: gl.constexpr):
    """Take one step of the running softmax; return also what the past decays by."""
    larger = gl.maximum(largest, gl.max(scores, 1) * scale_log2)
    shift = larger
    if MAY_BE_EMPTY:
        shift = gl.where(larger == float("-inf"), 0.0, larger)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    decay = gl.exp2(largest - shift)
    return p, larger, total * decay + gl.sum(p, 1), decay


@gluon.jit
def _as_operand(p, out_layout: gl.constexpr, dtype: gl.constexpr):
    """Round probabilities for the product with the values; the registers stay where they are."""
    layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    return gl.convert_layout(p.to(dtype), layout)
