"""Two independent counts of how often a plan owns each (query, key) pair."""

from itertools import pairwise

import numpy as np


def live_mask(plan):
    """Which pairs attention needs, from the definition."""
    queries, keys = np.arange(plan.seqlen_q)[:, None], np.arange(plan.seqlen_kv)[None, :]
    if plan.is_causal:
        return keys <= queries + (plan.seqlen_kv - plan.seqlen_q)
    return np.ones((plan.seqlen_q, plan.seqlen_kv), dtype=bool)


def count_block(block, counts):
    """Add one for every pair that attention computes in a block."""
    part = counts[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop]
    assert part.shape == (len(block.queries), len(block.keys)), "block outside the score matrix"
    part += np.tri(*part.shape, dtype=part.dtype) if block.is_causal else 1


def count_pairs(plan):
    """The owner count of every single pair, for short sequences."""
    counts = np.zeros((plan.seqlen_q, plan.seqlen_kv), dtype=int)
    for task in plan.tasks:
        for block in task.blocks:
            count_block(block, counts)
    return counts


def collect_steps(plan):
    """All rectangles ``[n, 5]`` and squares ``[m, 5]``: worker, query range, key range."""
    rectangles, squares = [], []
    for index in range(plan.num_tasks):
        for step in plan.task(index).steps:
            queries = step.queries
            for keys in step.keys:
                rectangles += index, queries.start, queries.stop, keys.start, keys.stop
            if (keys := step.causal_keys) is not None:
                squares += index, queries.start, queries.stop, keys.start, keys.stop
    return tuple(np.array(each, dtype=np.int64).reshape(-1, 5) for each in (rectangles, squares))


def live_pairs_per_worker(plan, rectangles, squares):
    live = np.zeros(plan.num_tasks, dtype=np.int64)
    index, q0, q1, k0, k1 = rectangles.T
    np.add.at(live, index, (q1 - q0) * (k1 - k0))
    index, q0, q1, *_ = squares.T
    np.add.at(live, index, (q1 - q0) * (q1 - q0 + 1) // 2)
    return live


def _count_cells(rectangles, row_cuts, column_cuts):
    """How many rectangles cover each cell between the cuts, by two-dimensional differences."""
    counts = np.zeros((len(row_cuts), len(column_cuts)), dtype=np.int64)
    q0, q1 = (np.searchsorted(row_cuts, edge) for edge in rectangles[:, 1:3].T)
    k0, k1 = (np.searchsorted(column_cuts, edge) for edge in rectangles[:, 3:5].T)
    for rows, columns, sign in ((q0, k0, 1), (q1, k1, 1), (q0, k1, -1), (q1, k0, -1)):
        np.add.at(counts, (rows, columns), sign)
    return counts.cumsum(0).cumsum(1)[:-1, :-1]


def assert_owned_once(plan, rectangles, squares):
    """Cut the score matrix at every edge and check each cell, whatever the sequence length."""
    limits = [0, plan.seqlen_q, 0, plan.seqlen_kv]
    both = np.concatenate([rectangles, squares])
    assert (both[:, 1] < both[:, 2]).all() and (both[:, 3] < both[:, 4]).all(), "empty block"
    assert (both[:, [1, 3]] >= 0).all(), "block before the first token"
    assert (both[:, [2, 4]] <= limits[1::2]).all(), "block beyond the last token"
    if not plan.is_causal:
        assert not len(squares)
        row_cuts = np.unique([*limits[:2], *rectangles[:, 1:3].flat])
        column_cuts = np.unique([*limits[2:], *rectangles[:, 3:5].flat])
        assert (_count_cells(rectangles, row_cuts, column_cuts) == 1).all()
        return

    # Measure queries by the last key they see: live cells are those on or below the diagonal.
    shift = plan.seqlen_kv - plan.seqlen_q
    offset = np.array([0, shift, shift, 0, 0])
    rectangles, squares = rectangles + offset, squares + offset
    assert (squares[:, 1:3] == squares[:, 3:5]).all(), "causal square off the diagonal"
    edges = np.concatenate([rectangles[:, 1:].ravel(), squares[:, 1:].ravel()])
    cuts = np.unique([shift, plan.seqlen_kv, 0, *edges])
    counts = _count_cells(rectangles, cuts, cuts)
    triangles = np.zeros(len(counts), dtype=np.int64)
    for first, last in np.searchsorted(cuts, squares[:, 1:3]):
        triangles[first:last] += 1
        counts[first:last, first:last] += np.tri(last - first, k=-1, dtype=np.int64)
    is_key, is_live_query = cuts[:-1] >= 0, cuts[:-1] >= max(shift, 0)
    assert (triangles == is_live_query).all(), "diagonal"
    below = np.tri(len(counts), k=-1, dtype=bool) & is_key & is_live_query[:, None]
    assert (counts == below).all(), "off the diagonal"


def tokens(ranges):
    """The set of tokens of some ranges, which must not overlap."""
    listed = [token for each in ranges for token in each]
    assert len(listed) == len(set(listed)), f"{ranges} overlap"
    return set(listed)


def is_ascending_and_apart(ranges):
    return all(a.stop < b.start for a, b in pairwise(ranges))
