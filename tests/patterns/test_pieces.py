"""Pieces and their algebra against brute force."""

import random

import numpy as np
import pytest
from brute_force import mask_of_piece

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


def test_views_hold_every_pair_once():
    rng = random.Random(5)
    for _ in range(2000):
        shape = random_shape(rng)
        drawn = random_piece(rng, *shape)
        mask, piece = mask_of_piece(drawn, *shape), tidy(drawn)
        if piece is None:
            assert not mask.any()
            continue
        assert piece.num_pairs == mask.sum()
        cuts = [views] if piece.is_plain else [cut for _, cut in cutting_methods(piece)]
        for cut in cuts:
            counts = np.zeros(shape, dtype=int)
            for view in cut(piece):
                i, j = np.array(view.queries)[:, None], np.array(view.keys)
                live = (view.low <= j - i) & (j - i <= view.high)
                assert view.is_full == live.all()
                counts[np.ix_(view.queries, view.keys)] += live
            assert (counts == mask).all(), cut


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
        counts = sum(mask_of_piece(piece, *shape).astype(int) for piece in pieces)
        expected = truth(mask_of_piece(one, *shape), mask_of_piece(other, *shape))
        assert np.all(counts == expected), f"{one} {other}"
        assert len(pieces) <= 24
    assert refused < 300
