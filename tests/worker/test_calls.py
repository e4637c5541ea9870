"""Cutting views into calls: every pair once, in rectangles, causal squares and strips."""

import random
from itertools import chain

import numpy as np
import pytest

from cqs.patterns import (
    block_diagonal,
    dilated,
    documents,
    fixed,
    from_mask,
    sliding_window,
    strided,
)
from cqs.patterns.piece import FAR
from cqs.patterns.views import View
from cqs.worker import calls
from cqs.worker.work import BlockRow, Work
from tests.worker.hopper import plan_work


def random_view(generator):
    step = generator.choice([1, 1, 2, 3])
    other = step if generator.random() < 0.8 else generator.choice([1, 2, 5])
    queries, keys = (
        range(first, first + each * generator.randint(1, 14), each)
        for first, each in zip(generator.choices(range(10), k=2), (step, other), strict=True)
    )
    low = generator.choice([-FAR, generator.randint(-25, 20)])
    width = generator.randint(0, 20)
    high = generator.choice([FAR, (generator.randint(-20, 20) if low == -FAR else low) + width])
    return View(queries, keys, low, high)


def make_calls(view, joins_calls):
    queries = range(view.queries.start, view.queries.stop)
    work = Work((BlockRow(queries, (view,)),))
    (found,) = calls.make_calls(work, joins_calls=joins_calls)
    return [call for call, _ in found]


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
        counts, expected = np.zeros((2, 70, 90), int)
        expected[np.ix_(view.queries, view.keys)] = view.to_mask()
        for call in make_calls(view, in_batches):
            kinds.add((call.is_causal, call.view.is_full, call.number > 1))
            for i in range(call.number):
                part = call.view.moved(i * call.stride, i * call.stride)
                mask = part.to_mask()
                if call.is_causal:
                    assert np.array_equal(mask, np.tri(len(part.queries), len(part.keys)))
                counts[np.ix_(part.queries, part.keys)] += mask
        assert np.array_equal(counts, expected), view
    assert len(kinds) == (5 if in_batches else 2)


@pytest.mark.parametrize("kind", ["window", "fixed", "blocks", "random"])
def test_many_calls_on_a_few_tokens_become_one_with_a_mask(kind):
    rng = np.random.default_rng(0)
    pattern = {
        "window": sliding_window(3, 2),
        "fixed": fixed(8, 2),
        "blocks": block_diagonal(9),
        "random": from_mask(rng.random((40, 50)) < 0.3),
    }[kind]
    work = plan_work(40, 50, pattern=pattern)
    mask = np.zeros((40, 50), bool)
    for call, is_first in chain.from_iterable(calls.make_calls(work, joins_calls=True)):
        assert is_first and call.number * len(call.view.queries) >= 36
        for i in range(call.number):
            part = call.view.moved(i * call.stride, i * call.stride)
            mask[np.ix_(part.queries, part.keys)] |= part.to_mask()
    assert np.array_equal(mask, pattern.to_mask(40, 50))


def test_a_window_is_few_calls():
    view = View(range(4096), range(4096), -500, 500)
    found = make_calls(view, True)
    assert sum(call.is_causal for call in found) == 1
    assert max(call.number for call in found) > 90
    assert len(found) < 25


@pytest.mark.parametrize(("tokens", "pattern"), [(2048, strided(128)), (1900, strided(128))])
def test_a_sequence_of_thousands_of_tokens_is_a_few_masked_calls(tokens, pattern):
    (found,) = calls.make_calls(plan_work(tokens, tokens, pattern=pattern), joins_calls=True)
    mask = np.zeros((tokens, tokens), bool)
    for call, is_first in found:
        assert is_first and call.number == 1 and call.view.bits is not None
        assert len(call.view.queries) * len(call.view.keys) <= 2**20
        mask[np.ix_(call.view.queries, call.view.keys)] = call.view.to_mask()
    assert np.array_equal(mask, pattern.to_mask(tokens))
    assert len(found) == -(-tokens // (2**20 // tokens))


def test_equal_blocks_at_unequal_distances_are_computed_once():
    pattern = documents([0, 250, 500, 850, 1100, 1500], is_causal=False)
    (found,) = calls.make_calls(plan_work(1500, 1500, pattern=pattern), joins_calls=True)
    assert max(call.number for call, _ in found) == 2
    counts = np.zeros((1500, 1500), int)
    for call, _ in found:
        for i in range(call.number):
            part = call.view.moved(i * call.stride, i * call.stride)
            counts[np.ix_(part.queries, part.keys)] += part.to_mask()
    assert np.array_equal(counts, pattern.to_mask(1500))


def test_keys_with_gaps_are_few_calls():
    (found,) = calls.make_calls(plan_work(8192, 8192, pattern=fixed(128, 8)), joins_calls=True)
    assert len(found) < 100


@pytest.mark.parametrize("high", [FAR, 0, 9])
def test_calls_on_their_own_are_small(high):
    view = View(range(5000), range(5000), -FAR, high)
    found = make_calls(view, False)
    assert max(len(call.view.queries) * len(call.view.keys) for call in found) <= 2**20


@pytest.mark.parametrize(
    ("tokens", "pattern", "number"),
    [
        (128, sliding_window(12, 0), 1),
        (128, dilated(128, 128, 16), 1),
        (256, fixed(128, 8), 1),
        (512, sliding_window(69, 69), 1),
        (512, sliding_window(26, 26), 2),
        (1024, strided(128), 1),
        (1024, sliding_window(102, 0), 3),
        (2048, strided(128), 2),
    ],
    ids=str,
)
def test_short_patterns_are_one_masked_call_where_it_is_faster(tokens, pattern, number):
    (found,) = calls.make_calls(plan_work(tokens, tokens, pattern=pattern), joins_calls=True)
    assert len(found) >= number
    if number == 1:
        ((call, _),) = found
        assert call.number == 1
        assert np.array_equal(call.mask.visible.numpy(), pattern.to_mask(tokens))
