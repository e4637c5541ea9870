"""Cutting views into calls: every pair once, in rectangles, causal squares and strips."""

import random

import numpy as np
import pytest

from cqs.patterns.piece import FAR
from cqs.patterns.views import View
from cqs.worker import calls
from cqs.worker.work import BlockRow


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
    block_row = BlockRow(queries, (view,))
    return [call for call, _ in calls.make_calls(block_row, joins_calls=joins_calls)]


@pytest.mark.parametrize("in_batches", [False, True])
def test_calls_have_every_pair_of_a_view_once(monkeypatch, in_batches):
    monkeypatch.setattr(calls, "_LEAST_SQUARE", 2)
    monkeypatch.setattr(calls, "_STRIP", 3)
    monkeypatch.setattr(calls, "_AREA", 20)
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


def test_a_window_is_few_calls():
    view = View(range(4096), range(4096), -500, 500)
    found = make_calls(view, True)
    assert sum(call.is_causal for call in found) == 1
    assert max(call.number for call in found) > 90
    assert len(found) < 25


@pytest.mark.parametrize("high", [FAR, 0, 9])
def test_calls_on_their_own_are_small(high):
    view = View(range(5000), range(5000), -FAR, high)
    found = make_calls(view, False)
    assert max(len(call.view.queries) * len(call.view.keys) for call in found) <= 2**20
