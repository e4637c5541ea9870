"""Unions, intersections and differences of symbolic patterns."""

import pickle
import random
from itertools import combinations_with_replacement

import numpy as np
import pytest
from brute_force import assert_is

from cqs.patterns import (
    acsr,
    bigbird,
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    global_tokens,
    longformer,
    sliding_window,
    strided,
)

PATTERNS = [
    causal(),
    sliding_window(4, 2),
    dilated(2, 3, 4),
    strided(4),
    fixed(4, 1),
    block_diagonal(4),
    global_tokens([1, 2, 9]),
    longformer(4, 1),
    documents([0, 6, 7, 26]),
]
SHAPES = [(0, 0), (1, 1), (26, 26), (13, 24), (24, 13), (0, 4), (5, 0)]


@pytest.mark.parametrize(
    ("left", "right"), list(combinations_with_replacement(PATTERNS, 2)), ids=repr
)
def test_patterns_of_one_step_combine_exactly(left, right):
    rng = random.Random(repr((left, right)))
    for shape in [each for each in SHAPES if left.suits(each) and right.suits(each)]:
        one, other = left.to_mask(*shape), right.to_mask(*shape)
        assert_is(rng, (left | right).bind(*shape), one | other)
        assert_is(rng, (left & right).bind(*shape), one & other)
        assert_is(rng, (left - right).bind(*shape), one & ~other)
        assert_is(rng, (right - left).bind(*shape), other & ~one)


def test_combinations_nest():
    rng = random.Random(0)
    pattern = (longformer(6, 2) - dilated(1, 1, 2)) & causal() | block_diagonal(2)
    for shape in SHAPES:
        expected = longformer(6, 2).to_mask(*shape) & ~dilated(1, 1, 2).to_mask(*shape)
        expected = expected & causal().to_mask(*shape)
        assert_is(rng, pattern.bind(*shape), expected | block_diagonal(2).to_mask(*shape))
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert eval(repr(pattern)) == pattern
    assert pattern.count(range(9), range(3, 9)) == pattern.to_mask(9)[:, 3:].sum()


def random_pattern(rng, depth, seqlen_q, seqlen_kv):
    """A tree of random patterns, and its mask by numpy's operators."""
    step, generator = rng.choice([3, 3, 3, 1, 5]), np.random.default_rng(rng.randrange(2**32))
    if depth:
        (left, mask), (right, other) = (
            random_pattern(rng, rng.randrange(depth), seqlen_q, seqlen_kv) for _ in range(2)
        )
        return rng.choice(
            [
                (left | right, mask | other),
                (left & right, mask & other),
                (left - right, mask & ~other),
            ]
        )
    bounds = [rng.choice([None, rng.randint(0, 9)]) for _ in range(2)]
    rows, columns = -(-seqlen_q // 6), -(-seqlen_kv // 6)
    packed = documents([0, *sorted(rng.randint(0, seqlen_q) for _ in range(3)), seqlen_q])
    pattern = rng.choice(
        [
            packed if seqlen_q == seqlen_kv else causal(),
            sliding_window(*bounds),
            dilated(rng.randint(0, 4), rng.randint(0, 4), step),
            strided(step),
            fixed(step, rng.randint(0, step)),
            block_diagonal(step),
            longformer(rng.randint(0, 9), rng.sample(range(30), rng.randint(0, 4))),
            bigbird(block=rng.randint(3, 5), random_blocks=rng.randint(0, 3), seed=step),
            from_mask(generator.random((seqlen_q, seqlen_kv)) < 0.4),
            block_sparse(generator.random((rows, columns)) < 0.5, 6),
        ]
    )
    return pattern, pattern.to_mask(seqlen_q, seqlen_kv)


@pytest.mark.slow
def test_random_trees_of_patterns_are_exact():
    rng = random.Random(1)
    for _ in range(500):
        lengths = rng.randint(0, 40), rng.randint(0, 40)
        shape = lengths if rng.random() < 0.5 else 2 * lengths[:1]
        pattern, mask = random_pattern(rng, rng.randint(1, 3), *shape)
        assert_is(rng, pattern.bind(*shape), mask)


def test_combinations_of_a_billion_tokens_are_a_few_pieces():
    n = 10**9
    bound = ((fixed(128, 16) | longformer(1000, 64)) & causal()).bind(n)
    assert len(bound.pieces) <= 30
    assert bound.count(range(n // 2), range(n)) + bound.count(range(n // 2, n), range(n)) == (
        bound.num_pairs
    )
    assert bound.num_pairs < causal().bind(n).num_pairs


def test_a_combination_has_the_lengths_that_suit_both_sides():
    rows, mask = acsr([0] * 3, [1] * 3, [2] * 3), from_mask(np.ones((3, 7), dtype=bool))
    for pattern in (rows | mask, mask | rows, (rows | causal()) & mask):
        assert pattern.default_lengths == (3, 7)
        assert pattern.allows(0, 0)


def test_deep_combinations_work_or_are_refused():
    pattern = causal()
    for _ in range(100):
        pattern = pattern | sliding_window(3, 3)
    assert pattern.bind(50).num_pairs == (causal() | sliding_window(3, 3)).bind(50).num_pairs
    assert eval(repr(pattern)) == pattern == pickle.loads(pickle.dumps(pattern))
    with pytest.raises(ValueError, match="at most 100 levels deep, got 101"):
        pattern | causal()


def test_lengths_are_bounded():
    n = 2**62
    assert causal().bind(n).num_pairs == n * (n + 1) // 2
    for shape in [(n + 1, 1), (1, n + 1)]:
        with pytest.raises(ValueError, match=f"must be at most {n}, got {n + 1}"):
            causal().bind(*shape)


def test_pairs_of_unequal_steps_are_in_blocks():
    for pattern in (strided(3) | dilated(2, 2, 5), fixed(4, 1) - dilated(9, 9, 5)):
        bound = pattern.bind(300)
        left, right = (each.to_mask(300) for each in (pattern.left, pattern.right))
        assert np.array_equal(
            bound.to_mask(), left | right if pattern.operator == "|" else left & ~right
        )
        assert bound.blocks is not None
    with pytest.raises(ValueError, match="at most"):
        pattern.bind(10**6)
