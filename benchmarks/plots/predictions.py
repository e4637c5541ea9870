"""Plots of the predictions of ``cqs simulate``."""

from collections.abc import Mapping
from typing import Any

from cqs.plotting.figures import save_figure
from cqs.scheduler.cost_model import Prediction

_STYLES = {
    "cqs quorums": ("#0072b2", "-o"),
    "cqs": ("#56b4e9", "-s"),
    "ring": ("#d55e00", "-^"),
    "all-gather": ("#999999", ":v"),
    "ulysses": ("#009e73", "--D"),
    "2-D": ("#000000", "-x"),
}
"""Colour, line and marker of each method; the colours are the colour-blind safe palette of Okabe
and Ito."""


def draw_predictions(
    found: Mapping[int, Mapping[str, Prediction]],
    one_device_seconds: float,
) -> Any:
    """Plot memory, traffic and efficiency of methods against the number of devices.

    Args:
        found: Predictions by number of devices, then by method.
        one_device_seconds: Predicted time of one device in seconds, for the efficiency.

    Returns:
        The three matplotlib axes.
    """
    from matplotlib.ticker import LogLocator

    axes = new_panels(13, 3)
    quantities = (
        ("peak memory of a device in GiB", lambda each, devices: each.peak_bytes / 2**30),
        ("GiB received by a device", lambda each, devices: each.bytes_received / 2**30),
        ("efficiency", lambda each, devices: one_device_seconds / devices / each.seconds),
    )
    for panel, (label, quantity) in zip(axes, quantities, strict=True):
        for name, (color, line) in _STYLES.items():
            points = [
                (devices, quantity(methods[name], devices))
                for devices, methods in sorted(found.items())
                if name in methods
            ]
            if points:
                panel.plot(*zip(*points, strict=True), line, color=color, label=name)
        panel.set_xscale("log", base=2)
        panel.set(xlabel="devices", ylabel=label)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.grid(alpha=0.3)
    for panel in axes[:2]:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
    axes[2].set_ylim(0, 1.05)
    axes[2].legend(loc="lower left")
    return axes


def save(axes: Any, path: str) -> None:
    """Write the figure of the axes to a file, in the format of its suffix."""
    save_figure(axes[0].figure, path, dpi=100)


def new_panels(width: float, number: int) -> Any:
    """Return the axes of a new figure, side by side.

    Args:
        width: Width of the figure in inches.
        number: Number of axes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure.subplots(1, number, squeeze=False).ravel()
