"""Masks that are regular become the pieces of the pattern that they show."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import cqs
from cqs.patterns import (
    block_diagonal,
    causal,
    dilated,
    documents,
    fixed,
    from_block_mask,
    from_mask,
    longformer,
    sliding_window,
    strided,
)


def regular_pattern(rng, length):
    bounds = [rng.choice([None, 0, rng.randrange(length)]) for _ in range(2)]
    stride = rng.randrange(2, length // 4)
    return rng.choice(
        [
            sliding_window(*bounds),
            dilated(rng.randint(1, 20), rng.randint(0, 20), rng.randint(2, 20)),
            strided(stride),
            fixed(stride, rng.randrange(stride)),
            block_diagonal(stride),
            block_diagonal(stride) & causal(),
        ]
    )


def num_pieces(pattern, *lengths):
    """Number of pieces of a pattern; its pairs are in no block."""
    bound = pattern.bind(*lengths)
    assert bound.blocks is None
    return len(bound.pieces)


@pytest.mark.parametrize("seed", range(300))
def test_random_masks_take_no_more_pieces_than_the_pattern(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(40, 300) for _ in range(2)]
    lengths = lengths if rng.random() < 0.5 else 2 * lengths[:1]
    one, other = (regular_pattern(rng, min(lengths)) for _ in range(2))
    named = rng.choice([one, one | other])
    if named.bind(*lengths).blocks is not None:  # steps without a common rule
        named = one
    mask = named.to_mask(*lengths)
    found = from_mask(mask)
    assert np.array_equal(found.to_mask(*lengths), mask)
    assert num_pieces(found, *lengths) <= max(num_pieces(named, *lengths), 1)


@pytest.mark.parametrize(
    "named",
    [
        sliding_window(100, 0),
        sliding_window(30, 40),
        dilated(8, 8, 3),
        strided(64),
        fixed(64, 8),
        block_diagonal(48),
        block_diagonal(48) & causal(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("lengths", [(517, 517), (300, 517), (517, 300)], ids=str)
def test_pieces_are_those_of_the_named_pattern(named, lengths):
    found = from_mask(named.to_mask(*lengths))
    assert set(found.bind(*lengths).pieces) == set(named.bind(*lengths).pieces)


def test_rows_in_progression_are_pieces():
    for named in (documents([0, 100, 130, 300]), longformer(20, 3)):
        assert num_pieces(from_mask(named.to_mask(300)), 300) <= 5


def test_irregular_masks_stay_blocks():
    rng = np.random.default_rng(0)
    mask = rng.random((300, 300)) < 0.3
    one_wrong = strided(16).to_mask(300)
    one_wrong[200, 7] ^= True
    scattered = sliding_window(40, 0).to_mask(300) & mask
    for each in (mask, one_wrong, scattered):
        bound = from_mask(each).bind(300)
        assert np.array_equal(bound.to_mask(), each)
    assert from_mask(mask).bind(300).pieces == ()


@pytest.mark.parametrize("seed", range(100))
def test_masks_of_a_few_tokens_are_exact(seed):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 7, 2)
    mask = rng.random(shape) < rng.random()
    assert np.array_equal(from_mask(mask).to_mask(*shape), mask)


def test_all_masks_of_three_tokens_are_exact():
    for bits in product([False, True], repeat=9):
        mask = np.array(bits).reshape(3, 3)
        bound = from_mask(mask).bind(3)
        assert np.array_equal(bound.to_mask(), mask)
        assert bound.num_pairs == mask.sum()


def test_block_masks_and_batches_are_searched_too():
    def strided_rule(batch, head, query, key):
        return (query >= key) & ((query - key < 16) | ((query - key) % 16 == 0))

    block_mask = create_block_mask(strided_rule, None, None, 300, 300, device="cpu")
    assert num_pieces(from_block_mask(block_mask), 300) == num_pieces(strided(16), 300)
    masks = np.stack([strided(16).to_mask(70), block_diagonal(9).to_mask(70)])[None]
    assert num_pieces(from_mask(masks).head(0, 1), 70) == 1


def test_a_regular_mask_has_the_output_of_the_pattern():
    query, key, value = (torch.randn(1, 2, 300, 16, dtype=torch.float64) for _ in range(3))
    for named in (strided(16), fixed(32, 4), block_diagonal(50) | sliding_window(9, 0)):
        mask = from_mask(torch.from_numpy(named.to_mask(300)))
        expected = cqs.attention(query, key, value, pattern=named, num_tasks=3)
        assert torch.allclose(cqs.attention(query, key, value, pattern=mask, num_tasks=3), expected)
