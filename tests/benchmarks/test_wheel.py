"""The wheel shows a quorum, and a chord for every distance."""

import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex

from benchmarks.plots.wheel import plot_wheel
from cqs import make_plan
from cqs.plotting.colors import task_colors


def chords(axes, num_tasks):
    """The solid lines between dots: their two groups and their colour."""
    dots = [tuple(point) for point in axes.collections[0].get_offsets().round(6).tolist()]
    assert len(dots) == num_tasks
    for line in axes.lines:
        ends = [tuple(point) for point in line.get_xydata().round(6).tolist()]
        if line.get_linestyle() == "-" and set(ends) <= set(dots):
            yield tuple(sorted(map(dots.index, ends))), to_hex(line.get_color())


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 8, 13, 31, 111])
def test_a_chord_covers_every_distance(num_tasks):
    plan = make_plan(10, num_tasks=num_tasks)
    axes = plot_wheel(plan)
    found = {}
    for (first, second), color in chords(axes, num_tasks):
        distance = min(second - first, first - second + num_tasks)
        assert {first, second} <= set(plan.interest_set) and distance not in found
        found[distance] = color
    assert found == dict(enumerate(task_colors(num_tasks // 2), 1))
    bars = [other for other in axes.figure.axes if other is not axes]
    assert len(bars) == bool(found)
    for bar in bars:
        (boxes,) = (mesh for mesh in bar.collections if isinstance(mesh, QuadMesh))
        assert [to_hex(color) for color in boxes.to_rgba(boxes.get_array().ravel())] == list(
            found[distance] for distance in sorted(found)
        )
        assert bar.get_xlim() == (0.5, num_tasks // 2 + 0.5)


def test_turning_the_wheel_lays_a_chord_over_every_pair_of_groups_once():
    plan = make_plan(10, num_tasks=7)
    met = [pair for index in range(7) for pair, _ in chords(plot_wheel(plan, index=index), 7)]
    assert sorted(met) == [(p, q) for p in range(7) for q in range(p + 1, 7)]


def test_an_unknown_worker_is_refused():
    with pytest.raises(ValueError, match=r"index must be in range\(7\), got -1"):
        plot_wheel(make_plan(10, num_tasks=7), index=-1)
