"""Plot of the cost of failures."""

from collections.abc import Sequence
from typing import Any

from benchmarks.plots.predictions import new_panels

_COLORS = ("#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#000000")


def draw_failures(means: Sequence[tuple[str, float, float]]) -> Any:
    """Plot the time of calls against the expected number of failures per call.

    Args:
        means: Name of a schedule, number of failures expected in the ideal time of a call, and mean
            time divided by the ideal time.

    Returns:
        The matplotlib axes, in an array of one.
    """
    axes = new_panels(6.5, 1)
    for color, name in zip(_COLORS, dict.fromkeys(name for name, _, _ in means), strict=False):
        points = sorted((failures, ratio) for each, failures, ratio in means if each == name)
        axes[0].plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    axes[0].set(
        xscale="log",
        yscale="log",
        xlabel="failures expected in the ideal time of a call",
        ylabel="mean time / ideal time",
    )
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter("")
    axes[0].grid(alpha=0.3, which="both")
    axes[0].legend()
    return axes
