"""Pictures of what ``cqs simulate`` predicts; matplotlib is imported when one is drawn."""

from collections.abc import Mapping
from typing import Any

from cqs.plotting.figures import save_figure
from cqs.simulation import Forecast

_STYLES = {
    "cqs quorums": ("#0072b2", "-o"),
    "cqs": ("#56b4e9", "-s"),
    "ring": ("#d55e00", "-^"),
    "all-gather": ("#999999", ":v"),
    "ulysses": ("#009e73", "--D"),
    "2-D": ("#000000", "-x"),
}
"""Colours of Okabe and Ito, which colour-blind people tell apart; lines and markers."""


def draw_forecasts(found: Mapping[int, Mapping[str, Forecast]], seconds_of_one: float) -> Any:
    """Draw memory, traffic and efficiency of methods against the number of devices.

    Args:
        found: By number of devices, and by name of the method.
        seconds_of_one: Of one device.

    Returns:
        The three matplotlib axes.
    """
    from matplotlib.ticker import LogLocator

    axes = new_panels(13, 3)
    quantities = (
        ("GiB that a device holds", lambda each, devices: each.peak_bytes / 2**30),
        ("GiB that a device receives", lambda each, devices: each.bytes_each_way / 2**30),
        ("efficiency", lambda each, devices: seconds_of_one / devices / each.seconds),
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
    """Write the figure of some axes to a file; its name says in which format."""
    save_figure(axes[0].figure, path, dpi=100)


def new_panels(width: float, number: int) -> Any:
    """Return the axes of a new figure with so many panels, ``width`` inches wide together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure.subplots(1, number, squeeze=False)[0]
