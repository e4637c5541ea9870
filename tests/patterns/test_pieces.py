"""Pieces and their algebra against brute force."""

import random

import numpy as np
import pytest
from brute_force import count_in, mask_of_piece, random_range

from cqs.patterns.algebra import UnequalStepsError, intersect, subtract, unite
from cqs.patterns.piece import FAR, Axis, Piece, count_band, tidy
from cqs.patterns.views import cutting_methods, views


def random_axis(rng, length, step):
    start, stop = sorted((rng.randint(0, length), rng.randint(0, length)))
    return Axis(range(start, stop), rng.randint(-9, 9), step, rng.randint(1, step))


def random_piece(rng, seqlen_q, seqlen_kv, steps=(1, 1, 2, 3, 5, 8)):
    query_step = rng.choice(steps)
    key_step = query_step if rng.random() < 0.7 else rng.choice(steps)
    return Piece(
        random_axis(rng, seqlen_q, query_step),
        random_axis(rng, seqlen_kv, key_step),
        rng.choice([-FAR, rng.randint(-9, 4)]),
        rng.choice([FAR, rng.randint(-4, 9)]),
        rng.choice([-FAR, rng.randint(-4, 2)]),
        rng.choice([FAR, rng.randint(-2, 4)]),
    )


def random_tidy_piece(rng, shape, steps=(1, 1, 2, 3, 5, 8)):
    while (piece := tidy(random_piece(rng, *shape, steps))) is None:
        pass
    return piece


def mask_of(piece, shape):
    return mask_of_piece(piece, *shape)


def random_shape(rng):
    return rng.randint(1, 25), rng.randint(1, 25)


def test_the_band_count_is_that_of_a_loop():
    rng = random.Random(0)
    for _ in range(500):
        a, a_stop = sorted((rng.randint(-9, 9), rng.randint(-9, 9)))
        b, b_stop = sorted((rng.randint(-9, 9), rng.randint(-9, 9)))
        low, high = rng.randint(-20, 20), rng.randint(-20, 20)
        points = [(x, y) for x in range(a, a_stop) for y in range(b, b_stop)]
        expected = sum(low <= y - x <= high for x, y in points)
        assert count_band(a, a_stop, b, b_stop, low, high) == expected


def test_tidying_keeps_the_set_and_drops_what_is_empty():
    rng = random.Random(1)
    empty = 0
    for _ in range(4000):
        shape = random_shape(rng)
        piece = random_piece(rng, *shape)
        mask = mask_of(piece, shape)
        found = tidy(piece)
        if found is None:
            assert not mask.any()
            empty += 1
            continue
        assert (mask_of(found, shape) == mask).all()
        box = mask[found.queries.tokens.start : found.queries.tokens.stop]
        box = box[:, found.keys.tokens.start : found.keys.tokens.stop]
        assert found.is_rectangle == box.all()
        if found.is_plain:
            assert tidy(found) == found and box.any(axis=0).all() and box.any(axis=1).all()
    assert 400 < empty < 3600


def test_pieces_count_pairs_exactly():
    rng = random.Random(2)
    for _ in range(3000):
        shape = random_shape(rng)
        piece = random_tidy_piece(rng, shape)
        mask = mask_of(piece, shape)
        assert piece.num_pairs == mask.sum()
        queries, keys = random_range(rng, shape[0]), random_range(rng, shape[1])
        assert piece.count_pairs(queries, keys) == count_in(mask, queries, keys)


def test_views_hold_every_pair_once():
    rng = random.Random(5)
    for _ in range(1000):
        shape = random_shape(rng)
        piece = random_tidy_piece(rng, shape)
        ways = [views] if piece.is_plain else [way for _, way in cutting_methods(piece)]
        for way in ways:
            counts = np.zeros(shape, dtype=int)
            for view in way(piece):
                i, j = np.array(view.queries)[:, None], np.array(view.keys)
                live = (view.low <= j - i) & (j - i <= view.high)
                assert view.is_full == live.all()
                counts[np.ix_(view.queries, view.keys)] += live
            assert (counts == mask_of(piece, shape)).all(), way


@pytest.mark.parametrize(
    ("operation", "truth"),
    [
        (intersect, np.logical_and),
        (subtract, lambda one, other: one & ~other),
        (unite, np.logical_or),
    ],
    ids=["intersect", "subtract", "unite"],
)
def test_the_algebra_of_pieces_is_that_of_sets(operation, truth):
    rng = random.Random(4)
    refused = 0
    for _ in range(1200):
        shape = random_shape(rng)
        one, other = (random_tidy_piece(rng, shape, steps=(1, 1, 4)) for _ in range(2))
        try:
            pieces = operation([one], [other])
        except UnequalStepsError:
            refused += 1
            continue
        counts = sum((mask_of(piece, shape).astype(int) for piece in pieces), np.zeros(shape, int))
        assert (counts == truth(mask_of(one, shape), mask_of(other, shape))).all(), f"{one} {other}"
        assert len(pieces) <= 24
    assert refused < 300
