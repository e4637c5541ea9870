"""A quorum on the circle of token groups."""

from collections.abc import Sequence
from itertools import combinations
from math import cos, pi, sin
from typing import Any

from cqs.plotting.colors import task_colors
from cqs.plotting.figures import new_axes, points_across, write_centred
from cqs.scheduler import Plan, quorum
from cqs.scheduler.quorum import pair_offsets

_NAME_POINTS = 8
"""Height of a number in points."""
_NUMBERS = 1.17
"""Radius of the circle of numbers."""
_EDGE = 1.3
"""How far the picture reaches above the middle of the circle and beside it, in radii."""
_HEIGHT = 3.4
"""Of the picture, in radii."""
_ROW = -1.85
"""Where the row of distances stands, below the middle of the circle."""


def plot_wheel(plan: Plan, axes: Any = None, *, index: int = 0) -> Any:
    """Draw the quorum of a task as chords between token groups that lie on a circle.

    Of the chords that are as long one is solid: it owns the pairs at that distance. Others, of
    interest sets with more differences than needed, are dashed. The boxes below are the distances
    from 1 to W / 2, each in the colour of the chord that covers it: as none is empty, turning the
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
    axes.set(xlim=(-_EDGE, _EDGE), ylim=(_EDGE - _HEIGHT, _EDGE), aspect="equal")
    axes.set_axis_off()
    axes.set_title(f"quorum of task {index} of {plan.num_tasks}")
    groups = [_on_circle(group / plan.num_tasks) for group in range(plan.num_tasks)]
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="0.85", zorder=0))
    axes.scatter(*zip(*groups, strict=True), s=6, color="0.6", zorder=2)
    members = quorum(index, plan.interest_set, plan.num_tasks)
    colors = task_colors(plan.num_tasks // 2)
    owners = _owning_pairs(plan, index)
    for first, second in combinations(members, 2):
        distance = min((first - second) % plan.num_tasks, (second - first) % plan.num_tasks)
        is_owner = (first, second) in owners
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
    _draw_distances(axes, colors)
    return axes


def _on_circle(turn: float, radius: float = 1.0) -> tuple[float, float]:
    """Return where a point of the circle lies: 0 turns at the top, the others clockwise."""
    return radius * sin(2 * pi * turn), radius * cos(2 * pi * turn)


def _owning_pairs(plan: Plan, index: int) -> set[tuple[int, int]]:
    """List the pairs of groups, ascending, that the task owns, alone or with another."""
    partners, shared = pair_offsets(plan.interest_set, plan.num_tasks)
    pairs = [(a, b) for a, offsets in partners.items() for b in offsets]
    moved = [
        [(offset + index) % plan.num_tasks for offset in pair]
        for pair in (pairs if shared is None else [*pairs, shared])
    ]
    return {(min(pair), max(pair)) for pair in moved}


def _number_groups(axes: Any, num_groups: int, members: tuple[int, ...]) -> None:
    """Number all groups if there is room, or those of the quorum, moved apart, or none."""
    point = _HEIGHT / min(points_across(axes))
    needed = _width_of(num_groups) * point / (2 * pi * _NUMBERS)
    numbered = range(num_groups) if num_groups * needed <= 1 else members
    if len(numbered) * needed > 1:
        return
    for group, turn in zip(numbered, _move_apart(numbered, num_groups, needed), strict=True):
        dot, edge = _on_circle(group / num_groups), _on_circle(turn, _NUMBERS - 6 * point)
        axes.plot(*zip(dot, edge, strict=True), color="0.7", linewidth=0.5, zorder=0)
        style = {"fontsize": _NAME_POINTS, "weight": "bold" if group in members else "normal"}
        write_centred(axes, _on_circle(turn, _NUMBERS), str(group), **style)


def _move_apart(groups: Sequence[int], num_groups: int, least: float) -> list[float]:
    """Return where on the circle to number groups, in turns, ``least`` apart or nearly so."""
    turns = [group / num_groups for group in groups]
    for _ in range(200):
        for i in range(len(turns)):
            before = turns[i - 1] - (i == 0)
            missing = least - (turns[i] - before)
            if missing > 0 and len(turns) > 1:
                turns[i] += missing / 2
                turns[i - 1] -= missing / 2
    return turns


def _width_of(number: int) -> float:
    """Return how many points to keep free for a number and around it."""
    return _NAME_POINTS * (0.8 + 0.6 * len(str(number)))


def _draw_distances(axes: Any, colors: list[str]) -> None:
    """Draw a row of boxes, one for each distance, and number as many as there is room for."""
    from matplotlib.patches import Rectangle

    axes.text(0, _ROW + 0.2, "distances", ha="center", va="bottom", fontsize=_NAME_POINTS)
    width = 2 / max(len(colors), 6)
    point = _HEIGHT / min(points_across(axes))
    needed = _width_of(len(colors)) * point
    steps = (1, 5, 10, 50, 100, 500, 1000)
    step = next((step for step in steps if step * width >= needed), len(colors))
    for distance, color in enumerate(colors, 1):
        left = (distance - 1 - len(colors) / 2) * width
        axes.add_patch(Rectangle((left, _ROW), 0.9 * width, 0.15, facecolor=color))
        if distance % step == 0:
            middle = left + width / 2
            axes.text(
                middle, _ROW - 0.05, str(distance), ha="center", va="top", fontsize=_NAME_POINTS
            )
