"""Cutting views into calls: every pair once, in rectangles, causal squares and strips."""

import random
from itertools import chain

import numpy as np
import pytest

from cqs.patterns import block_diagonal, dilated, documents, fixed, sliding_window, strided
from cqs.patterns.piece import FAR
from cqs.patterns.views import View
from cqs.worker import calls
from cqs.worker.work import BlockRow, Work
from tests.worker.hopper import plan_work


def random_view(generator):
    step = generator.choice([1, 1, 2, 3])
    other = step if generator.random() < 0.8 else generator.choice([1, 2, 5])
    queries, keys = (
        range(first, first + stride * generator.randint(1, 14), stride)
        for first, stride in zip(generator.choices(range(10), k=2), (step, other), strict=True)
    )
    low = generator.choice([-FAR, generator.randint(-25, 20)])
    width = generator.randint(0, 20)
    high = generator.choice([FAR, (generator.randint(-20, 20) if low == -FAR else low) + width])
    return View(queries, keys, low, high)


def make_calls(view, joins_calls):
    queries = range(view.queries.start, view.queries.stop)
    work = Work((BlockRow(queries, (view,)),))
    (row_calls,) = calls.make_calls(work, joins_calls=joins_calls)
    return [call for call, _ in row_calls]


def parts_of(call):
    return [call.view.moved(i * call.stride, i * call.stride) for i in range(call.number)]


def count_pairs(all_calls, lengths):
    """Return in how many calls each pair is."""
    counts = np.zeros(lengths, np.int8)
    for call in all_calls:
        for part in parts_of(call):
            counts[np.ix_(part.queries, part.keys)] += part.to_mask()
    return counts


@pytest.mark.parametrize("in_batches", [False, True])
def test_calls_have_every_pair_of_a_view_once(monkeypatch, in_batches):
    monkeypatch.setattr(calls, "_LEAST_SQUARE", 2)
    monkeypatch.setattr(calls, "_STRIP", 3)
    monkeypatch.setattr(calls, "_AREA", 20)
    monkeypatch.setattr(calls, "_MASKED_AREA", 20)
    generator = random.Random(0)
    kinds = set()
    for _ in range(4000):
        view = random_view(generator)
        expected = np.zeros((70, 90), int)
        expected[np.ix_(view.queries, view.keys)] = view.to_mask()
        view_calls = make_calls(view, in_batches)
        for call in view_calls:
            kinds.add((call.is_causal, call.view.is_full, call.number > 1))
            for part in parts_of(call) if call.is_causal else ():
                assert np.array_equal(part.to_mask(), np.tri(len(part.queries), len(part.keys)))
        assert np.array_equal(count_pairs(view_calls, (70, 90)), expected), view
    assert len(kinds) == (5 if in_batches else 2)


def test_equal_blocks_at_unequal_distances_are_computed_once():
    pattern = documents([0, 250, 500, 850, 1100, 1500], is_causal=False)
    (row_calls,) = calls.make_calls(plan_work(1500, 1500, pattern=pattern), joins_calls=True)
    assert max(call.number for call, _ in row_calls) == 2
    counts = count_pairs([call for call, _ in row_calls], (1500, 1500))
    assert np.array_equal(counts, pattern.to_mask(1500))


@pytest.mark.parametrize("high", [FAR, 0, 9])
def test_calls_on_their_own_are_small(high):
    view = View(range(5000), range(5000), -FAR, high)
    view_calls = make_calls(view, False)
    assert max(len(call.view.queries) * len(call.view.keys) for call in view_calls) <= 2**20


@pytest.mark.parametrize(
    ("tokens", "pattern", "least", "most"),
    [
        (40, block_diagonal(9), 1, 1),
        (128, sliding_window(12, 0), 1, 1),
        (128, dilated(128, 128, 16), 1, 1),
        (256, fixed(128, 8), 1, 1),
        (512, sliding_window(69, 69), 1, 1),
        (512, sliding_window(26, 26), 2, 24),
        (1024, strided(128), 1, 1),
        (1024, sliding_window(102, 0), 3, 24),
        (1900, strided(128), 4, 4),
        (2048, strided(128), 4, 4),
        (4096, sliding_window(500, 500), 2, 24),
        (8192, fixed(128, 8), 2, 99),
    ],
    ids=str,
)
def test_patterns_are_few_calls_and_short_ones_one_with_a_mask(tokens, pattern, least, most):
    """As many as are fastest."""
    work = plan_work(tokens, tokens, pattern=pattern)
    all_calls = [call for call, _ in chain.from_iterable(calls.make_calls(work, joins_calls=True))]
    assert least <= len(all_calls) <= most
    assert np.array_equal(count_pairs(all_calls, (tokens, tokens)), pattern.to_mask(tokens))
    if len(all_calls) == 1:
        assert np.array_equal(all_calls[0].mask.visible.numpy(), pattern.to_mask(tokens))
