"""The forward kernel for Hopper GPUs: persistent and warp-specialised, as in FlashAttention-3.

A producer warp copies tiles to shared memory by TMA. Two or three consumers of four warps each
compute 64 rows of a tile: the matrix products of one run while another computes exponentials.
Within a consumer, the product of one block's probabilities and values is in flight while the next
block's exponentials are computed. hopper_queue.py explains the barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cqs.worker.triton.fields import (
    RUN_BITS_START,
    RUN_COLUMN_START,
    RUN_COLUMN_STOP,
    RUN_HIGH,
    RUN_LOW,
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
from cqs.worker.triton.hopper_pairs import alibi, capped_powers, tanh, visible
from cqs.worker.triton.hopper_queue import (
    ITEM_HEAD,
    ITEM_INDEX,
    ITEM_RUN,
    async_load,
    item_field,
    load_offset,
    load_place,
    load_run,
    make_queue,
    next_item,
    place_of,
    publish_item,
    wait_for_programs,
)

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


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
    mask_bits,
    slopes,
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
    softcap,
    sinks,
    GROUP_SIZE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BITS: gl.constexpr,
    IS_BOUNDED: gl.constexpr,
):
    """Write the partial outputs of the items of a queue, each a query tile of one head.

    Args:
        query: Descriptor of the queries, ``[batch, num_heads, query_step, rows, head_dim]``, in
            blocks of the rows of a consumer.
        key: Descriptor of the keys, ``[batch, num_heads / GROUP_SIZE, key_step, rows, head_dim]``.
        value: Descriptor of the values, ``[batch, num_heads / GROUP_SIZE, key_step, rows,
            value_dim]``.
        output: ``[batch, num_heads, rows, value_dim]`` with a last stride of 1; written to.
        lse: float32 ``[batch, num_heads, rows]``; written to.
        tiles: int32 ``[num_tiles, TILE_FIELDS]``; see tiles.py.
        runs: int32 ``[num_runs, RUN_FIELDS]``.
        mask_bits: int32 mask bits of the runs; a tensor even if no run has any.
        slopes: Slopes of ALiBi divided by ln 2, float32 ``[batch, num_heads]``, or None.
        counter: int32 ``[2]``, zeros: the number of items that programs took after their first, and
            the number of items that have started.
        num_tiles: Number of tiles, the same for every head.
        num_long: Number of tiles at the start of the list that precede all others of all heads.
        num_items: Number of items: tiles times heads times batch.
        num_polls: Maximum number of polls of :func:`wait_for_programs`.
        num_heads: Number of query heads.
        output_strides: Strides of batch, heads and rows; specialised for stores of 16 bytes.
        lse_batch_stride: Stride of the batch of ``lse``.
        lse_head_stride: Stride of the heads of ``lse``.
        lse_row_stride: Stride of the rows of ``lse``.
        query_step: Tokens between two rows.
        key_step: Tokens between two columns.
        scale_log2: Factor on the scores divided by ln 2; positive.
        value_dim: Number of columns of the values.
        softcap: The soft cap, at most ``LARGEST_SOFTCAP``, or None.
        sinks: Sinks of the heads, ``[num_heads]``, or None.
        GROUP_SIZE: Number of query heads that share a KV head.
        CONSUMERS: Number of consumers, 2 or 3; three require a head_dim of 64.
        STAGES: Number of key and value blocks in shared memory.
        HAS_BITS: Whether any run has mask bits.
        IS_BOUNDED: Whether the soft cap bounds the exponents, so that rows need no maximum.
    """
    # 64 rows for each consumer: the M of a wgmma instruction, of which a warpgroup issues one.
    PART_Q: gl.constexpr = query.block_shape[3]
    TILE_K: gl.constexpr = key.block_shape[3]
    BLOCK_D: gl.constexpr = query.block_shape[4]
    BLOCK_V: gl.constexpr = value.block_shape[4]
    dtype: gl.constexpr = query.dtype
    q = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 1, PART_Q, BLOCK_D], query.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, TILE_K, BLOCK_D], key.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, TILE_K, BLOCK_V], value.layout)
    # Keys and values have separate barriers: the scores of a block can start before its values have
    # arrived, and its keys are released while its values are still read.
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    mbarrier.init(q_free.index(0), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_free.index(i), count=CONSUMERS)

    queue = make_queue(CONSUMERS)
    memory = (q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free)
    work = (tiles, runs, mask_bits, num_tiles, num_long, num_items)
    lse_strides = (lse_batch_stride, lse_head_stride, lse_row_stride)
    answer = (output, lse, output_strides, lse_strides, num_heads, value_dim, sinks)
    terms = (scale_log2, softcap, slopes)
    steps = (query_step, key_step)
    # Warps, and registers of a thread, of the partitions after the first. A multiprocessor has
    # 65,536 registers. With two consumers the kernel has three warpgroups, because the producer's
    # one warp counts as a warpgroup, and starts with 168 registers for each thread. setmaxnreg then
    # moves registers between warpgroups: the sum of three threads stays 504, and each has a
    # multiple of 8 from 24 to 256. The producer keeps addresses only and takes 24, the least; each
    # consumer gets 240. At head_dim 128, a consumer's scores and output, 64 x 128 float32, take 64
    # registers each. Three consumers share 512 - 24: their outputs must have 64 columns.
    producing = (queue, memory, work, query, key, value, counter, num_polls, num_heads, GROUP_SIZE)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (queue, memory, work, answer, terms, steps, HAS_BITS, IS_BOUNDED, 0)),
                (_consume, (queue, memory, work, answer, terms, steps, HAS_BITS, IS_BOUNDED, 1)),
                (_consume, (queue, memory, work, answer, terms, steps, HAS_BITS, IS_BOUNDED, 2)),
                (_produce, producing),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (queue, memory, work, answer, terms, steps, HAS_BITS, IS_BOUNDED, 0)),
                (_consume, (queue, memory, work, answer, terms, steps, HAS_BITS, IS_BOUNDED, 1)),
                (_produce, producing),
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
    """Copy the query tile of each item and the key and value blocks of its runs, in their order."""
    q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free = memory
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    CONSUMERS: gl.constexpr = q.shape[0]
    PART_Q: gl.constexpr = query.block_shape[3]
    TILE_K: gl.constexpr = key.block_shape[3]
    STAGES: gl.constexpr = k.shape[0]
    index = gl.program_id(0)  # the first item is fixed; later ones go to the program that is free
    turn = 0  # number of items so far, which gives the parity of their barriers
    i = 0  # number of blocks so far: block i is use i // STAGES of stage i % STAGES
    while index < num_items:
        # Taken before this item's copies, so that the atomic operation's latency overlaps them.
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        publish_item(queue, work, turn, index)
        head, number = place_of(work, index)
        tile = tiles + number * TILE_FIELDS
        batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE
        query_start = gl.load(tile + TILE_ROW_START)
        query_residue = gl.load(tile + TILE_RESIDUE)
        mbarrier.wait(q_free.index(0), turn & 1 ^ 1)
        # TMA zeroes rows beyond the tensor's last, and counts their bytes too.
        mbarrier.expect(q_ready.index(0), CONSUMERS * query.block_type.nbytes)
        for part in gl.static_range(CONSUMERS):
            place = [batch, head % num_heads, query_residue, query_start + part * PART_Q, 0]
            async_load(query, place, q_ready.index(0), q.index(part))
        wait_for_programs(counter + 1, num_items, num_polls)
        for run in range(gl.load(tile + TILE_RUN_START), gl.load(tile + TILE_RUN_STOP)):
            start, stop, residue = load_place(runs, run)
            for k0 in range(start, stop, TILE_K):
                stage = i % STAGES
                parity = i // STAGES & 1
                place = [batch, kv_head, residue, k0, 0]
                mbarrier.wait(k_free.index(stage), parity ^ 1)  # opposite parity: hopper_queue.py
                mbarrier.expect(k_ready.index(stage), key.block_type.nbytes)
                async_load(key, place, k_ready.index(stage), k.index(stage))
                mbarrier.wait(v_free.index(stage), parity ^ 1)
                mbarrier.expect(v_ready.index(stage), value.block_type.nbytes)
                async_load(value, place, v_ready.index(stage), v.index(stage))
                i += 1
        index = following
        turn += 1
    publish_item(queue, work, turn, index)  # ends the consumers


@gluon.jit
def _consume(
    queue,
    memory,
    work,
    answer,
    terms,
    steps,
    HAS_BITS: gl.constexpr,
    IS_BOUNDED: gl.constexpr,
    part: gl.constexpr,
):
    """Write the partial outputs of 64 rows of each query tile, from row ``64 * part`` on."""
    q, k, v, q_ready, q_free, k_ready, k_free, v_ready, v_free = memory
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    output, lse, output_strides, lse_strides, num_heads, value_dim, sinks = answer
    scale_log2, softcap, slopes = terms
    unit = scale_log2  # of the scores in the exponent
    if softcap is not None:
        unit = softcap * _LOG2E
    PART_Q: gl.constexpr = q.shape[4]
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
    q_part = q.index(part).reshape([PART_Q, BLOCK_D])
    turn = 0
    i = 0
    item = next_item(queue, turn)
    index = item_field(item, ITEM_INDEX)
    while index < num_items:
        query_start = item_field(item, TILE_ROW_START) + part * PART_Q
        query_stop = item_field(item, TILE_ROW_STOP)
        output_row = item_field(item, TILE_OUTPUT_ROW) + part * PART_Q * query_step
        run_start = item_field(item, TILE_RUN_START)
        banded_stop = item_field(item, TILE_BANDED_STOP)
        run_stop = item_field(item, TILE_RUN_STOP)
        full_blocks = item_field(item, TILE_FULL_BLOCKS)
        start = item_field(item, ITEM_RUN + RUN_COLUMN_START)
        stop = item_field(item, ITEM_RUN + RUN_COLUMN_STOP)
        band = item_field(item, ITEM_RUN + RUN_LOW), item_field(item, ITEM_RUN + RUN_HIGH)
        bits_start = item_field(item, ITEM_RUN + RUN_BITS_START)
        slope = None
        if slopes is not None:
            slope = gl.load(slopes + item_field(item, ITEM_HEAD)) / unit

        # The first block starts the pipeline, with the mask even if its run is full: its band then
        # has no bounds. Its run's fields came with the item, without a load from global memory.
        mbarrier.wait(q_ready.index(0), turn & 1)
        products = warpgroup_mma_wait(0, [_issue_scores(q_part, k, k_ready, i)])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        run = (start, stop, band, bits_start)
        place = (load_offset(runs, run_start), steps, query_start, start)
        scores = _banded_scores(products, terms, slope, mask_bits, run, place, HAS_BITS, IS_BOUNDED)
        score_rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
        largest = gl.full([PART_Q], float("-inf"), gl.float32, score_rows)
        total = gl.zeros([PART_Q], gl.float32, score_rows)
        if sinks is not None:  # a score of every row, without a value
            sink = gl.load(sinks + item_field(item, ITEM_HEAD) % num_heads).to(gl.float32)
            largest = gl.zeros([PART_Q], gl.float32, score_rows) + sink * _LOG2E
            total += 1.0
        if IS_BOUNDED:
            largest = gl.zeros([PART_Q], gl.float32, score_rows) + _shift_of_cap(softcap)
        p, largest, total, decay = _exponentials(scores, largest, total, unit, True, IS_BOUNDED)
        p = _as_operand(p, out_layout, v.dtype)
        acc = gl.zeros([PART_Q, BLOCK_V], gl.float32, out_layout)
        i += 1
        first = start + TILE_K
        for number in range(run_start, banded_stop):
            if number > run_start:  # the first run continues after its first block
                start, stop, band, bits_start = load_run(runs, number)
                first = start
            offset = load_offset(runs, number)
            for k0 in range(first, stop, TILE_K):
                products, adding = _start_block(q_part, memory, i, p, acc)
                run = (start, stop, band, bits_start)
                place = (offset, steps, query_start, k0)
                scores = _banded_scores(
                    products, terms, slope, mask_bits, run, place, HAS_BITS, IS_BOUNDED
                )
                p, acc, largest, total = _end_block(
                    memory, i, scores, largest, total, unit, p, adding, out_layout, True, IS_BOUNDED
                )
                i += 1
        end = i + full_blocks
        if run_start == banded_stop:  # the first block was a full one
            end -= 1
        if slopes is None:
            # Full runs need no field of their records: the producer's order of blocks is enough.
            for j in range(i, end):
                products, adding = _start_block(q_part, memory, j, p, acc)
                scores = _cap(products, terms, IS_BOUNDED)
                p, acc, largest, total = _end_block(
                    memory,
                    j,
                    scores,
                    largest,
                    total,
                    unit,
                    p,
                    adding,
                    out_layout,
                    False,
                    IS_BOUNDED,
                )
        else:
            for number in range(banded_stop, run_stop):
                first, stop, _ = load_place(runs, number)
                offset = load_offset(runs, number)
                if number == run_start:
                    first += TILE_K
                for k0 in range(first, stop, TILE_K):
                    products, adding = _start_block(q_part, memory, i, p, acc)
                    place = (offset, steps, query_start, k0)
                    scores = _add_alibi(_cap(products, terms, False), slope, place)
                    p, acc, largest, total = _end_block(
                        memory,
                        i,
                        scores,
                        largest,
                        total,
                        unit,
                        p,
                        adding,
                        out_layout,
                        False,
                        IS_BOUNDED,
                    )
                    i += 1
        i = end
        # All scores are computed: the producer may load the next tile's queries.
        mbarrier.arrive(q_free.index(0), count=1)
        acc, p = warpgroup_mma_wait(0, [_issue_output(p, v, v_ready, i - 1, acc), p])
        mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)

        # A row without a live pair has output 0 and LSE -inf: no division by 0, and log2(1) = 0.
        total = gl.convert_layout(total, row_layout)
        largest = gl.convert_layout(largest, row_layout)
        if IS_BOUNDED:
            largest = gl.where(total == 0, float("-inf"), largest)
        total = gl.where(total == 0, 1.0, total)
        acc = acc * gl.expand_dims(1.0 / total, 1)
        head = item_field(item, ITEM_HEAD)
        batch, head = (head // num_heads).to(gl.int64), (head % num_heads).to(gl.int64)
        row = gl.arange(0, PART_Q, row_layout)
        place = lse + batch * lse_strides[0] + head * lse_strides[1]
        place += (output_row + row * query_step).to(gl.int64) * lse_strides[2]
        in_tile = row + query_start < query_stop
        gl.store(place, (largest + gl.log2(total)) * _LN2, mask=in_tile)
        # In the accumulator's layout a thread has 2 adjacent columns, in the store layout 8: stores
        # of 16 bytes in half precision. With eight tiles a head (every 16th of 16K tokens, H200)
        # these stores and the intervals of hopper_pairs.py took 0.70 of dense throughput to 0.79.
        out = gl.convert_layout(acc.to(output.dtype.element_ty), store_layout)
        row = gl.arange(0, PART_Q, gl.SliceLayout(1, store_layout))
        column = gl.arange(0, BLOCK_V, gl.SliceLayout(0, store_layout))
        mask = gl.expand_dims(row + query_start < query_stop, 1)
        mask &= gl.expand_dims(column < value_dim, 0)
        row = (output_row + row * query_step).to(gl.int64) * output_strides[2]
        place = output + batch * output_strides[0] + head * output_strides[1]
        gl.store(place + gl.expand_dims(row, 1) + gl.expand_dims(column, 0), out, mask=mask)
        turn += 1
        item = next_item(queue, turn)
        index = item_field(item, ITEM_INDEX)


@gluon.jit
def _issue_scores(q_part, k, k_ready, i):
    """Wait for key block ``i`` and start its product with the queries."""
    TILE_K: gl.constexpr = k.shape[4]
    BLOCK_D: gl.constexpr = k.shape[5]
    stage = i % k.shape[0]
    mbarrier.wait(k_ready.index(stage), i // k.shape[0] & 1)
    keys = k.index(stage).reshape([TILE_K, BLOCK_D]).permute([1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    PART_Q: gl.constexpr = q_part.shape[0]
    # `use_acc=False` overwrites: the zeros only give the result its layout.
    zeros = gl.zeros([PART_Q, TILE_K], gl.float32, layout)
    return warpgroup_mma(q_part, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, v, v_ready, i, acc):
    """Wait for value block ``i`` and start to add its product with the probabilities to ``acc``."""
    TILE_K: gl.constexpr = v.shape[4]
    BLOCK_V: gl.constexpr = v.shape[5]
    stage = i % v.shape[0]
    mbarrier.wait(v_ready.index(stage), i // v.shape[0] & 1)
    return warpgroup_mma(p, v.index(stage).reshape([TILE_K, BLOCK_V]), acc, is_async=True)


@gluon.jit
def _start_block(q_part, memory, i, p, acc):
    """Compute the products of block ``i``, and start to add the output of the block before.

    Two products are in flight, of which ``wait(1)`` awaits the older one: the output of the last
    block accumulates while the exponentials of this one are computed.
    """
    _, k, v, _, _, k_ready, k_free, v_ready, _ = memory
    pending = _issue_scores(q_part, k, k_ready, i)
    adding = _issue_output(p, v, v_ready, i - 1, acc)
    products = warpgroup_mma_wait(1, [pending])
    mbarrier.arrive(k_free.index(i % k.shape[0]), count=1)
    return products, adding


@gluon.jit
def _end_block(
    memory,
    i,
    scores,
    largest,
    total,
    unit,
    p,
    adding,
    out_layout: gl.constexpr,
    MAY_BE_EMPTY: gl.constexpr,
    IS_BOUNDED: gl.constexpr,
):
    """Compute the probabilities of block ``i``, and rescale the output of the blocks before.

    Returns:
        The probabilities, output, maximum and denominator.
    """
    _, _, v, _, _, _, _, _, v_free = memory
    p_next, largest, total, decay = _exponentials(
        scores, largest, total, unit, MAY_BE_EMPTY, IS_BOUNDED
    )
    # `p` too: the product reads its registers until here, so they must not be reused.
    acc, p = warpgroup_mma_wait(0, [adding, p])
    mbarrier.arrive(v_free.index((i - 1) % v.shape[0]), count=1)
    if not IS_BOUNDED:
        row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, row_layout), 1)
    return _as_operand(p_next, out_layout, v.dtype), acc, largest, total


@gluon.jit
def _banded_scores(
    products,
    terms,
    slope,
    mask_bits,
    run,
    place,
    HAS_BITS: gl.constexpr,
    IS_BOUNDED: gl.constexpr,
):
    """Apply the score terms to a block, and set the scores of pairs that are masked out to -inf.

    If ``IS_BOUNDED``, scores are probabilities, and those are set to 0.
    """
    _, softcap, _ = terms
    _, steps, query_start, key_start = place
    layout: gl.constexpr = products.type.layout
    live = visible(layout, mask_bits, run, steps, query_start, key_start, HAS_BITS)
    if softcap is not None:  # NaN of a masked pair would spread
        products = gl.where(live, products, 0.0)
    scores = _cap(products, terms, IS_BOUNDED)
    if slope is not None:
        scores = _add_alibi(scores, slope, place)
    masked: gl.constexpr = 0.0 if IS_BOUNDED else float("-inf")
    return gl.where(live, scores, masked)


@gluon.jit
def _shift_of_cap(softcap):
    """Return the shift of exponents that a soft cap bounds, in base-2 logarithms.

    They are between ``-top`` and ``top``. The largest becomes 0 or, if the smallest would be less
    than -120, that becomes -120: float32 and bfloat16 have all their digits there.
    """
    top = softcap * _LOG2E
    return gl.minimum(top, 120 - top)


@gluon.jit
def _cap(products, terms, IS_BOUNDED: gl.constexpr):
    """Apply the soft cap, if any, to products; scores are then in units of the cap.

    If ``IS_BOUNDED``, return probabilities instead, relative to :func:`_shift_of_cap`.
    """
    scale_log2, softcap, _ = terms
    scores = products
    if IS_BOUNDED:
        factor = scale_log2 / (softcap * _LOG2E)
        scores = capped_powers(products, factor, softcap * _LOG2E, _shift_of_cap(softcap))
    elif softcap is not None:
        scores = tanh(products, 2 * scale_log2 / softcap)
    return scores


@gluon.jit
def _add_alibi(scores, slope, place):
    """Subtract the distances of positions times ``slope`` from the scores of a block."""
    offset, steps, query_start, key_start = place
    layout: gl.constexpr = scores.type.layout
    return scores - alibi(layout, slope, offset, steps, query_start, key_start)


@gluon.jit
def _exponentials(
    scores, largest, total, unit, MAY_BE_EMPTY: gl.constexpr, IS_BOUNDED: gl.constexpr
):
    """Take one step of the online softmax; see ``_exponentials`` in forward.py.

    If ``IS_BOUNDED``, ``scores`` are probabilities, ``largest`` stays, and nothing decays.
    """
    if IS_BOUNDED:
        return scores, largest, total + gl.sum(scores, 1), largest
    else:
        larger = gl.maximum(largest, gl.max(scores, 1) * unit)
        shift = larger
        if MAY_BE_EMPTY:  # -inf - -inf would be NaN; a full run has no such row
            shift = gl.where(larger == float("-inf"), 0.0, larger)
        p = gl.exp2(scores * unit - gl.expand_dims(shift, 1))
        decay = gl.exp2(largest - shift)
        return p, larger, total * decay + gl.sum(p, 1), decay


@gluon.jit
def _as_operand(p, out_layout: gl.constexpr, dtype: gl.constexpr):
    """Round probabilities to the operand of the product with the values.

    The accumulator layout of the scores and the operand layout have the same elements in a thread:
    the conversion moves no registers between threads, and wgmma reads its first operand from there.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    return gl.convert_layout(p.to(dtype), layout)
