"""BigBird: its definition, and its random blocks."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from brute_force import assert_is, mask_of

from cqs.patterns import bigbird, causal


def regular_part(pattern, *shape):
    """The mask without the random blocks."""
    size, side, first = pattern.block, pattern.window_blocks // 2, pattern.global_blocks

    def rule(p, j):
        row, column = p // size, j // size
        near = pattern.window_blocks > 0 and abs(row - column) <= side
        return near or column < first or 0 <= row < first

    return mask_of(rule, *shape)


PATTERNS = [
    bigbird(block=4, window_blocks=3, global_blocks=1, random_blocks=2, seed=1),
    bigbird(block=5, window_blocks=1, global_blocks=2, random_blocks=3, seed=2),
    bigbird(block=3, window_blocks=0, global_blocks=0, random_blocks=1, seed=3),
    bigbird(block=8, window_blocks=5, global_blocks=0, random_blocks=0),
    bigbird(block=1, window_blocks=3, global_blocks=1, random_blocks=40),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_random_blocks_are_other_blocks_and_all_different(pattern):
    rng = random.Random(0)
    for shape in [(0, 0), (1, 1), (64, 64), (61, 61), (30, 57), (57, 30), (0, 3), (3, 0)]:
        mask = pattern.to_mask(*shape)
        assert_is(rng, pattern.bind(*shape), mask)
        regular = regular_part(pattern, *shape)
        assert (mask >= regular).all()
        extra, shift, size = mask & ~regular, shape[1] - shape[0], pattern.block
        for row in {(i + shift) // size for i in range(shape[0])}:
            queries = [i for i in range(shape[0]) if (i + shift) // size == row]
            assert (extra[queries] == extra[queries[0]]).all()
            columns = {j // size for j in np.flatnonzero(extra[queries[0]])}
            left = {j // size for j in np.flatnonzero(~regular[queries[0]])}
            few = min(pattern.random_blocks, len(left)) if row >= pattern.global_blocks else 0
            assert columns <= left and len(columns) == (few if row >= 0 else 0)


def random_columns(pattern, length):
    """The columns of the random blocks of every row."""
    extra = pattern.to_mask(length) & ~replace(pattern, random_blocks=0).to_mask(length)
    return [np.flatnonzero(row).tolist() for row in extra[:: pattern.block, :: pattern.block]]


def test_random_blocks_are_the_same_on_every_machine():
    columns = random_columns(bigbird(block=64, window_blocks=3, random_blocks=3, seed=7), 1024)
    assert columns[1:6] == [[6, 12, 15], [8, 9, 11], [8, 11, 14], [2, 6, 11], [2, 11, 15]]


def test_random_blocks_are_spread_evenly():
    columns = random_columns(bigbird(block=2, window_blocks=3, random_blocks=3), 2 * 512)
    drawn = np.bincount(sum(columns, []), minlength=512)
    assert drawn.sum() == 3 * 511 and drawn[1:].max() <= 14
    other = random_columns(bigbird(block=2, window_blocks=3, random_blocks=3, seed=1), 2 * 512)
    assert sum(len({*row} & {*found}) for row, found in zip(columns, other, strict=True)) < 40


def test_bigbird_is_a_value_that_depends_on_the_length():
    pattern = bigbird(block=4, seed=3)
    assert eval(repr(pattern)) == pattern == pickle.loads(pickle.dumps(pattern))
    with pytest.raises(ValueError, match="depends on the lengths: bind it"):
        pattern.count(range(4), range(4))
    with pytest.raises(ValueError, match="depends on the lengths: bind it"):
        (pattern & causal()).allows(1, 1)


def test_a_million_tokens_are_one_piece_per_random_block():
    bound = bigbird(block=128, window_blocks=3, global_blocks=2, random_blocks=3).bind(2**20)
    assert len(bound.pieces) <= 12 + 3 * (2**13 - 2) and bound.blocks is None
    regular = bigbird(block=128, window_blocks=3, global_blocks=2, random_blocks=0).bind(2**20)
    assert bound.num_pairs - regular.num_pairs == 3 * (2**13 - 2) * 128**2


def test_no_more_blocks_are_drawn_than_there_are():
    for length in (64, 1000):
        assert bigbird(block=16, random_blocks=10**8).bind(length).density == 1
    assert bigbird(random_blocks=10**8).bind(0).num_pairs == 0


def test_large_blocks_combine_as_pieces():
    pattern = bigbird(block=8192, window_blocks=0, global_blocks=0, random_blocks=2) & causal()
    assert len(pattern.bind(65536).pieces) <= 16
