import random

import numpy as np
import pytest
from sparse_cases import NAMES, with_pattern

from benchmarks.cases import Case
from cqs.patterns import from_mask
from cqs.patterns.views import View
from cqs.scheduler import Step
from cqs.worker.triton.tiles import FAR_32, NO_BITS, key_launches, make_tile_list, query_launches
from cqs.worker.work import BlockRow, Work, make_work
from tests.worker.hopper import plan_work

TILE = 32


def visits(launches, shape, block, num_rows=None):
    """How often each pair is visited, as the kernels read the lists: the output rows first."""
    count = np.zeros((num_rows or shape[0], shape[1]), int)
    for launch in launches:
        row_step, column_step = launch.steps
        tile_list = make_tile_list(launch, TILE, block)
        for start, stop, row, first, banded_stop, last, num_full, _ in tile_list.tiles:
            assert 0 < stop - start <= TILE and first < last
            rows = np.arange(start, stop)[:, None]
            for number, run in enumerate(tile_list.runs[first:last], first):
                k0, k1, low, high, bits, residue = run[:6]
                assert k0 < k1
                assert number < banded_stop or ((k1 - k0) % block == 0 and bits == NO_BITS)
                columns = np.arange(k0, k1)
                distance = columns * column_step - rows * row_step
                live = (distance >= low) & (distance <= high)
                if bits != NO_BITS:
                    c = columns - k0
                    integers = launch.mask_bits[bits + 4 * rows + c // 2 % 4]
                    live &= integers >> (c // 8 * 2 + c % 2) & 1 == 1
                out = row + row_step * np.arange(stop - start)
                np.add.at(count, np.ix_(out, columns * column_step + residue), live)
            full = tile_list.runs[banded_stop:last]
            assert num_full == (full[:, 1] - full[:, 0]).sum() // block
    return count


def assert_visits(work, live, block):
    queries = np.concatenate([np.array(block_row.queries) for block_row in work.block_rows])
    packed = visits(query_launches(work, packed=True), live.shape, block, len(queries))
    total = np.zeros(live.shape, int)
    np.add.at(total, queries, packed)
    assert (total == live).all()
    assert (visits(query_launches(work, packed=False), live.shape, block) == live).all()
    assert (visits(key_launches(work), live.shape[::-1], block) == live.T).all()


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tasks", [1, 2, 7, 8])
@pytest.mark.parametrize("lengths", [(200, 200), (131, 300), (300, 131), (5, 5)], ids=str)
def test_every_pair_of_a_plan_is_visited_once(lengths, num_tasks, is_causal, block):
    live = np.ones(lengths, int)
    if is_causal:
        live = np.tril(live, lengths[1] - lengths[0])
    work = plan_work(*lengths, num_tasks=num_tasks, is_causal=is_causal, tile=16)
    assert_visits(work, live, block)
    for launches in (query_launches(work, packed=False), key_launches(work)):
        rows = [row for launch in launches for span in launch.spans for row in span.rows]
        assert len(rows) == len(set(rows))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("lengths", [(200, 200), (131, 211)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_a_pattern_is_visited_once(name, lengths, block):
    bound = with_pattern(Case("tiles", *lengths), name).pattern.bind(*lengths)
    rng = random.Random(0)
    cut = rng.randint(1, lengths[0] - 1), rng.randint(1, lengths[1] - 1)
    steps = [
        Step(0, queries, (keys,), None, bound.count(queries, keys))
        for queries in (range(cut[0]), range(cut[0], lengths[0]))
        for keys in (range(cut[1]), range(cut[1], lengths[1]))
    ]
    held = (range(lengths[0]),), (range(lengths[1]),)
    assert_visits(make_work(tuple(steps), bound, *held), bound.to_mask().astype(int), block)


@pytest.mark.parametrize("block", [16, 64])
def test_bits_are_visited_once(block):
    mask = np.random.default_rng(0).random((150, 300)) < 0.3
    assert_visits(plan_work(150, 300, pattern=from_mask(mask)), mask.astype(int), block)


@pytest.mark.parametrize("block", [1, 8, 128])
@pytest.mark.parametrize(("low", "high"), [(-7, 3), (-40, -20), (0, 0), (5, 90), (-FAR_32, -3)])
def test_bands_are_visited_once(low, high, block):
    view = View(range(3, 100), range(10, 95), low, high)
    distance = np.arange(95) - np.arange(100)[:, None]
    live = (distance >= low) & (distance <= high)
    live[:3] = live[:, :10] = False
    launches = query_launches(Work((BlockRow(range(100), (view,)),)), packed=False)
    assert (visits(launches, live.shape, block) == live).all()


def test_most_work_comes_first():
    view = View(range(0, 100), range(0, 100), high=0)
    (launch,) = query_launches(Work((BlockRow(range(100), (view,)),)), packed=False)
    starts = make_tile_list(launch, 10, 10).tiles[:, 0]
    assert list(starts) == list(range(90, -1, -10))


def test_long_tiles_have_three_consumers():
    launch = pytest.importorskip("cqs.worker.triton.launch", reason="without Triton")
    for num_tasks, expected in ((1, True), (31, False)):  # groups of 528 rows: tiles of 576
        work = plan_work(2**14, 2**14, num_tasks=num_tasks)
        assert launch._suits_three_consumers(work, 128, False) is expected
