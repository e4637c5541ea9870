"""Pictures of plans show every live pair in the colour of its owner."""

import matplotlib.pyplot
import numpy as np
import pytest

from cqs import make_plan
from cqs.patterns import bigbird, causal, from_mask, global_tokens, sliding_window, strided
from cqs.plotting import plot_owners


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    matplotlib.pyplot.close("all")


def colors():
    return [matplotlib.colormaps["viridis"](w * 0.618033988749895 % 1) for w in range(13)]


def image_of(axes):
    (image,) = axes.images
    return np.asarray(image.get_array())


@pytest.mark.parametrize("num_workers", [1, 3, 7, 13])
@pytest.mark.parametrize(
    "pattern",
    [
        sliding_window(9, 4),
        strided(5) | global_tokens(2),
        bigbird(block=8, random_blocks=1),
        from_mask(np.random.default_rng(0).random((60, 75)) < 0.2),
    ],
    ids=repr,
)
def test_short_plans_of_patterns_are_drawn_pair_by_pair(pattern, num_workers):
    plan = make_plan(60, 75, num_workers=num_workers, pattern=pattern)
    live = pattern.to_mask(60, 75)
    expected = np.zeros((60, 75, 4))
    for task in plan.tasks:
        for queries, keys, _ in task.blocks:
            part = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
            expected[part][live[part]] = colors()[task.worker]
    assert (expected[..., 3] == live).all()
    assert (image_of(plot_owners(plan)) == expected).all()


def test_long_plans_of_patterns_are_drawn_by_cells():
    pattern, cell = causal() & sliding_window(5 * 10**6, 0), 10**9 // 128
    plan = make_plan(10**9, num_workers=13, pattern=pattern)
    image = image_of(plot_owners(plan))
    assert image.shape == (128, 128, 4)
    bound = pattern.bind(10**9)
    spans = [range(i * 10**9 // 128, (i + 1) * 10**9 // 128) for i in range(128)]
    for i, queries in enumerate(spans):
        for j in range(max(i - 2, 0), min(i + 2, 128)):
            count = bound.count(queries, spans[j])
            assert (image[i, j, 3] > 0) == (count > 0)
            if count:
                assert image[i, j, 3] == pytest.approx(0.25 + 0.75 * count / cell**2, abs=1e-6)
    assert not np.triu(image[..., 3], 1).any() and not np.tril(image[..., 3], -2).any()
    known = np.array(colors())[:, :3]
    for i, queries in enumerate(spans):  # of the cell on the diagonal, whoever owns most
        owned = [
            sum(
                bound.count(
                    range(max(q.start, queries.start), max(min(q.stop, queries.stop), q.start)),
                    range(max(k.start, queries.start), max(min(k.stop, queries.stop), k.start)),
                )
                for q, k, _ in task.blocks
            )
            for task in plan.tasks
        ]
        assert (image[i, i, :3] == known[np.argmax(owned)]).all()


@pytest.mark.parametrize("num_workers", [7, 13])
def test_all_who_work_are_named(num_workers):
    plan = make_plan(150, num_workers=num_workers, pattern=strided(6))
    names = {int(text.get_text()) for text in plot_owners(plan).texts}
    assert names == {task.worker for task in plan.tasks if task.live_pairs}


@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (0, 5), (3, 200)], ids=str)
def test_plans_of_hardly_anything_can_be_drawn(tmp_path, lengths):
    for pattern in (None, sliding_window(2, 1)):
        plot_owners(make_plan(*lengths, num_workers=3, pattern=pattern)).figure.savefig(
            tmp_path / "plan.png"
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_plans_without_a_pattern_are_drawn_as_blocks(is_causal):
    plan = make_plan(70, num_workers=7, is_causal=is_causal)
    axes = plot_owners(plan)
    (polygons,) = axes.collections
    assert not axes.images and len(polygons.get_paths()) == sum(len(t.blocks) for t in plan.tasks)
