"""Unions, intersections and differences of patterns of all families."""

import operator
import pickle
import random

import numpy as np
import pytest
from brute_force import assert_is, random_mask
from sparse_cases import random_pattern

from cqs.patterns import (
    acsr,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    longformer,
    sliding_window,
    strided,
)


def random_tree(rng, depth, seqlen_q, seqlen_kv, block):
    """A tree of random patterns, and its mask by numpy's operators."""
    step, generator = rng.choice([3, 3, 3, 1, 5]), np.random.default_rng(rng.randrange(2**32))
    if depth:
        (left, mask), (right, other) = (
            random_tree(rng, rng.randrange(depth), seqlen_q, seqlen_kv, block) for _ in range(2)
        )
        combine = rng.choice([operator.or_, operator.and_, operator.sub])
        if combine is operator.sub:
            return left - right, mask & ~other
        return combine(left, right), combine(mask, other)
    rows, columns = -(-seqlen_q // block), -(-seqlen_kv // block)
    others = [
        from_mask(random_mask(rng, seqlen_q, seqlen_kv, 2 * block)),
        block_sparse(generator.random((rows, columns)) < 0.5, block),
    ]
    if seqlen_q == seqlen_kv:
        cuts = sorted(rng.randint(0, seqlen_q) for _ in range(3))
        others.append(documents([0, *cuts, seqlen_q]))
    pattern = random_pattern(rng, min(seqlen_q, 30), step, others)
    return pattern, pattern.to_mask(seqlen_q, seqlen_kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "longest", "depth", "block"), [(500, 40, 3, 6), (30, 330, 1, 64)]
)
def test_random_trees_of_patterns_are_exact(number, longest, depth, block):
    rng = random.Random(1)
    for _ in range(number):
        lengths = rng.randint(0, longest), rng.randint(0, longest)
        shape = lengths if rng.random() < 0.5 else 2 * lengths[:1]
        pattern, mask = random_tree(rng, rng.randint(1, depth), *shape, block)
        assert_is(rng, pattern.bind(*shape), mask)


def test_combinations_of_a_billion_tokens_are_a_few_pieces():
    n = 10**9
    assert len(longformer(512, 64).bind(n).pieces) <= 6
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
    pattern = strided(3) | dilated(2, 2, 5)
    bound = pattern.bind(300)
    assert bound.blocks is not None
    assert (bound.to_mask() == strided(3).to_mask(300) | dilated(2, 2, 5).to_mask(300)).all()
    with pytest.raises(ValueError, match="at most"):
        pattern.bind(10**6)
