"""Rows of arithmetic progressions, and the pieces that are found in them."""

import pickle
import random

import numpy as np
import pytest
from brute_force import assert_is

from cqs.patterns import acsr, block_diagonal, causal, dilated, fixed, sliding_window


def mask_of_rows(start, step, count, seqlen_kv):
    mask = np.zeros((len(start), seqlen_kv), dtype=bool)
    for i, row in enumerate(zip(start, step, count, strict=True)):
        mask[i, [row[0] + row[1] * c for c in range(row[2])]] = True
    return mask


def random_runs(rng):
    """Up to 24 rows: runs that move and grow by a rule, or rows without one."""
    rows = []
    for _ in range(rng.randint(0, 4)):
        first, step, number = rng.randint(0, 30), rng.randint(1, 4), rng.randint(0, 5)
        moves, grows = rng.choice([0, 1, 1]), rng.choice([0, 0, 1])
        for n in range(rng.choice([1, 1, 6])):
            rows.append((first + moves * n, step, number + grows * n // step))
    return tuple(zip(*rows, strict=True)) or ((), (), ())


@pytest.mark.slow
def test_runs_of_rules_are_kept():
    rng = random.Random(1)
    for _ in range(600):
        rows = random_runs(rng)
        assert_is(rng, acsr(*rows).bind(len(rows[0]), 60), mask_of_rows(*rows, 60))


@pytest.mark.parametrize(
    ("pattern", "step", "most"),
    [
        (causal(), 1, 1),
        (sliding_window(20, 0), 1, 2),
        (sliding_window(20, 9), 1, 3),
        (dilated(5, 2, 4), 4, 3),
        (dilated(7, 0, 3), 3, 2),
        (block_diagonal(50), 1, 6),
        (fixed(50, 0), 1, 6),
    ],
    ids=repr,
)
def test_regular_rows_become_few_pieces(pattern, step, most):
    mask = pattern.to_mask(300)
    bound = acsr(mask.argmax(1), [step] * 300, mask.sum(1)).bind(300)
    assert_is(random.Random(2), bound, mask)
    assert len(bound.pieces) <= most


def test_rows_are_values():
    rows = [0, 1, 2], np.array([1, 1, 1]), [2, 2, 2]
    pattern = acsr(*rows)
    assert pattern == acsr(*rows) == pickle.loads(pickle.dumps(pattern))
    assert repr(pattern).startswith("acsr(<3 x 4, ")
    assert repr(pattern) != repr(acsr([0, 1, 2], [1, 1, 1], [3, 3, 3]))
    assert pattern.count(range(3), range(4)) == 6
