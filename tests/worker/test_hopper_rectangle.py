"""The backward kernel of rectangles of scores on Hopper GPUs."""

from collections import Counter
from itertools import groupby

import pytest
import torch

from cqs.patterns import causal, dilated, documents, sliding_window, strided

pytest.importorskip("triton")

from triton import knobs

from cqs.worker.triton.hopper_rectangle import place_of_item
from cqs.worker.triton.rectangle_launch import Rectangle, rectangles_of
from cqs.worker.triton.statistics_launch import launch_row_statistics
from tests.worker.hopper import plan_work


def test_a_causal_query_that_sees_all_keys_is_a_dense_rectangle():
    work = plan_work(1, 700, is_causal=True)
    assert rectangles_of(work) == (Rectangle(range(1), range(700), is_causal=False),)


@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize(
    "pattern",
    [sliding_window(100, 100), sliding_window(100, 0), dilated(500, 500, 2), strided(16)],
    ids=str,
)
def test_patterns_are_no_rectangles(pattern, num_tasks):
    assert rectangles_of(plan_work(1000, 1000, pattern=pattern, num_tasks=num_tasks)) is None


@pytest.mark.parametrize(("number", "is_found"), [(3, True), (256, True), (257, False)])
def test_a_few_documents_are_rectangles(number, is_found):
    pattern = documents(range(0, 10 * number + 1, 10))
    rectangles = rectangles_of(plan_work(10 * number, 10 * number, pattern=pattern & causal()))
    assert (rectangles is not None) is is_found
    if is_found:
        assert [rectangle.is_causal for rectangle in rectangles] == [True] * number


@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1000), (1000, 300), (2, 700)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 7, 8, 13])
def test_rectangles_have_every_pair_once(lengths, is_causal, num_tasks):
    rectangles = rectangles_of(plan_work(*lengths, num_tasks=num_tasks, is_causal=is_causal))
    count = torch.zeros(lengths, dtype=torch.int64)
    for queries, keys, is_part_causal in rectangles:
        mask = torch.ones(len(queries), len(keys), dtype=torch.int64)
        mask = mask.tril(len(keys) - len(queries)) if is_part_causal else mask
        count[queries.start : queries.stop, keys.start : keys.stop] += mask
    expected = torch.ones(lengths, dtype=torch.int64)
    assert torch.equal(count, expected.tril(lengths[1] - lengths[0]) if is_causal else expected)
    groups = [rectangle.queries for rectangle in rectangles]
    assert len(list(groupby(groups))) == len(set(groups))  # a group is written at once
    assert num_tasks > 1 or len(rectangles) == 1


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
    items = []
    for index in range(heads * num_tiles):
        place = place_of_item.fn(index, sizes, is_causal)
        head, tile, first = (int(getattr(number, "value", number)) for number in place)
        blocks = [
            (head * group + member, block)
            for block in reversed(range(first, num_blocks))
            for member in range(group)
        ]
        items.append((tile, blocks))
    return items


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


@pytest.mark.skipif(not knobs.runtime.interpret, reason="requires Triton's interpreter")
def test_statistics_in_blocks_are_negative_and_padded():
    generator = torch.Generator().manual_seed(0)
    output, grad_output = (torch.randn(2, 3, 70, 16, generator=generator) for _ in range(2))
    lse = torch.randn(2, 3, 70, generator=generator)
    lse[0, 1, 2], lse[1, 2, 69] = -torch.inf, torch.inf
    in_rows = launch_row_statistics(grad_output, output, lse)
    in_blocks = launch_row_statistics(grad_output, output, lse, in_blocks_of=64)
    for rows, blocks, padding in zip(in_rows, in_blocks, (-torch.inf, 0.0), strict=True):
        assert blocks.shape == (6, 2, 64)
        padded = blocks.reshape(2, 3, 128)
        torch.testing.assert_close(padded[:, :, :70], -rows, rtol=0, atol=0, equal_nan=True)
        assert (padded[:, :, 70:] == padding).all()
