"""The queue of the persistent Hopper kernels: items, each a tile of one head.

A program has a producer warp, and two or three consumers of four warps each, which compute equal
parts of a tile's rows. The producer takes an item, loads its record ahead of time
and publishes it in shared memory, where the consumers read it.

Two mbarriers hand over each buffer in shared memory: ``ready`` (filled) and ``free`` (read by all).
A phase of an mbarrier completes with its last arrival and its last expected byte. Phases alternate
between parity 0 and 1; ``mbarrier.wait(barrier, parity)`` returns once the phase of that parity has
completed. For use number ``n`` of a buffer, from 0:

- a consumer waits on ``ready`` with parity ``n & 1``, for the phase that fills the buffer;
- the producer waits on ``free`` with the opposite parity, ``n & 1 ^ 1``, for the phase in which the
  consumers release use ``n - 1``. On a new barrier that wait returns at once, because the phase
  before the first counts as complete with parity 1: the first fill waits for nobody.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from cqs.worker.triton.fields import (
    RUN_BITS_START,
    RUN_COLUMN_START,
    RUN_COLUMN_STOP,
    RUN_FIELDS,
    RUN_HIGH,
    RUN_LOW,
    RUN_OFFSET,
    RUN_RESIDUE,
    TILE_FIELDS,
    TILE_RUN_START,
)

# An item's record: the fields of its tile, then the fields of the tile's first run. The index and
# the head take the place of the last two fields of the run: its offset is loaded from the run.
ITEM_RUN = TILE_FIELDS
"""First field of the first run's record."""
ITEM_INDEX = gl.constexpr(14)
"""Index of the item in the queue; at least ``num_items`` at the end of the queue."""
ITEM_HEAD = gl.constexpr(15)
"""Head of the item, counted through all batch elements."""
_ITEM_FIELDS = gl.constexpr(16)

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a tile to shared memory; the name depends on the version of Triton."""


@gluon.jit
def make_queue(CONSUMERS: gl.constexpr):
    """Allocate two item records, so that the producer publishes the next during the current one.

    Args:
        CONSUMERS: Number of consumers, each of which arrives once at a ``free`` barrier.
    """
    item = gl.allocate_shared_memory(
        gl.int32, [2, _ITEM_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_free.index(i), count=CONSUMERS)
    return item, item_ready, item_free


@gluon.jit
def publish_item(queue, work, turn, index):
    """Publish the record of an item to the consumers; an ``index`` beyond the last ends them.

    Args:
        queue: Return value of :func:`make_queue`.
        work: Tiles, runs, mask bits and the numbers of tiles, long tiles and items.
        turn: Number of items that this program has published before.
        index: Index of the item.
    """
    item, item_ready, item_free = queue
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    # The producer is one warp: each thread loads one field.
    field = gl.arange(0, _ITEM_FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    exists = index < num_items
    head, number = place_of(work, index)
    tile = tiles + number * TILE_FIELDS
    values = gl.load(tile + field, mask=(field < ITEM_RUN) & exists, other=0)
    run_start = gl.load(tile + TILE_RUN_START, mask=exists, other=0)
    run = runs + run_start * RUN_FIELDS - ITEM_RUN
    in_run = (field >= ITEM_RUN) & (field < ITEM_INDEX)
    values = gl.where(in_run, gl.load(run + field, mask=in_run & exists, other=0), values)
    values = gl.where(field == ITEM_INDEX, index, values)
    values = gl.where(field == ITEM_HEAD, head, values)
    # The loads come before the wait, so that their latency overlaps the consumers' work.
    mbarrier.wait(item_free.index(turn & 1), turn >> 1 & 1 ^ 1)
    item.index(turn & 1).store(values)
    mbarrier.arrive(item_ready.index(turn & 1), count=1)


@gluon.jit
def place_of(work, index):
    """Return the head and the tile of an item.

    The long tiles of all heads come first: one that started last would run alone at the end of the
    launch. The others are in the order of the heads, so that programs share a head's keys in the L2
    cache.
    """
    tiles, runs, mask_bits, num_tiles, num_long, num_items = work
    num_heads = num_items // num_tiles
    others = gl.maximum(num_tiles - num_long, 1)  # no division by 0 if all tiles are long
    later = index - num_long * num_heads
    head = gl.where(later < 0, index % num_heads, later // others)
    tile = gl.where(later < 0, index // num_heads, num_long + later % others)
    return head, tile


@gluon.jit
def wait_for_programs(started, num_items, num_polls):
    """Start an item when all programs do, or after ``num_polls`` polls of their number.

    Programs that read the same keys at the same time share them in the L2 cache, but over long
    tiles they drift apart until each reads from memory. On one H200 the wait takes a forward pass
    of 16 heads of 128 from 589 to 640 TFLOP/s at 128K tokens (benchmarks/journal/kernels.md).

    The wait is bounded because the device may not run all programs at once, for example if two
    launches share it: an unbounded one would deadlock.

    Args:
        started: int32 ``[1]``: number of items that have started in all programs.
        num_items: Number of items of the launch.
        num_polls: Maximum number of polls; 0 to start at once.
    """
    if num_polls > 0:
        number = gl.atomic_add(started, 1) + 1
        round_stop = (number + gl.num_programs(0) - 1) // gl.num_programs(0) * gl.num_programs(0)
        wanted = gl.minimum(round_stop, num_items)
        while (number < wanted) & (num_polls > 0):
            number = gl.atomic_add(started, 0)  # a plain load could be served from the L1 cache
            num_polls -= 1


@gluon.jit
def next_item(queue, turn):
    """Wait for the record of the next item and return it, int32 ``[16]``, in every thread."""
    item, item_ready, item_free = queue
    mbarrier.wait(item_ready.index(turn & 1), turn >> 1 & 1)
    # Every thread holds all 16 fields: item_field() then reduces within a thread, without shuffles.
    values = item.index(turn & 1).load(gl.BlockedLayout([16], [32], [4], [0]))
    mbarrier.arrive(item_free.index(turn & 1), count=1)
    return values


@gluon.jit
def load_run(runs, index):
    """Return start, stop, band (low and high end) and start of the mask bits of a run."""
    run = runs + index * RUN_FIELDS
    band = gl.load(run + RUN_LOW), gl.load(run + RUN_HIGH)
    start, stop = gl.load(run + RUN_COLUMN_START), gl.load(run + RUN_COLUMN_STOP)
    return start, stop, band, gl.load(run + RUN_BITS_START)


@gluon.jit
def load_place(runs, index):
    """Return start, stop and residue of a run, which are all that the producer reads."""
    run = runs + index * RUN_FIELDS
    start, stop = gl.load(run + RUN_COLUMN_START), gl.load(run + RUN_COLUMN_STOP)
    return start, stop, gl.load(run + RUN_RESIDUE)


@gluon.jit
def load_offset(runs, index):
    """Return the offset of a run, see ``RUN_OFFSET``."""
    return gl.load(runs + index * RUN_FIELDS + RUN_OFFSET)


@gluon.jit
def item_field(item, number: gl.constexpr):
    """Return one field of an item's record."""
    # Gluon has no indexing of tensors in registers; the compiler folds the sum to one register.
    field = gl.arange(0, _ITEM_FIELDS, item.type.layout)
    return gl.sum(gl.where(field == number, item, 0), 0)
