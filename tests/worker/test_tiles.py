import numpy as np
import pytest

from cqs.scheduler import make_plan
from cqs.worker.rectangle import Rectangle
from cqs.worker.triton.tiles import (
    FAR,
    Band,
    Span,
    make_tile_list,
    query_spans,
    united_key_spans,
    united_query_spans,
)


def visits(found, shape, tile_rows, block):
    """How often each pair is visited, as the kernels read the list: the output rows first."""
    count = np.zeros(shape, int)
    for start, stop, row, first, banded_stop, last, num_full, _ in found.tiles:
        assert 0 < stop - start <= tile_rows and first < last
        for i in range(first, last):
            k0, k1, low, high = found.runs[i]
            assert k0 < k1
            assert i < banded_stop or (k1 - k0) % block == 0
            distance = np.arange(k0, k1) - np.arange(start, stop)[:, None]
            count[row : row + stop - start, k0:k1] += (distance >= low) & (distance <= high)
        full = found.runs[banded_stop:last]
        assert num_full == (full[:, 1] - full[:, 0]).sum() // block
    return count


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_workers", [1, 2, 7, 8])
@pytest.mark.parametrize("lengths", [(200, 200), (131, 300), (300, 131), (5, 5)], ids=str)
def test_every_pair_of_a_plan_is_visited_once(lengths, num_workers, is_causal, block):
    plan = make_plan(*lengths, num_workers=num_workers, is_causal=is_causal, tile=16)
    rectangles = [
        Rectangle(step.queries, step.keys, step.causal_keys)
        for task in plan.tasks
        for step in task.steps
    ]
    live = np.ones(lengths, int)
    if is_causal:
        live = np.tril(live, lengths[1] - lengths[0])

    queries = np.concatenate([np.array(rectangle.queries) for rectangle in rectangles])
    found = make_tile_list(query_spans(rectangles), 32, block, packed=True)
    total = np.zeros(lengths, int)
    np.add.at(total, queries, visits(found, (len(queries), lengths[1]), 32, block))
    assert (total == live).all()

    found = make_tile_list(united_query_spans(rectangles), 32, block)
    assert (visits(found, lengths, 32, block) == live).all()
    found = make_tile_list(united_key_spans(rectangles), 32, block)
    assert (visits(found, lengths[::-1], 32, block) == live.T).all()
    for united in (united_query_spans(rectangles), united_key_spans(rectangles)):
        rows = [row for span in united for row in span.rows]
        assert len(rows) == len(set(rows))


@pytest.mark.parametrize("block", [1, 8, 128])
@pytest.mark.parametrize(("low", "high"), [(-7, 3), (-40, -20), (0, 0), (5, 90), (-FAR, -3)])
def test_bands_are_visited_once(low, high, block):
    found = make_tile_list([Span(range(3, 100), (Band(10, 95, low, high),))], 32, block)
    distance = np.arange(95) - np.arange(100)[:, None]
    live = (distance >= low) & (distance <= high)
    live[:3] = live[:, :10] = False
    assert (visits(found, (100, 95), 32, block) == live).all()


def test_most_work_comes_first():
    spans = query_spans([Rectangle(range(0, 100), (), range(0, 100))])
    starts = make_tile_list(spans, 10, 10).tiles[:, 0]
    assert list(starts) == list(range(90, -1, -10))
