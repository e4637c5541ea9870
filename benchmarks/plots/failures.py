"""What failures cost."""

from collections.abc import Sequence
from typing import Any

from benchmarks.plots.predictions import new_panels

_WAYS = ("#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#000000")


def draw_trouble(means: Sequence[tuple[str, float, float]]) -> Any:
    """Draw how long calls take against how many deaths they meet.

    Args:
        means: Name of a way to work, deaths to be expected while all devices compute without loss,
            and the mean time over the time without loss.

    Returns:
        The matplotlib axes, in an array of one.
    """
    axes = new_panels(6.5, 1)
    for color, name in zip(_WAYS, dict.fromkeys(name for name, _, _ in means), strict=False):
        points = sorted((deaths, ratio) for each, deaths, ratio in means if each == name)
        axes[0].plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    axes[0].set(
        xscale="log",
        yscale="log",
        xlabel="deaths expected in the ideal time of a call",
        ylabel="mean time over the ideal",
    )
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter("")
    axes[0].grid(alpha=0.3, which="both")
    axes[0].legend()
    return axes
