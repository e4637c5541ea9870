"""The constructors of one or two pieces, each against its definition."""

import pickle
import random
import time

import pytest
from brute_force import assert_is, mask_of

from cqs.patterns import block_diagonal, causal, dilated, fixed, sliding_window, strided

RULES = {
    causal(): lambda p, j: j <= p,
    sliding_window(3, 0): lambda p, j: p - 3 <= j <= p,
    sliding_window(0, 0): lambda p, j: j == p,
    sliding_window(2, 5): lambda p, j: p - 2 <= j <= p + 5,
    sliding_window(None, 2): lambda p, j: j <= p + 2,
    sliding_window(4, None): lambda p, j: p - 4 <= j,
    sliding_window(None, None): lambda p, j: True,
    dilated(2, 1, 3): lambda p, j: j in [p + 3 * n for n in range(-2, 2)],
    dilated(0, 4, 2): lambda p, j: j in [p + 2 * n for n in range(5)],
    strided(1): lambda p, j: j <= p,
    strided(4): lambda p, j: j <= p and (p - j < 4 or (p - j) % 4 == 0),
    fixed(4, 1): lambda p, j: j <= p and (p // 4 == j // 4 or j % 4 >= 3),
    fixed(5, 3): lambda p, j: j <= p and (p // 5 == j // 5 or j % 5 >= 2),
    fixed(3, 0): lambda p, j: j <= p and p // 3 == j // 3,
    fixed(1, 1): lambda p, j: j <= p,
    block_diagonal(1): lambda p, j: j == p,
    block_diagonal(4): lambda p, j: p // 4 == j // 4,
}
every_pattern = pytest.mark.parametrize("pattern", RULES, ids=repr)


@every_pattern
def test_patterns_are_what_their_definition_says(pattern):
    rng = random.Random(repr(pattern))
    shapes = [(0, 0), (0, 3), (3, 0), (1, 1), (17, 17), (9, 23), (23, 9)]
    shapes += [(rng.randint(0, 30), rng.randint(0, 30)) for _ in range(12)]
    for shape in shapes:
        assert_is(rng, pattern.bind(*shape), mask_of(RULES[pattern], *shape))


@every_pattern
def test_patterns_answer_for_positions_without_lengths(pattern):
    mask = mask_of(RULES[pattern], 20, 20)
    assert pattern.count(range(3, 17), range(5, 20)) == mask[3:17, 5:20].sum()
    assert pattern.count(range(0), range(0)) == 0
    assert [pattern.allows(11, j) for j in range(20)] == mask[11].tolist()
    assert pattern.density(20) == pytest.approx(mask.mean())
    assert (pattern.to_mask(20) == mask).all()


@every_pattern
def test_patterns_are_values(pattern):
    again = pickle.loads(pickle.dumps(pattern))
    assert again == pattern and hash(again) == hash(pattern) and len({again, pattern}) == 1
    assert again.bind(12, 15) == pattern.bind(12, 15)
    assert pattern != dilated(7, 7, 7)


@every_pattern
def test_patterns_print_as_the_call_that_makes_them(pattern):
    assert eval(repr(pattern)) == pattern


def test_equal_patterns_may_come_from_different_calls():
    assert causal() == sliding_window(None, 0) == sliding_window(None)
    assert dilated(3, 2, 1) == sliding_window(3, 2)


@pytest.mark.parametrize(
    "pattern",
    [causal(), sliding_window(10**5), dilated(500, 0, 64), strided(2**15), fixed(2**12, 64)],
    ids=repr,
)
def test_a_billion_tokens_are_counted_at_once(pattern):
    length = 10**9
    begin = time.perf_counter()
    bound = pattern.bind(length)
    half = length // 2 + 77
    parts = [range(half), range(half, length)]
    assert sum(bound.count(rows, columns) for rows in parts for columns in parts) == bound.num_pairs
    assert time.perf_counter() - begin < 0.5
    assert len(bound.pieces) <= 2


def test_counts_of_a_billion_tokens_have_closed_forms():
    n, s = 10**9, 10**3
    assert causal().bind(n).num_pairs == n * (n + 1) // 2
    assert sliding_window(9, 0).bind(n).num_pairs == 10 * n - 45
    assert block_diagonal(s).bind(n).num_pairs == n * s
    summaries = n // s * (n // s - 1) // 2 * s * 10
    assert fixed(s, 10).bind(n).num_pairs == n * (s + 1) // 2 + summaries


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sliding_window(-1), "left must be at least 0, got -1"),
        (lambda: sliding_window(1, -2), "right must be at least 0, got -2"),
        (lambda: sliding_window(True), "left must be an integer, got True"),
        (lambda: dilated(1, 1, 0), "step must be at least 1, got 0"),
        (lambda: strided(0), "stride must be at least 1, got 0"),
        (lambda: strided(2.0), "stride must be an integer, got 2.0"),
        (lambda: fixed(4, 5), "columns must be at most stride = 4, got 5"),
        (lambda: block_diagonal(0), "size must be at least 1, got 0"),
        (lambda: causal().bind(-1), "seqlen_q must be at least 0, got -1"),
        (lambda: causal().bind(1, "2"), "seqlen_kv must be an integer, got '2'"),
        (lambda: causal().count(range(0, 4, 2), range(4)), "queries must be a range of step 1"),
        (lambda: causal().count(range(4), 4), "keys must be a range, got 4"),
        (lambda: causal().allows(1, 1.0), "key must be an integer, got 1.0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
