"""Pictures of plans show every live pair in the colour of its owner, which can be told apart."""

import colorspacious
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba

from cqs import make_plan
from cqs.patterns import causal, from_mask, global_tokens, sliding_window, strided
from cqs.plotting import plot_owners, save_owners
from cqs.plotting.colors import letter_color, task_colors


def colors(num_tasks):
    return np.array([to_rgba(color) for color in task_colors(num_tasks)])


def cells_of(axes):
    (mesh,) = axes.collections
    return np.asarray(mesh.get_array())


def owners(plan):
    """Return 1 more than the task that owns a pair, or 0."""
    found = np.zeros((plan.seqlen_q, plan.seqlen_kv), int)
    for task in plan.tasks:
        for queries, keys, is_stairs in task.blocks:
            part = found[queries.start : queries.stop, keys.start : keys.stop]
            part[np.tri(*part.shape, dtype=bool) if is_stairs else ...] = task.index + 1
    return found


@pytest.mark.parametrize("num_tasks", [1, 7])
@pytest.mark.parametrize(
    "pattern",
    [strided(5) | global_tokens(2), from_mask(np.random.default_rng(0).random((60, 75)) < 0.2)],
    ids=repr,
)
def test_short_plans_of_patterns_are_drawn_pair_by_pair(pattern, num_tasks):
    plan = make_plan(60, 75, num_tasks=num_tasks, pattern=pattern)
    live = pattern.to_mask(60, 75)
    expected = np.vstack([np.zeros(4), colors(num_tasks)])[owners(plan) * live]
    assert (expected[..., 3] == live).all()
    assert (cells_of(plot_owners(plan)) == expected).all()


def test_long_plans_of_patterns_are_drawn_by_parts_of_groups():
    pattern, length, num_tasks = causal() & sliding_window(5 * 10**6, 0), 10**9, 13
    plan = make_plan(length, num_tasks=num_tasks, pattern=pattern)
    axes = plot_owners(plan)
    image, bound = cells_of(axes), pattern.bind(length)
    edges = axes.collections[0].get_coordinates()[0, :, 0].astype(int).tolist()
    assert edges[0] == 0 and edges[-1] == length and len(edges) == 9 * num_tasks + 1
    assert {group.start for group in plan.token_groups} < set(edges)
    spans = [range(*pair) for pair in zip(edges[:-1], edges[1:], strict=True)]
    for i, queries in enumerate(spans):
        for j in range(max(i - 2, 0), min(i + 2, len(spans))):
            share = bound.count(queries, spans[j]) / (len(queries) * len(spans[j]))
            opacity = 0.6 + 0.4 * share if share else 0
            assert image[i, j, 3] == pytest.approx(opacity, abs=1e-6)
    assert not np.triu(image[..., 3], 1).any() and not np.tril(image[..., 3], -2).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_plans_without_a_pattern_are_drawn_as_blocks(is_causal):
    plan = make_plan(70, num_tasks=7, is_causal=is_causal)
    (polygons,) = plot_owners(plan).collections
    drawn = np.zeros((70, 70), int)
    points = np.stack(np.meshgrid(np.arange(70) + 0.5, np.arange(70) + 0.5), axis=-1)
    for path, face in zip(polygons.get_paths(), polygons.get_facecolors(), strict=True):
        (index,) = (colors(7) == face).all(axis=1).nonzero()[0]
        inside = path.contains_points(points.reshape(-1, 2)).reshape(70, 70)
        assert not drawn[inside].any()
        drawn[inside] = index + 1
    assert (drawn == owners(plan)).all()


@pytest.mark.parametrize("pattern", [None, strided(6)])
def test_one_worker_can_be_shown_alone(pattern):
    plan = make_plan(70, num_tasks=7, pattern=pattern)
    (drawn,) = plot_owners(plan, index=2).collections
    shown = drawn.get_facecolors() if pattern is None else np.asarray(drawn.get_array())
    shown = {tuple(color) for color in shown.reshape(-1, 4).tolist() if color[3]}
    assert shown == {to_rgba(task_colors(7)[2]), to_rgba("#e8e8e8")}
    with pytest.raises(ValueError, match=r"index must be in range\(7\), got 7"):
        plot_owners(plan, index=7)


@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (3, 200)], ids=str)
@pytest.mark.parametrize("pattern", [None, sliding_window(2, 1)])
def test_plans_of_hardly_anything_can_be_drawn(tmp_path, lengths, pattern):
    save_owners(make_plan(*lengths, num_tasks=3, pattern=pattern), tmp_path / "plan.png")
    assert not plt.get_fignums(), "saving leaves no figure open"


SIGHTS = (None, "protanomaly", "deuteranomaly", "tritanomaly")


def perceived(colors):
    """CAM02-UCS ``[4, ..., 3]`` of sRGB in [0, 1]: of normal sight, and without a kind of cones."""
    seen = []
    for sight in SIGHTS:
        space = "sRGB1" if sight is None else {"name": "sRGB1+CVD", "cvd_type": sight}
        severe = space if sight is None else space | {"severity": 100}
        rgb = np.clip(colorspacious.cspace_convert(colors, severe, "sRGB1"), 0, 1)
        seen.append(colorspacious.cspace_convert(rgb, "sRGB1", "CAM02-UCS"))
    return np.stack(seen)


def neighbours(plan):
    """The pairs of tasks whose pairs of tokens touch, as two arrays."""
    painted = owners(plan)
    sides = [(painted[1:], painted[:-1]), (painted[:, 1:], painted[:, :-1])]
    touching = np.concatenate([np.stack(side).reshape(2, -1) for side in sides], axis=1)
    return touching[:, (touching[0] != touching[1]) & touching.all(axis=0)] - 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_tasks", "least"), [(3, 45), (8, 18), (31, 8), (111, 3.9)])
def test_neighbours_can_be_told_apart(num_tasks, least, is_causal):
    """A difference of 1 is about the smallest that is seen."""
    first, second = neighbours(make_plan(4 * num_tasks, num_tasks=num_tasks, is_causal=is_causal))
    seen = perceived(np.array([to_rgb(color) for color in task_colors(num_tasks)]))
    difference = np.linalg.norm(seen[:, first] - seen[:, second], axis=-1)
    assert difference.min() >= least, dict(zip(SIGHTS, difference.min(axis=1), strict=True))


def test_letters_contrast_with_every_colour():
    def luminance(color):
        return colorspacious.cspace_convert(to_rgb(color), "sRGB1", "XYZ1")[1]

    for color in task_colors(128):
        light, dark = sorted((luminance(color), luminance(letter_color(color))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, color


def test_beyond_128_colours_repeat():
    assert task_colors(130)[128:] == task_colors(2)
    assert len(set(task_colors(128))) == 128
