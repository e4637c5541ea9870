"""Plot of the parts of a layer's time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import new_axes

if TYPE_CHECKING:
    from cqs.report.measurement import Measurement

_COLORS = {
    "attention": "#0072b2",
    "feed-forward": "#56b4e9",
    "communication": "#d55e00",
    "rest": "#999999",
}
"""The colour-blind safe palette of Okabe and Ito."""


def plot_parts(rows: Sequence["Measurement"], axes: Any = None) -> Any:
    """Draw a stacked bar for each row: attention, feed-forward, communication, rest.

    Args:
        rows: Rows of the benchmark ``block``, in milliseconds of a step. Rows of one case are drawn
            together.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: There are no rows.
    """
    if not rows:
        raise ValueError("there are no rows to plot")
    cases = list(dict.fromkeys(row.case for row in rows))
    rows = sorted(rows, key=lambda row: cases.index(row.case))
    axes = new_axes((9, 1.5 + 0.3 * (len(rows) + len(cases)))) if axes is None else axes
    places = [i + cases.index(row.case) for i, row in enumerate(rows)]
    starts = [0.0] * len(rows)
    for part, color in _COLORS.items():
        widths = [row.details[f"{part}_ms"] for row in rows]
        axes.barh(places, widths, left=starts, color=color, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(places, [f"{row.case}  {row.executor}" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    axes.set_title(f"{rows[0].num_tasks} x {rows[0].device}, {rows[0].dtype}", fontsize="medium")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)
    return axes
