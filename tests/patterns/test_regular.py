"""Masks that are regular become the pieces of the pattern that they show."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

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


@pytest.mark.slow
def test_random_masks_take_no_more_pieces_than_the_pattern():
    rng = random.Random(0)
    for _ in range(100):
        lengths = [rng.randrange(40, 300) for _ in range(2)]
        lengths = lengths if rng.random() < 0.5 else 2 * lengths[:1]
        one, other = (regular_pattern(rng, min(lengths)) for _ in range(2))
        named = rng.choice([one, one | other])
        if named.bind(*lengths).blocks is not None:  # steps without a common rule
            named = one
        mask = named.to_mask(*lengths)
        pattern = from_mask(mask)
        assert np.array_equal(pattern.to_mask(*lengths), mask), named
        assert num_pieces(pattern, *lengths) <= max(num_pieces(named, *lengths), 1), named
    for named in (strided(64), fixed(64, 8), sliding_window(30, 40)):
        assert {*from_mask(named.to_mask(300)).bind(300).pieces} == {*named.bind(300).pieces}


def test_rows_in_progression_are_pieces():
    for named in (documents([0, 100, 130, 300]), longformer(20, 3)):
        assert num_pieces(from_mask(named.to_mask(300)), 300) <= 5


def test_irregular_masks_stay_blocks():
    mask = np.random.default_rng(0).random((300, 300)) < 0.3
    one_wrong = strided(16).to_mask(300)
    one_wrong[200, 7] ^= True
    for each in (mask, one_wrong, sliding_window(40, 0).to_mask(300) & mask):
        assert np.array_equal(from_mask(each).to_mask(300), each)
    assert from_mask(mask).bind(300).pieces == ()


def test_masks_of_a_few_tokens_are_exact():
    rng = np.random.default_rng(0)
    masks = [np.array(bits).reshape(3, 3) for bits in product([False, True], repeat=9)]
    masks += [rng.random(rng.integers(1, 7, 2)) < rng.random() for _ in range(100)]
    for mask in masks:
        bound = from_mask(mask).bind(*mask.shape)
        assert np.array_equal(bound.to_mask(), mask)
        assert bound.num_pairs == mask.sum()


def test_block_masks_and_batches_are_searched_too():
    def strided_rule(batch, head, query, key):
        return (query >= key) & ((query - key < 16) | ((query - key) % 16 == 0))

    block_mask = create_block_mask(strided_rule, None, None, 300, 300, device="cpu")
    assert num_pieces(from_block_mask(block_mask), 300) == num_pieces(strided(16), 300)
    masks = np.stack([strided(16).to_mask(70), block_diagonal(9).to_mask(70)])[None]
    assert num_pieces(from_mask(torch.from_numpy(masks)).head(0, 1), 70) == 1
