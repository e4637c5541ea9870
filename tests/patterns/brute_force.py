"""Patterns and pieces by their definition: one test per pair."""

from itertools import product

import numpy as np


def mask_of(rule, seqlen_q, seqlen_kv):
    """The boolean matrix of ``rule(position of the query, key)``."""
    mask = np.zeros((seqlen_q, seqlen_kv), dtype=bool)
    for i in range(seqlen_q):
        for j in range(seqlen_kv):
            mask[i, j] = bool(rule(i + seqlen_kv - seqlen_q, j))
    return mask


def random_mask(rng, seqlen_q, seqlen_kv, block=128):
    """Some empty, some full and some mixed blocks."""
    generator = np.random.default_rng(rng.randrange(2**32))
    mask = generator.random((seqlen_q, seqlen_kv)) < 0.3
    for row, column in product(range(0, seqlen_q, block), range(0, seqlen_kv, block)):
        kind = rng.choice([None, True, False, False])
        if kind is not None:
            mask[row : row + block, column : column + block] = kind
    return mask


def random_range(rng, length):
    """A range that may be empty or reach beyond the sequence."""
    start, stop = sorted((rng.randint(-2, length + 2), rng.randint(-2, length + 2)))
    return range(start, stop)


def mask_of_piece(piece, seqlen_q, seqlen_kv):
    """The pairs of a piece, by its definition."""
    (rows, columns), *bands = piece[:2], piece[2:4], piece[4:]
    query, key = np.arange(seqlen_q)[:, None], np.arange(seqlen_kv)
    a, u = np.divmod(query - rows.origin, rows.step)
    b, v = np.divmod(key - columns.origin, columns.step)
    live = (u < rows.width) & (v < columns.width)
    for tokens, found in ((rows.tokens, query), (columns.tokens, key)):
        live = live & (tokens.start <= found) & (found < tokens.stop)
    for (low, high), distance in zip(bands, (b - a, v - u), strict=True):
        live = live & (low <= distance) & (distance <= high)
    return live


def assert_is(rng, bound, mask):
    """Check a bound pattern against a mask, in every way it can be read."""
    assert (bound.to_mask() == mask).all()
    assert bound.num_pairs == mask.sum()
    assert np.isclose(bound.density, mask.mean() if mask.size else 0)
    seqlen_q, seqlen_kv = mask.shape
    for _ in range(3):
        queries, keys = random_range(rng, seqlen_q), random_range(rng, seqlen_kv)
        inside, visits = np.zeros((2, *mask.shape), dtype=int)
        rows, columns = (slice(max(r.start, 0), max(r.stop, 0)) for r in (queries, keys))
        inside[rows, columns] = mask[rows, columns]
        for view in bound.views(queries, keys):
            visits[np.ix_(view.queries, view.keys)] += view.to_mask()
        assert bound.count(queries, keys) == inside.sum() and (visits == inside).all()
    overlaps = sum(mask_of_piece(piece, seqlen_q, seqlen_kv).astype(int) for piece in bound.pieces)
    assert np.max(overlaps, initial=0) <= 1, "two pieces have a pair in common"
    query, key = rng.randint(-2, seqlen_q + 1), rng.randint(-2, seqlen_kv + 1)
    inside = 0 <= query < seqlen_q and 0 <= key < seqlen_kv
    assert bound.allows(query, key) is bool(inside and mask[query, key])
