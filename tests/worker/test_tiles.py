import numpy as np
import pytest

from cqs.scheduler import make_plan
from cqs.worker.rectangle import Rectangle
from cqs.worker.triton.tiles import make_tile_list


def count_visits(rectangles, tile_q, tile_k, shape):
    """How often each (output row, key) is visited, as the kernels read the list."""
    found = make_tile_list(rectangles, tile_q, tile_k)
    visits = np.zeros((found.num_rows, shape[1]), int)
    query_of_row = np.full(found.num_rows, -1)
    for start, stop, row, first, banded_stop, last, num_full, _ in found.tiles:
        assert 0 < stop - start <= tile_q
        rows = np.arange(row, row + stop - start)
        query_of_row[rows] = np.arange(start, stop)
        for i in range(first, last):
            k0, k1, low, high = found.runs[i]
            if i >= banded_stop:
                assert (k1 - k0) % tile_k == 0
            distance = np.arange(k0, k1) - np.arange(start, stop)[:, None]
            visits[rows, k0:k1] += (distance >= low) & (distance <= high)
        full = found.runs[banded_stop:last]
        assert num_full == (full[:, 1] - full[:, 0]).sum() // tile_k
    return visits, query_of_row


@pytest.mark.parametrize("tile_k", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_workers", [1, 2, 7, 8])
@pytest.mark.parametrize("lengths", [(200, 200), (131, 300), (300, 131), (5, 5)], ids=str)
def test_every_pair_of_a_plan_is_visited_once(lengths, num_workers, is_causal, tile_k):
    plan = make_plan(*lengths, num_workers=num_workers, is_causal=is_causal, tile=16)
    total = np.zeros(lengths, int)
    for task in plan.tasks:
        if not task.steps:
            continue
        rectangles = [Rectangle(s.queries, s.keys, s.causal_keys) for s in task.steps]
        visits, query_of_row = count_visits(rectangles, 32, tile_k, lengths)
        assert (query_of_row >= 0).all() and len(visits) == sum(len(s.queries) for s in task.steps)
        np.add.at(total, query_of_row, visits)
    live = np.ones(lengths, int)
    if is_causal:
        live = np.tril(live, lengths[1] - lengths[0])
    assert (total == live).all()


def test_most_work_comes_first():
    rectangles = [Rectangle(range(0, 100), (), range(0, 100))]
    starts = make_tile_list(rectangles, 10, 10).tiles[:, 0]
    assert list(starts) == list(range(90, -1, -10))
