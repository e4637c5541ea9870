"""Patterns made from arrays, and how they combine with others."""

import pickle
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from brute_force import assert_is, random_mask
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import cqs
from cqs.patterns import (
    acsr,
    block_sparse,
    causal,
    from_block_mask,
    from_deepspeed,
    from_mask,
    per_head,
    strided,
)

LENGTHS = [0, 1, 127, 128, 129, 300, 385]


def test_masks_are_counted_and_visited_exactly():
    rng = random.Random(0)
    for seqlen_q, seqlen_kv in product(LENGTHS, LENGTHS):
        mask = random_mask(rng, seqlen_q, seqlen_kv)
        assert_is(rng, from_mask(mask).bind(seqlen_q, seqlen_kv), mask)


@pytest.mark.parametrize("block", [1, 16, 48, 64, 128, 256, 300])
def test_block_layouts_are_what_they_mark(block):
    rng = random.Random(block)
    generator = np.random.default_rng(block)
    for _ in range(6):
        seqlen_q, seqlen_kv = rng.randint(1, 400), rng.randint(1, 400)
        rows, columns = -(-seqlen_q // block), -(-seqlen_kv // block)
        layout = generator.random((rows, columns)) < 0.5
        mask = layout.repeat(block, axis=0).repeat(block, axis=1)[:seqlen_q, :seqlen_kv]
        assert_is(rng, block_sparse(layout, block).bind(seqlen_q, seqlen_kv), mask)


@pytest.mark.slow
def test_large_blocks_are_cut_without_an_array_of_their_size():
    layout = block_sparse(np.ones((7, 7)), 2500)
    blocks = (layout & causal()).bind(16384).blocks
    assert len(blocks.bits) == 128
    assert blocks == (block_sparse(np.ones((128, 128)), 128) & causal()).bind(16384).blocks


def test_masks_are_values():
    mask = random_mask(random.Random(3), 200, 200)
    other = mask.copy()
    other[0, 0] ^= True
    for make, length in ((from_mask, 200), (lambda each: block_sparse(each, 3), 600)):
        pattern = make(mask)
        again = pickle.loads(pickle.dumps(pattern))
        assert again == pattern == make(mask.copy()) and hash(again) == hash(pattern)
        assert pattern != make(other)
        assert repr(again) == repr(pattern) != repr(make(other))
        assert make(torch.from_numpy(mask)) == pattern
        blocks = again.bind(length).blocks
        for array in (blocks.ids, blocks.bit_index, blocks.bits, blocks.counts):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    layout = torch.tensor([[1, 0], [0.5, 1]])
    assert block_sparse(layout.bfloat16(), 4) == block_sparse(layout, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [-1e4, "least", -torch.inf])
def test_a_mask_that_is_added_to_the_scores_is_a_mask(dtype, least):
    visible = torch.from_numpy(random_mask(random.Random(9), 150, 140))
    addend = torch.zeros(150, 140, dtype=dtype)
    addend[~visible] = torch.finfo(dtype).min if least == "least" else least
    assert from_mask(addend) == from_mask(addend[None, None]) == from_mask(visible)


def test_masks_count_query_indices_without_lengths():
    mask = random_mask(random.Random(4), 150, 200)
    pattern = from_mask(mask)
    assert pattern.count(range(10, 150), range(0, 77)) == mask[10:150, :77].sum()
    assert pattern.allows(3, 150) is bool(mask[3, 150])
    assert repr(pattern).startswith("from_mask(<150 x 200, ")


def test_a_mask_per_head_is_a_pattern_per_head():
    masks = np.random.default_rng(5).random((2, 3, 20, 20)) < 0.5
    pattern = from_mask(masks)
    assert pattern.heads == (2, 3)
    assert (pattern.to_mask(20) == masks).all()
    assert pattern.head(1, 2) == from_mask(masks[1, 2])
    both = pattern & causal()
    assert both.heads == (2, 3)
    assert (both.to_mask(20) == masks & np.tri(20, dtype=bool)).all()
    assert ((causal() - pattern).to_mask(20) == np.tri(20, dtype=bool) & ~masks).all()
    with pytest.raises(ValueError, match=r"differs by head: .*\.head\(batch, head\)"):
        pattern.bind(20)


def test_heads_broadcast_or_are_refused():
    layout = np.random.default_rng(6).random((3, 2, 2)) < 0.5
    by_head = block_sparse(layout, 4)
    by_batch = per_head([[causal()], [strided(2)]])
    both = by_head | by_batch
    assert (by_head.heads, by_batch.heads, both.heads) == ((1, 3), (2, 1), (2, 3))
    assert by_head.head(7, 1) == block_sparse(layout[1], 4)
    assert both.head(1, 2) == by_head.head(0, 2) | strided(2)
    with pytest.raises(ValueError, match=r"heads of .* got \(1, 3\) and \(1, 2\)"):
        by_head | per_head([[causal(), strided(2)]])
    assert per_head([[causal()]]) == causal()
    assert pickle.loads(pickle.dumps(by_head)) == by_head
    assert len({repr(each) for each in (by_head, both, per_head([[causal()] * 3]))}) == 3


MASK_MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "window-of-head": lambda b, h, q, k: (q >= k) & (q - k <= 40 * (h + 1)),
    "everything": lambda b, h, q, k: q >= 0,
}


@pytest.mark.parametrize("block", [128, (64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("name", MASK_MODS)
def test_a_block_mask_of_flex_attention_is_read(name, block):
    rule = MASK_MODS[name]
    seqlen_q, seqlen_kv = 200, 330
    block_mask = create_block_mask(rule, 1, 2, seqlen_q, seqlen_kv, "cpu", BLOCK_SIZE=block)
    pattern = from_block_mask(block_mask)
    assert pattern.heads == (1, 2)
    queries, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)
    for head in range(2):
        expected = rule(0, head, queries, keys).broadcast_to(seqlen_q, seqlen_kv).numpy()
        assert_is(random.Random(7), pattern.head(0, head).bind(seqlen_q, seqlen_kv), expected)


INDICES = {
    "row": (slice(None), slice(None), torch.tensor(2)),
    "batch element": (torch.tensor(1),),
    "head": (slice(None), torch.tensor(0)),
    "row of a batch element": (torch.tensor(1), slice(None), torch.tensor(2)),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_block_mask_may_be_indexed_by_scalar_tensors(name):
    block_mask = create_block_mask(MASK_MODS["causal"], 2, 3, 128, 128, "cpu", BLOCK_SIZE=32)
    of_index = block_mask[INDICES[name]]
    first, length = (70, 1) if "row" in name else (0, 128)
    of_index.mask_mod = lambda b, h, q, k: q + first >= k
    of_index.seq_lengths = length, 128
    expected = (first + np.arange(length)[:, None]) >= np.arange(128)
    pattern = from_block_mask(of_index)
    assert (pattern.head(0, 0).to_mask(length, 128) == expected).all()


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        (torch.tensor(0), "window-of-head"),  # of heads or of batch elements
        ((slice(None), slice(None), torch.tensor(1)), "causal"),  # more rows
        ((slice(None), slice(None), 1), "causal"),
    ],
)
def test_block_masks_without_clear_dimensions_are_refused(index, rule):
    rule = MASK_MODS[rule]
    block_mask = create_block_mask(rule, 2, 3, 128, 128, "cpu", BLOCK_SIZE=32)[index]
    block_mask.mask_mod, block_mask.seq_lengths = rule, (128, 128)
    with pytest.raises(ValueError, match=r"block_mask must have blocks \[batch, heads, rows\]"):
        from_block_mask(block_mask)
    if isinstance(index, torch.Tensor):
        tensors = torch.randn(3, 1, 3, 128, 16).unbind()  # whose heads are three
        output = cqs.flex_attention(*tensors, block_mask=block_mask)
        expected = cqs.attention(*tensors, create_mask(rule, 1, 3, 128, 128, "cpu"))
        torch.testing.assert_close(output, expected)


def test_a_mask_function_may_read_tensors_and_reduce():
    document = torch.arange(140) // 50
    tags = torch.rand(140, 4) < 0.3
    starts = torch.tensor([0, 20, 90])
    rules = {
        "reads": lambda b, h, q, k: document[q] == document[k],
        "reduces": lambda b, h, q, k: (tags[q] & tags[k]).any(),
        "indexes": lambda b, h, q, k: torch.stack([q, k])[0] + starts[0] >= k,
        "compares": lambda b, h, q, k: ((q >= starts) & (k < starts)).any(),
    }
    for name, rule in rules.items():
        block_mask = create_block_mask(rule, 1, 1, 140, 140, "cpu", BLOCK_SIZE=32)
        mask = from_block_mask(block_mask).to_mask(140)
        assert (mask == create_mask(rule, 1, 1, 140, 140, "cpu")[0, 0].numpy()).all(), name


LAYOUTS = torch.randint(2, (3, 24, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("block", "layouts", "heads"), [(16, LAYOUTS, 3), (24, LAYOUTS[:1].expand(2, -1, -1), 1)]
)
def test_live_pairs_are_those_of_the_layout_of_deepspeed(block, layouts, heads):
    length, layout = 24 * block, layouts.bool().numpy()
    config = SimpleNamespace(block=block, make_layout={length: layouts}.__getitem__)
    pattern = from_deepspeed(config, length)
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert pattern == block_sparse(layout[:heads], block) and pattern.heads == (1, heads)
    for head, mask in enumerate(layout.repeat(block, axis=1).repeat(block, axis=2)):
        assert_is(random.Random(0), pattern.head(0, head).bind(length), mask)
    with pytest.raises(ValueError, match="requires lengths"):
        pattern.head(0, 0).bind(length + 128)


SQUARE = np.ones((4, 4), dtype=bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_mask(1.0 * SQUARE), r"mask must be .*, got 1\.0"),
        (lambda: from_mask(SQUARE.astype(int)), "mask must be .*, got int64"),
        (lambda: from_mask(np.full((4, 4), np.nan)), "mask must be .*, got nan"),
        (lambda: from_mask(torch.tensor([[0, -9000.0]])), r"mask must be .*, got -9000\.0"),
        (lambda: from_mask(SQUARE[None].repeat(2, 0)), r"mask must be .* got \[2, 4, 4\]"),
        (lambda: from_mask(SQUARE).bind(5), r"requires lengths \(4, 4\), got \(5,"),
        (lambda: from_mask(torch.ones(2, 2, dtype=torch.bfloat16)), r"mask must be .*, got 1\.0"),
        (lambda: block_sparse([1, 0], 4), r"layout must be .* got \[2\]"),
        (lambda: block_sparse([[1]], 0), "block must be at least 1, got 0"),
        (lambda: block_sparse([[1]], 4).bind(5), r"requires lengths \(4, 4\), got \(5, 5\)"),
        (lambda: acsr([0], [0], [1]), "step must be at least 1, got 0"),
        (lambda: acsr([-1], [1], [1]), "start must be at least 0, got -1"),
        (lambda: acsr([0], [1], [0.5]), "count must be a row of integers"),
        (lambda: acsr(np.array([2**63], np.uint64), [1], [1]), "keys must lie below"),
        (lambda: acsr([2**62], [2**62], [3]), "keys must lie below 4611686018427387904, got"),
        (lambda: acsr([0, 1], [1], [1]), r"must be of one length, got \[2, 1, 1\]"),
        (lambda: acsr([0], [1], [4]).bind(1, 3), r"requires lengths \(1, 4\), got \(1, 3\)"),
        (lambda: acsr([0], [1], [4]).bind(2, 4), r"requires lengths \(1, 4\), got \(2, 4\)"),
        (lambda: from_deepspeed(3, 128), "config must be a SparsityConfig of DeepSpeed, got 3"),
        (lambda: from_block_mask(3), "block_mask must be a BlockMask of FlexAttention, got 3"),
        (lambda: per_head([[]]), "patterns must be rows of one length"),
        (lambda: per_head([[1, 2]]), "patterns must be rows of patterns of one head, got 1"),
        (lambda: per_head([causal()]), "patterns must be rows of patterns of one head, got \\("),
        (lambda: per_head([[per_head([[causal(), strided(2)]])]]), "got <1 x 2 patterns"),
        (lambda: causal() | 3, "unsupported operand"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
