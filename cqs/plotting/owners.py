"""The score matrix of a plan, by owner."""

from bisect import bisect, bisect_left
from pathlib import Path
from typing import Any

from cqs.plotting.figures import check_picture, new_axes
from cqs.scheduler import Block, Plan

_SIZE = (7, 7)
"""Inches, of a new figure."""
_GOLDEN_RATIO = 0.618033988749895
_STAIRS = 64
"""Causal squares of up to so many queries are drawn step by step, larger ones as triangles."""
_NAMED = 16
"""Up to so many workers are named."""
_NAMED_SHARE = 0.5
"""With a pattern, in blocks of at least this share of the live pairs of their largest."""
_EXACT = 256
"""With a pattern, sequences of up to so many tokens are drawn pair by pair."""
_CELLS = 128
"""Longer ones in so many cells each way."""
_PALEST = 0.25
"""Opacity of cells with hardly a live pair."""


def plot_owners(plan: Plan, axes: Any = None) -> Any:
    """Draw the score matrix of ``plan``, every live block or pair in the colour of its owner.

    Colours run through viridis in golden-ratio steps: workers of adjacent numbers differ in
    lightness, so the picture survives print and colour blindness. Of a plan with a pattern live
    pairs alone are drawn, or where there are too many to see, cells: in the colour of the worker
    that owns most of the cell, the paler the fewer of its pairs are live.

    Args:
        plan: Any plan; drawing takes O(W^2) polygons, or 2^14 counts of cells, whatever the
            sequence length.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes(_SIZE) if axes is None else axes
    axes.set(
        xlim=(0, max(plan.seqlen_kv, 1)),
        ylim=(max(plan.seqlen_q, 1), 0),
        xlabel="key",
        ylabel="query",
        title=f"{plan.num_workers} workers, interest set {plan.interest_set}",
        aspect="equal" if plan.seqlen_q == plan.seqlen_kv else "auto",
    )
    if plan.pattern is None:
        _draw_blocks(plan, axes)
    else:
        _draw_live_pairs(plan, axes)
    return axes


def _color(worker: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](worker * _GOLDEN_RATIO % 1.0)


def _draw_blocks(plan: Plan, axes: Any) -> None:
    from matplotlib.collections import PolyCollection

    polygons, colors = [], []
    for task in plan.tasks:
        for block in task.blocks:
            polygons.append(_outline(block))
            colors.append(_color(task.worker))
    edges = "white" if plan.num_workers <= 40 else "face"
    axes.add_collection(
        PolyCollection(polygons, facecolors=colors, edgecolors=edges, linewidths=0.5)
    )
    if plan.num_workers <= _NAMED:
        for task in plan.tasks:
            for queries, keys, is_causal in task.blocks:
                middle = keys.start + len(keys) * (1 / 3 if is_causal else 1 / 2)
                axes.text(
                    middle,
                    queries.start + len(queries) * (2 / 3 if is_causal else 1 / 2),
                    str(task.worker),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if task.worker * _GOLDEN_RATIO % 1.0 < 0.6 else "black",
                )


def _draw_live_pairs(plan: Plan, axes: Any) -> None:
    import numpy as np

    is_small = max(plan.seqlen_q, plan.seqlen_kv) <= _EXACT
    num_cells = _EXACT if is_small else _CELLS
    rows, columns = (_cut(length, num_cells) for length in (plan.seqlen_q, plan.seqlen_kv))
    sizes = np.outer(np.diff(rows), np.diff(columns))
    total, most = np.zeros(sizes.shape, int), np.zeros(sizes.shape, int)
    image = np.zeros((*sizes.shape, 4))
    for task in plan.tasks:
        of_blocks = [_count_live(plan, block, rows, columns) for block in task.blocks]
        counts = sum(of_blocks, np.zeros(sizes.shape, int))
        image[counts > most] = _color(task.worker)
        total, most = total + counts, np.maximum(most, counts)
        if plan.num_workers <= _NAMED:
            least = _NAMED_SHARE * max((of_block.sum() for of_block in of_blocks), default=0)
            for of_block in of_blocks:
                if of_block.sum() >= least:
                    _name_owner(axes, task.worker, of_block, rows, columns)
    image[..., 3] = np.where(total, _PALEST + (1 - _PALEST) * total / np.maximum(sizes, 1), 0)
    axes.imshow(
        image,
        interpolation="nearest",
        aspect=axes.get_aspect(),
        extent=(0, max(plan.seqlen_kv, 1), max(plan.seqlen_q, 1), 0),
    )
    if plan.num_workers <= 40:
        for draw, groups in ((axes.axhline, plan.token_groups), (axes.axvline, plan.key_groups)):
            for group in groups[1:]:
                draw(group.start, color="black", linewidth=0.3, alpha=0.5)


def _count_live(plan: Plan, block: Block, rows: list[int], columns: list[int]) -> Any:
    """Count the live pairs of a block in every cell of a grid ``[rows, columns]``."""
    import numpy as np

    bound = plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    queries, keys, _ = block
    counts = np.zeros((len(rows) - 1, len(columns) - 1), int)
    for i in range(bisect(rows, queries.start) - 1, bisect_left(rows, queries.stop)):
        in_row = range(max(rows[i], queries.start), min(rows[i + 1], queries.stop))
        if not bound.count(in_row, keys):
            continue
        for j in range(bisect(columns, keys.start) - 1, bisect_left(columns, keys.stop)):
            in_column = range(max(columns[j], keys.start), min(columns[j + 1], keys.stop))
            counts[i, j] = bound.count(in_row, in_column)
    return counts


def _name_owner(axes: Any, worker: int, counts: Any, rows: list[int], columns: list[int]) -> None:
    """Write a worker's number at the live cell that is nearest to the middle of all."""
    from matplotlib.patheffects import withStroke

    cells = (counts > 0).nonzero()
    distance = sum((of - (of * counts[cells]).sum() / counts.sum()) ** 2 for of in cells)
    row, column = (of[distance.argmin()] for of in cells)
    axes.text(
        (columns[column] + columns[column + 1]) / 2,
        (rows[row] + rows[row + 1]) / 2,
        str(worker),
        ha="center",
        va="center",
        fontsize=8,
        path_effects=[withStroke(linewidth=2, foreground="white")],
    )


def _cut(length: int, parts: int) -> list[int]:
    """Return where ``parts`` cells of a sequence begin, fewer if it is short, and its end."""
    parts = max(min(parts, length), 1)
    return [length * i // parts for i in range(parts + 1)]


def save_owners(plan: Plan, path: str | Path) -> None:
    """Draw :func:`plot_owners` into an image file of the format that its name ends in.

    Raises:
        NotImplementedError: if matplotlib is not installed.
        ValueError: if the format is unknown.
        OSError: if the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    plot_owners(plan, figure.add_subplot()).figure.savefig(path, dpi=150)


def _outline(block: Block) -> list[tuple[int, int]]:
    """Trace the live part of a block as (key, query) corners."""
    queries, keys, is_causal = block
    if not is_causal:
        return [
            (keys.start, queries.start),
            (keys.stop, queries.start),
            (keys.stop, queries.stop),
            (keys.start, queries.stop),
        ]
    if len(queries) > _STAIRS:
        return [
            (keys.start, queries.start),
            (keys.stop, queries.stop),
            (keys.start, queries.stop),
        ]
    corners = [(keys.start, queries.start)]
    for query, key in zip(queries, keys, strict=True):
        corners += [(key + 1, query), (key + 1, query + 1)]
    return [*corners, (keys.start, queries.stop)]
