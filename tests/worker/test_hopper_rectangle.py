"""The backward kernel of rectangles of scores on Hopper GPUs."""

import random
from collections import Counter
from itertools import groupby

import pytest
import torch

from cqs.patterns import causal, dilated, documents, sliding_window, strided
from cqs.worker.operands import TaskOperands

pytest.importorskip("triton")

from triton import knobs

from cqs.worker.triton import rectangle_launch
from cqs.worker.triton.hopper_rectangle import place_of_item
from cqs.worker.triton.rectangle_launch import Rectangle, rectangles_of
from cqs.worker.triton.statistics_launch import launch_row_statistics
from tests.worker.hopper import BF16, plan_work

LENGTHS = pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1000), (1000, 300), (2, 700)])


@LENGTHS
@pytest.mark.parametrize(
    ("options", "is_causal"),
    [({}, False), ({"is_causal": True}, True), ({"pattern": causal()}, True)],
    ids=["full", "causal", "pattern"],
)
def test_plans_of_one_task_are_one_rectangle(lengths, options, is_causal):
    (rectangle,) = rectangles_of(plan_work(*lengths, **options))
    assert rectangle.keys == range(lengths[1])
    assert rectangle.queries.stop == lengths[0]
    assert rectangle.is_causal is is_causal


def test_a_causal_query_that_sees_all_keys_is_a_dense_rectangle():
    work = plan_work(1, 700, is_causal=True)
    assert rectangles_of(work) == (Rectangle(range(1), range(700), is_causal=False),)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": sliding_window(100, 100)},
        {"pattern": sliding_window(100, 0)},
        {"pattern": dilated(500, 500, 2)},
        {"pattern": strided(16)},
        {"pattern": sliding_window(100, 0), "num_tasks": 3},
    ],
    ids=str,
)
def test_patterns_are_no_rectangles(options):
    assert rectangles_of(plan_work(1000, 1000, **options)) is None


@pytest.mark.parametrize(("number", "is_found"), [(3, True), (256, True), (257, False)])
def test_a_few_documents_are_rectangles(number, is_found):
    pattern = documents(range(0, 10 * number + 1, 10))
    found = rectangles_of(plan_work(10 * number, 10 * number, pattern=pattern & causal()))
    assert (found is not None) is is_found
    if is_found:
        assert [rectangle.is_causal for rectangle in found] == [True] * number


def mask_of(rectangle):
    """Return the live pairs of a rectangle, bool ``[queries, keys]``."""
    queries, keys, is_causal = rectangle
    mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
    return mask.tril(len(keys) - len(queries)) if is_causal else mask


@LENGTHS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tasks", [2, 3, 7, 8, 13])
def test_rectangles_of_several_tasks_have_every_pair_once(lengths, is_causal, num_tasks):
    rectangles = rectangles_of(plan_work(*lengths, num_tasks=num_tasks, is_causal=is_causal))
    count = torch.zeros(lengths, dtype=torch.int64)
    for rectangle in rectangles:
        queries, keys, _ = rectangle
        count[queries.start : queries.stop, keys.start : keys.stop] += mask_of(rectangle)
    expected = torch.ones(lengths, dtype=torch.int64)
    assert torch.equal(count, expected.tril(lengths[1] - lengths[0]) if is_causal else expected)
    groups = [rectangle.queries for rectangle in rectangles]
    assert len(list(groupby(groups))) == len(set(groups))  # a group is written at once


@LENGTHS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_number_of_pairs_decides_within_rounding(lengths, is_causal):
    rectangle = Rectangle(*map(range, lengths), is_causal)
    assert abs(rectangle.num_pairs - mask_of(rectangle).sum()) <= sum(lengths)


ORDERS = [
    (lengths, heads, group, together, is_causal)
    for lengths in ((1, 1), (500, 500), (1000, 1152), (1152, 1000), (70, 900), (900, 70))
    for heads, group, together in ((1, 1, 1), (3, 1, 3), (3, 1, 2), (2, 4, 2), (5, 2, 4))
    for is_causal in (False, True)
]


def list_items(lengths, heads, group, together, is_causal):
    """Return the tile and the visited blocks of all items, in the order of the queue."""
    seqlen_q, seqlen_kv = lengths
    num_tiles, num_blocks = -(-seqlen_kv // 128), -(-seqlen_q // 64)
    sizes = heads, num_tiles, num_blocks, seqlen_kv, group, together, seqlen_kv - seqlen_q
    found = []
    for index in range(heads * num_tiles):
        place = place_of_item.fn(index, sizes, is_causal)
        head, tile, first = (int(getattr(each, "value", each)) for each in place)
        blocks = [
            (head * group + member, block)
            for block in reversed(range(first, num_blocks))
            for member in range(group)
        ]
        found.append((tile, blocks))
    return found


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_visit_waits_only_for_items_before_it(order):
    (seqlen_q, seqlen_kv), heads, group, _, is_causal = order
    turns = Counter()
    for tile, blocks in list_items(*order):
        assert blocks
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert turns[block] == tile
            turns[block] += 1
    for head in range(heads * group):
        for row in range(seqlen_q):
            seen = min(row + seqlen_kv - seqlen_q + 1, seqlen_kv) if is_causal else seqlen_kv
            assert turns[head, row // 64] >= -(-seen // 128)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 1000])
@pytest.mark.parametrize("order", ORDERS[::7], ids=str)
def test_any_number_of_programs_finishes(order, num_programs):
    queue, turns, running = list_items(*order)[::-1], Counter(), []
    while queue or running:
        running += [queue.pop() for _ in range(min(num_programs - len(running), len(queue)))]
        random.Random(len(queue)).shuffle(running)
        before = turns.total()
        for tile, blocks in running:
            while blocks and turns[blocks[0]] == tile:
                turns[blocks.pop(0)] += 1
        assert turns.total() > before  # some program has made progress
        running = [item for item in running if item[1]]


@pytest.mark.skipif(not knobs.runtime.interpret, reason="requires Triton's interpreter")
def test_statistics_in_blocks_are_negative_and_padded():
    generator = torch.Generator().manual_seed(0)
    output, grad_output = (torch.randn(2, 3, 70, 16, generator=generator) for _ in range(2))
    lse = torch.randn(2, 3, 70, generator=generator)
    lse[0, 1, 2], lse[1, 2, 69] = -torch.inf, torch.inf
    of_rows = launch_row_statistics(grad_output, output, lse)
    of_blocks = launch_row_statistics(grad_output, output, lse, in_blocks_of=64)
    for rows, blocks, padding in zip(of_rows, of_blocks, (-torch.inf, 0.0), strict=True):
        assert blocks.shape == (6, 2, 64)
        found = blocks.reshape(2, 3, 128)
        torch.testing.assert_close(found[:, :, :70], -rows, rtol=0, atol=0, equal_nan=True)
        assert (found[:, :, 70:] == padding).all()


@pytest.mark.parametrize(
    ("tokens", "heads", "options", "is_used"),
    [
        (8192, 4, {}, True),
        (4096, 4, {}, False),
        (8192, 4, {"is_causal": True}, True),
        (16_384, 1, {}, False),
        (16_384, 1, {"is_causal": True}, True),
        (32_768, 1, {}, True),
        (32_768, 16, {"num_tasks": 3}, True),
        (4096, 16, {"num_tasks": 3}, False),
    ],
    ids=str,
)
def test_the_kernel_is_used_for_large_rectangles(tokens, heads, options, is_used):
    query = torch.empty(1, heads, tokens, 128, device="meta", dtype=BF16)
    operands = TaskOperands(query, query, query, plan_work(tokens, tokens, **options), 0.1)
    assert rectangle_launch.takes_rectangle_kernel(operands) is is_used
