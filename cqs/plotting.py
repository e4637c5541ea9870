"""Pictures of plans and of measurements."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cqs.scheduler import Block, Plan

if TYPE_CHECKING:
    from cqs.bench.measurement import Measurement

_GOLDEN_RATIO = 0.618033988749895
_STAIRS = 64
"""Causal squares of up to so many queries are drawn step by step, larger ones as triangles."""


def plot_owners(plan: Plan, axes: Any = None) -> Any:
    """Draw the score matrix of ``plan``, every live block in the colour of its owner.

    Colours run through viridis in golden-ratio steps: workers of adjacent numbers differ in
    lightness, so the picture survives print and colour blindness.

    Args:
        plan: Any plan; drawing takes O(W^2) polygons whatever the sequence length.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    import matplotlib
    from matplotlib.collections import PolyCollection

    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=(7, 7), layout="constrained").add_subplot()
    colormap = matplotlib.colormaps["viridis"]
    polygons, colors = [], []
    for task in plan.tasks:
        color = colormap(task.worker * _GOLDEN_RATIO % 1.0)
        for block in task.blocks:
            polygons.append(_outline(block))
            colors.append(color)
    edges = "white" if plan.num_workers <= 40 else "face"
    axes.add_collection(
        PolyCollection(polygons, facecolors=colors, edgecolors=edges, linewidths=0.5)
    )
    if plan.num_workers <= 16:
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
    axes.set(
        xlim=(0, max(plan.seqlen_kv, 1)),
        ylim=(max(plan.seqlen_q, 1), 0),
        xlabel="key",
        ylabel="query",
        title=f"{plan.num_workers} workers, interest set {plan.interest_set}",
        aspect="equal" if plan.seqlen_q == plan.seqlen_kv else "auto",
    )
    return axes


def save_owners(plan: Plan, path: str | Path) -> None:
    """Draw :func:`plot_owners` into an image file of the format that its name ends in.

    Raises:
        NotImplementedError: if matplotlib is not installed.
        ValueError: if the format is unknown.
        OSError: if the file cannot be written.
    """
    check_picture(path)
    plot_owners(plan).figure.savefig(path, dpi=150)


def check_picture(path: str | Path) -> None:
    """Raise what :func:`save_owners` would raise for ``path``, before there is a plan to draw."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise NotImplementedError(
            f"pictures need matplotlib: pip install 'cqs[plots]' ({error})"
        ) from error
    path = Path(path)
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"a picture's name must end in one of {sorted(formats)}, got '{path}'")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"cannot write a picture to '{path}'")


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


def plot_speedups(rows: "Sequence[Measurement]", axes: Any = None) -> Any:
    """Plot the speed-up of patterns over dense attention against the sequence length.

    Args:
        rows: Of ``cqs bench patterns``; forward passes by ``cqs`` are drawn.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    import matplotlib.pyplot as plt

    if axes is None:
        _, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.executor == "cqs" and row.benchmark == "patterns forward":
            name = row.case.rpartition("-")[0]
            lines.setdefault(name, []).append((row.details["tokens"], 1 / row.ratio))
    markers = "osD^v<>PX*"
    for i, (name, points) in enumerate(lines.items()):
        tokens, speedups = zip(*sorted(points), strict=True)
        axes.plot(tokens, speedups, marker=markers[i // 10 % 10], color=f"C{i % 10}", label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"speed-up over {rows[0].baseline} attention")
    axes.set_title(f"{rows[0].device}, {rows[0].dtype}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return axes
