"""How the warps of a program on Hopper share out items: tiles of heads, taken one after another.

One warp takes an item, reads its fields ahead of time and publishes them; two groups of warps that
compute read them from shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

INDEX = gl.constexpr(14)
"""The field of an item, after those of its tile and its first run, that is its number."""
HEAD = gl.constexpr(15)
"""The field that is its head, counted through all batch elements."""

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a tile to shared memory; Triton has changed the name."""


@gluon.jit
def make_queue():
    """Allocate room for the item at work and the next."""
    item = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_free.index(i), count=2)
    return item, item_ready, item_free


@gluon.jit
def publish_item(queue, work, turn, index):
    """Tell the consumers the next item: its tile's fields, those of its first run, its index."""
    item, item_ready, item_free = queue
    tiles, runs, bits, num_tiles, num_long, num_items = work
    field = gl.arange(0, 16, gl.BlockedLayout([1], [32], [1], [0]))
    exists = index < num_items
    head, number = place_of(work, index)
    tile = tiles + number * 8
    values = gl.load(tile + field, mask=(field < 8) & exists, other=0)
    run = runs + gl.load(tile + 3, mask=exists, other=0) * 8 - 8
    in_run = (field >= 8) & (field < 14)
    values = gl.where(in_run, gl.load(run + field, mask=in_run & exists, other=0), values)
    values = gl.where(field == INDEX, index, values)
    values = gl.where(field == HEAD, head, values)
    mbarrier.wait(item_free.index(turn & 1), turn >> 1 & 1 ^ 1)
    item.index(turn & 1).store(values)
    mbarrier.arrive(item_ready.index(turn & 1), count=1)


@gluon.jit
def place_of(work, index):
    """Return head and tile of an item.

    Heads run one after another, for the cache, but the longest tiles of all heads come before: one
    that began last would be waited for alone.
    """
    tiles, runs, bits, num_tiles, num_long, num_items = work
    num_heads = num_items // num_tiles
    others = gl.maximum(num_tiles - num_long, 1)
    later = index - num_long * num_heads
    head = gl.where(later < 0, index % num_heads, later // others)
    tile = gl.where(later < 0, index // num_heads, num_long + later % others)
    return head, tile


@gluon.jit
def meet(begun, num_items, num_polls):
    """Begin an item when all programs do, or after so many looks.

    Programs that read the same keys at the same time find them in the cache; over long tiles they
    drift apart. They cannot wait for long: the device may not run all of them at once.

    Args:
        begun: int32 ``[1]``: items begun.
        num_items: As for the kernel.
        num_polls: How often to look, 0 to begin at once.
    """
    if num_polls > 0:
        number = gl.atomic_add(begun, 1) + 1
        round_stop = (number + gl.num_programs(0) - 1) // gl.num_programs(0) * gl.num_programs(0)
        wanted = gl.minimum(round_stop, num_items)
        while (number < wanted) & (num_polls > 0):
            number = gl.atomic_add(begun, 0)
            num_polls -= 1


@gluon.jit
def next_item(queue, turn):
    """Wait for the producer to name the next item."""
    item, item_ready, item_free = queue
    mbarrier.wait(item_ready.index(turn & 1), turn >> 1 & 1)
    values = item.index(turn & 1).load(gl.BlockedLayout([16], [32], [4], [0]))
    mbarrier.arrive(item_free.index(turn & 1), count=1)
    return values


@gluon.jit
def load_run(runs, run):
    """Return the first five fields of a run: start, stop, low, high, bits; see tiles.py."""
    fields = runs + run * 8
    band = gl.load(fields + 2), gl.load(fields + 3)
    return gl.load(fields), gl.load(fields + 1), band, gl.load(fields + 4)


@gluon.jit
def load_place(runs, run):
    """Return start, stop and residue of a run."""
    fields = runs + run * 8
    return gl.load(fields), gl.load(fields + 1), gl.load(fields + 5)


@gluon.jit
def item_field(values, number: gl.constexpr):
    """Return one number of an item."""
    field = gl.arange(0, 16, values.type.layout)
    return gl.sum(gl.where(field == number, values, 0), 0)
