"""Plot of the score matrix of a plan, coloured by owner."""

from pathlib import Path
from typing import Any

from cqs.plotting import figures
from cqs.plotting.colors import letter_color, task_colors
from cqs.plotting.density import count_cells, cut
from cqs.scheduler import Block, Plan

_SIZE = (7, 7)
"""Width and height of a new figure in inches."""
_STAIRS = 64
"""Largest causal square that is drawn step by step; larger ones are drawn as triangles."""
_NAMED = 16
"""Most tasks whose blocks are numbered, in a plan without a pattern."""
_NAME_POINTS = 8
"""Height of a number in points; its digits are narrower."""
_CELLS = 128
"""Most cells per axis in which long sequences are drawn with a pattern; see :func:`cut`."""
_PALEST = 0.6
"""Opacity of cells with almost no live pairs."""
_OTHERS = "#e8e8e8"
"""Colour of all tasks except the requested one."""


def plot_owners(plan: Plan, axes: Any = None, *, index: int | None = None) -> Any:
    """Plot the score matrix of a plan, with every live block or pair in the colour of its owner.

    Up to 128 tasks have different, colour-blind safe colours. With a pattern only live pairs are
    drawn. Long sequences are drawn in cells: the colour is that of the task with most of the cell,
    the opacity grows with the fraction of live pairs. A colour bar identifies tasks that are not
    numbered in the matrix.

    Args:
        plan: Any plan; drawing takes O(W^2) polygons, or 2^14 counts of cells, whatever the
            sequence length.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.
        index: Task to show in colour, with all others in grey; ``None`` shows all in colour.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: ``index`` is not the index of a task.
    """
    if index is not None:
        plan.task(index)
    axes = figures.new_axes(_SIZE) if axes is None else axes
    colors = [
        color if index in (None, owner) else _OTHERS
        for owner, color in enumerate(task_colors(plan.num_tasks))
    ]
    figures.label_tokens(axes, plan.seqlen_q, plan.seqlen_kv)
    named = f"{plan.num_tasks} tasks" if index is None else f"task {index} of {plan.num_tasks}"
    axes.set_title(f"{named}, {str(plan.kind).split(' (')[0]}")
    if plan.pattern is None:
        _draw_blocks(plan, axes, colors)
    else:
        _draw_live_pairs(plan, axes, colors)
    if index is None and (plan.num_tasks > _NAMED or plan.pattern is not None):
        figures.draw_key(axes, colors).ax.invert_yaxis()
    return axes


def save_owners(plan: Plan, path: str | Path) -> None:
    """Write :func:`plot_owners` to an image file, in the format of its suffix.

    Raises:
        NotImplementedError: matplotlib is not installed.
        ValueError: The format is unknown.
        OSError: The file cannot be written.
    """
    figures.check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="compressed")
    plot_owners(plan, figure.add_subplot())
    figures.save_figure(figure, path, dpi=150)


def _draw_blocks(plan: Plan, axes: Any, colors: list[str]) -> None:
    """Draw the blocks of each task in its color, with its number if there are few."""
    from matplotlib.collections import PolyCollection

    polygons = [_outline(block) for task in plan.tasks for block in task.blocks]
    faces = [color for task, color in zip(plan.tasks, colors, strict=True) for _ in task.blocks]
    width = min(0.5, figures.points_across(axes)[0] / plan.num_tasks / 16)
    axes.add_collection(
        PolyCollection(polygons, facecolors=faces, edgecolors="white", linewidths=width)
    )
    if plan.num_tasks <= _NAMED:
        for task, color in zip(plan.tasks, colors, strict=True):
            for block in task.blocks if color != _OTHERS else ():
                _name_owner(axes, task.index, block, letter_color(color))


def _name_owner(axes: Any, index: int, block: Block, color: str) -> None:
    """Draw a task's number in a block with enough space; half of a causal block is empty."""
    queries, keys, is_causal = block
    width, height = figures.points_across(axes)
    size = min(len(keys) * width / axes.viewLim.width, -len(queries) * height / axes.viewLim.height)
    if size >= _NAME_POINTS * (3 if is_causal else 1.5):
        x = keys.start + len(keys) * (1 / 3 if is_causal else 1 / 2)
        y = queries.start + len(queries) * (2 / 3 if is_causal else 1 / 2)
        style = {"ha": "center", "va": "center", "fontsize": _NAME_POINTS}
        axes.text(x, y, str(index), color=color, **style)


def _outline(block: Block) -> list[tuple[int, int]]:
    """Trace the live part of a block as (key, query) corners."""
    queries, keys, is_causal = block
    edge = [(keys.stop, queries.start), (keys.stop, queries.stop)]
    if is_causal and len(queries) > _STAIRS:
        edge = edge[1:]
    elif is_causal:
        stairs = zip(queries, keys, strict=True)
        edge = [(key + 1, corner) for query, key in stairs for corner in (query, query + 1)]
    return [(keys.start, queries.start), *edge, (keys.start, queries.stop)]


def _draw_live_pairs(plan: Plan, axes: Any, colors: list[str]) -> None:
    """Draw cells in the color of the task with most of their live pairs, paler with fewer pairs."""
    import numpy as np
    from matplotlib.colors import to_rgba

    bound = plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    rows, columns = (cut(groups, _CELLS) for groups in (plan.token_groups, plan.key_groups))
    sizes = np.outer(np.diff(rows), np.diff(columns))
    total, most = np.zeros(sizes.shape, int), np.zeros(sizes.shape, int)
    image = np.zeros((*sizes.shape, 4))
    for task, color in zip(plan.tasks, colors, strict=True):
        counts = np.zeros(sizes.shape, int)
        for queries, keys, _ in task.blocks:
            edges = np.clip(rows, queries.start, queries.stop).tolist()
            counts += count_cells(bound, edges, np.clip(columns, keys.start, keys.stop).tolist())
        image[counts > most] = to_rgba(color)
        total, most = total + counts, np.maximum(most, counts)
    image[..., 3] = np.where(total, _PALEST + (1 - _PALEST) * total / np.maximum(sizes, 1), 0)
    axes.pcolormesh(columns, rows, image, rasterized=True)
    if plan.num_tasks <= 40:
        for draw, groups in ((axes.axhline, plan.token_groups), (axes.axvline, plan.key_groups)):
            for group in groups[1:]:
                draw(group.start, color="black", linewidth=0.3, alpha=0.5)
