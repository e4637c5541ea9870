"""A quorum on the circle of token groups."""

from itertools import combinations, count
from math import cos, pi, sin
from typing import Any

from cqs.plotting.colors import task_colors
from cqs.plotting.figures import draw_key, new_axes, points_across, write_centred
from cqs.scheduler import Plan, owned_pairs, quorum, shared_pair

_NAME_POINTS = 8
"""Height of a number in points."""
_NUMBERS = 1.17
"""Radius of the circle of numbers."""
_HEIGHT = 2.6
"""Width and height of the picture in radii."""


def plot_wheel(plan: Plan, axes: Any = None, *, index: int = 0) -> Any:
    """Draw the quorum of a task as chords between token groups that lie on a circle.

    Of the chords that are as long one is solid: it owns the pairs at that distance. Others, of
    interest sets with more differences than needed, are dashed. The bar below has the distances
    from 1 to W / 2, each in the colour of the chord that covers it: as none is missing, turning the
    wheel by one group at a time, which makes the quorums of all tasks, lays a chord over every
    pair of groups. Each of them once, since a chord meets a pair again only after a full turn; but
    one of half a circle after half a turn, so for even W two tasks share it.

    Args:
        plan: Any plan; its lengths and pattern do not matter.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.
        index: Index of the task.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if there is no such ``index``, or the plan has no quorums.
    """
    from matplotlib.patches import Circle

    plan.task(index)
    axes = new_axes((6, 7)) if axes is None else axes
    axes.set(xlim=(-_HEIGHT / 2, _HEIGHT / 2), ylim=(-_HEIGHT / 2, _HEIGHT / 2), aspect="equal")
    axes.set_axis_off()
    axes.set_title(f"quorum of task {index} of {plan.num_tasks}")
    groups = [_on_circle(group / plan.num_tasks) for group in range(plan.num_tasks)]
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="0.85", zorder=0))
    axes.scatter(*zip(*groups, strict=True), s=6, color="0.6", zorder=2)
    members = quorum(index, plan.interest_set, plan.num_tasks)
    colors = task_colors(plan.num_tasks // 2)
    place = index, plan.interest_set, plan.num_tasks
    owned = {*owned_pairs(*place), shared_pair(*place)}
    for first, second in combinations(members, 2):
        distance = min((first - second) % plan.num_tasks, (second - first) % plan.num_tasks)
        is_owner = not owned.isdisjoint({(first, second), (second, first)})
        axes.plot(
            *zip(groups[first], groups[second], strict=True),
            color=colors[distance - 1] if is_owner else "0.7",
            linestyle="-" if is_owner else "--",
            linewidth=2 if is_owner else 0.8,
            zorder=1 if is_owner else 0,
        )
    axes.scatter(
        *zip(*(groups[member] for member in members), strict=True), color="black", zorder=3
    )
    _number_groups(axes, plan.num_tasks, members)
    if colors:
        draw_key(axes, colors, 1, "distance", "bottom")
    return axes


def _on_circle(turn: float, radius: float = 1.0) -> tuple[float, float]:
    """Return where a point of the circle lies: 0 turns at the top, the others clockwise."""
    return radius * sin(2 * pi * turn), radius * cos(2 * pi * turn)


def _number_groups(axes: Any, num_groups: int, members: tuple[int, ...]) -> None:
    """Number the groups at the smallest regular steps that have room, members in bold."""
    point = _HEIGHT / min(points_across(axes))
    width = _NAME_POINTS * (0.8 + 0.6 * len(str(num_groups))) * point
    most = max(int(2 * pi * _NUMBERS / width), 1)
    step = next(step for step in count(1) if step * most >= num_groups)
    for group in range(0, num_groups - step + 1, step):
        style = {"fontsize": _NAME_POINTS, "weight": "bold" if group in members else "normal"}
        write_centred(axes, _on_circle(group / num_groups, _NUMBERS), str(group), **style)
