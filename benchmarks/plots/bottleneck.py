"""Plot of the parts of a layer's time by sequence length."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Rows of the benchmark ``bottleneck``, as the JSON objects of its files."""

_COLORS = {
    "attention": "#0072b2",
    "projections": "#56b4e9",
    "feed-forward": "#e69f00",
    "norms": "#cc79a7",
    "rest": "#bbbbbb",
}
"""The colour-blind safe palette of Okabe and Ito, and grey."""


def plot_bottleneck(rows: Rows) -> Any:
    """Plot a stacked bar of shares for each length, in a panel for each model and attention.

    Args:
        rows: At least one row.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["case"].rpartition("-")[0], row["executor"]), []).append(row)
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    width = 6.4 if columns == 1 else 8.2  # inches; the legend fills the narrower one
    figure = Figure(figsize=(width, 0.8 + 2.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
    for axes, ((model, attention), found) in zip(grid, panels.items(), strict=False):
        found = sorted(found, key=lambda row: row["details"]["tokens"])
        labels = [f"{row['details']['tokens'] / 1024:g}K" for row in found]
        starts = [0.0] * len(found)
        for part, color in _COLORS.items():
            totals = [sum(row["details"][each] for each in _COLORS) for row in found]
            shares = [
                100 * row["details"][part] / total for row, total in zip(found, totals, strict=True)
            ]
            axes.bar(labels, shares, bottom=starts, color=color, label=part)
            starts = [start + share for start, share in zip(starts, shares, strict=True)]
        axes.set_title(f"{model}, {attention}", fontsize="medium")
        axes.set_ylim(0, 100)
    for axes in list(grid):
        axes.set_axis_off()
    figure.supxlabel("tokens", fontsize="medium")
    figure.supylabel("share of a layer's time, %", fontsize="medium")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    return figure
