"""Patterns of positions, each against its definition."""

import pickle
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from brute_force import assert_is, mask_of

import cqs
from cqs.patterns import (
    BoundPattern,
    bigbird,
    block_diagonal,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    global_tokens,
    longformer,
    padded,
    per_head,
    sliding_window,
    strided,
)
from cqs.patterns.bound_documents import BoundDocuments


def rule_of_globals(tokens, side=-1):
    return lambda p, j: p in tokens or j in tokens or abs(p - j) <= side


def rule_of_fixed(p, j):
    return j <= p if j // 4 == p // 4 else j < p and j % 4 >= 3


RULES = {
    causal(): lambda p, j: j <= p,
    sliding_window(4, 2): lambda p, j: -4 <= j - p <= 2,
    dilated(2, 3, 4): lambda p, j: -8 <= j - p <= 12 and (j - p) % 4 == 0,
    strided(4): lambda p, j: 0 <= p - j < 4 or j < p and (p - j) % 4 == 0,
    fixed(4, 1): rule_of_fixed,
    block_diagonal(4): lambda p, j: j // 4 == p // 4,
    global_tokens([]): lambda p, j: False,
    global_tokens(3): rule_of_globals({0, 1, 2}),
    global_tokens(range(4, 9)): rule_of_globals(set(range(4, 9))),
    global_tokens([7, 2, 3, 40]): rule_of_globals({2, 3, 7, 40}),
    longformer(6, 2): rule_of_globals({0, 1}, 3),
    longformer(3, [5, 11]): rule_of_globals({5, 11}, 1),
    documents([0]): lambda p, j: False,
}
every_pattern = pytest.mark.parametrize("pattern", RULES, ids=repr)


@every_pattern
def test_patterns_are_what_their_definition_says(pattern):
    rng = random.Random(repr(pattern))
    shapes = [(0, 0), (0, 3), (3, 0), (1, 1), (25, 25), (9, 23), (23, 9)]
    shapes += [(rng.randint(0, 30), rng.randint(0, 30)) for _ in range(12)]
    for shape in shapes:
        shape = shape if pattern.suits(shape) else pattern.default_lengths
        assert_is(rng, pattern.bind(*shape), mask_of(RULES[pattern], *shape))


@every_pattern
def test_patterns_are_values_that_print_as_their_call(pattern):
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert eval(repr(pattern)) == pattern


def test_arrays_and_numbers_name_the_same_tokens():
    assert global_tokens(np.array([1, 0])) == global_tokens(2) == global_tokens(range(2))
    assert global_tokens(np.int64(2)) == global_tokens(2)
    assert padded(np.array([4, 0]), torch.tensor([5, 1])) == padded([4, 0], (5, 1))
    assert padded([3, 3]) == padded([3, 3], [3, 3])
    one = padded([4], [5]) & causal()
    assert eval(repr(one)) == one and eval(repr(one - causal())) == one - causal()
    assert documents(np.array([0, 3, 9], dtype=np.int32)) == documents([0, 3, 9])


def test_a_padded_batch_must_fit():
    q = torch.randn(3, 1, 5, 4)
    with pytest.raises(ValueError, match="batch must be 2 with pattern"):
        cqs.attention(q, q, q, pattern=padded([1, 2]))
    with pytest.raises(ValueError, match="batch must be 0 with pattern <0 x 1 patterns, of an emp"):
        cqs.attention(q, q, q, pattern=padded([]) & causal())
    assert cqs.attention(q[:0], q[:0], q[:0], pattern=padded([]) & causal()).shape == (0, 1, 5, 4)
    with pytest.raises(ValueError, match=r"requires lengths \(6, 6\), got \(5, 5\)"):
        cqs.attention(q, q, q, pattern=padded([1, 6, 2]))


def mask_of_documents(ends, ends_kv, shape, is_causal):
    """FlashAttention's rule: each document is a problem of its own, aligned at the bottom right."""
    mask = np.zeros(shape, dtype=bool)
    for q, k in zip(pairwise(ends), pairwise(ends_kv), strict=True):
        lengths = q[1] - q[0], k[1] - k[0]
        whole = np.ones(lengths, dtype=bool)
        part = np.tril(whole, lengths[1] - lengths[0]) if is_causal else whole
        mask[slice(*q), slice(*k)] = part
    return mask


@pytest.mark.parametrize("is_causal", [False, True])
def test_documents_of_unequal_lengths_are_problems_of_their_own(is_causal):
    rng = random.Random(5)
    for _ in range(40):
        sides = [[0, *sorted(rng.randint(0, 25) for _ in range(4))] for _ in range(2)]
        shape = tuple(ends[-1] for ends in sides)
        mask = mask_of_documents(*sides, shape, is_causal)
        pattern = documents(*sides, is_causal=is_causal)
        assert_is(rng, pattern.bind(*shape), mask)
        alike = documents(sides[0], is_causal=is_causal).to_mask(shape[0])
        assert (alike == mask_of_documents(*2 * sides[:1], 2 * shape[:1], is_causal)).all()
        assert eval(repr(pattern)) == pickle.loads(pickle.dumps(pattern)) == pattern
        causal_mask = mask_of_documents(*sides, shape, True)
        for each in (pattern & causal(), causal() & pattern, per_head([[pattern] * 2]) & causal()):
            assert (each.head(0, 0).to_mask(*shape) == causal_mask).all()
        kept = rng.choices([False, True], k=shape[1]) * np.ones(shape, dtype=bool)
        assert_is(rng, (pattern & from_mask(kept)).bind(*shape), mask & kept)


@pytest.mark.parametrize("is_causal", [False, True])
def test_elements_of_a_padded_batch_are_problems_of_their_own(is_causal):
    lengths, lengths_kv = [9, 4, 0, 4], [12, 0, 3, 7]
    pattern = padded(lengths, lengths_kv)
    pattern = pattern & causal() if is_causal else pattern
    for element, ends in enumerate(zip(lengths, lengths_kv, strict=True)):
        mask = mask_of_documents(*([0, end] for end in ends), (9, 12), is_causal)
        assert_is(random.Random(0), pattern.head(element, 0).bind(9, 12), mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_counts_of_documents_are_those_of_their_pieces(is_causal):
    rng = random.Random(7)
    for _ in range(60):
        number = rng.randint(0, 8)
        sides = [[0, *sorted(rng.randint(0, 40) for _ in range(number))] for _ in range(2)]
        shape = tuple(ends[-1] for ends in sides)
        bound = documents(*sides, is_causal=is_causal).bind(*shape)
        by_pieces = BoundPattern(*shape, bound.pieces)
        for _ in range(20):
            box = [range(*sorted(rng.randint(-3, 45) for _ in range(2))) for _ in range(2)]
            assert bound.count(*box) == by_pieces.count(*box)
            assert list(bound.views(*box)) == list(by_pieces.views(*box))
        assert pickle.loads(pickle.dumps(bound)) == bound
        rows, keys = np.arange(shape[0] + 1), range(shape[1])
        before = bound.live_before(rows)
        assert before.tolist() == [by_pieces.count(range(row), keys) for row in rows.tolist()]
        live = before[before < before[-1]]
        assert (bound.live_before(bound.rows_with(live)) == live).all()
        for row in np.flatnonzero(np.diff(before)):
            (first,), (end,) = bound.keys_of(rows[row : row + 1], rows[row + 1 : row + 2])
            assert bound.count(range(row, row + 1), range(first, end)) == np.diff(before)[row]


def test_documents_in_documents_are_documents():
    rng = random.Random(4)
    for _ in range(40):
        sides = [[0, *sorted(rng.randint(0, 30) for _ in range(4)), 30] for _ in range(2)]
        first, second = (documents(ends, is_causal=rng.random() < 0.5) for ends in sides)
        both = first & second
        assert isinstance(both.bind(30), BoundDocuments)
        assert (both.to_mask(30) == first.to_mask(30) & second.to_mask(30)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: global_tokens([1, -1]), "indices must be at least 0, got -1"),
        (lambda: global_tokens([0.5]), "indices must be an integer, got 0.5"),
        (lambda: longformer(4, "ab"), "global_tokens must be an integer, got 'a'"),
        (lambda: longformer(-4, 1), "window must be at least 0, got -4"),
        (lambda: documents([1, 2]), r"cu_seqlens must begin with 0 .*, got \[1, 2\]"),
        (lambda: documents([0, 3, 2]), "never decrease"),
        (lambda: documents(3), "cu_seqlens must be a sequence of integers, got 3"),
        (lambda: documents([0, 2], [1, 2]), r"cu_seqlens_kv must begin with 0 .*, got \[1, 2\]"),
        (lambda: documents([0, 2], [0, 1, 2]), "cu_seqlens_kv must have .* 2, got 3"),
        (lambda: documents([0, 2], [0, 2.5]), "cu_seqlens_kv must be integers, got 2.5"),
        (lambda: documents([0, 2]).bind(2, 4), "pass cu_seqlens_kv too if they differ"),
        (lambda: documents([0, 4], [0, 2]).bind(2, 4), r"lengths \(4, 2\), got \(2, 4\)"),
        (lambda: documents([0, 3, 6]).bind(5), r"lengths \(6, 6\), got \(5, 5\): .* padding"),
        (lambda: (documents([0, 3]) & documents([0, 4])).bind(4), r"\(3, 3\), got \(4, 4\)"),
        (lambda: (documents([0, 2, 3], [0, 4, 4]) & sliding_window(1)).bind(3, 4), "must not mix"),
        (lambda: documents([0, 2], is_causal=1), "is_causal must be a bool, got 1"),
        (lambda: bigbird(random_blocks=-1), "random_blocks must be at least 0, got -1"),
        (lambda: bigbird(block=4.0), "block must be an integer, got 4.0"),
        (lambda: padded([3, 3], [3]), "of the same batch elements, got 2 and 1"),
        (lambda: padded([-1]), "lengths must be at least 0, got -1"),
        (lambda: padded([1], [1.5]), "lengths_kv must be an integer, got 1.5"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
