"""Plots of the speed-up of patterns over dense attention."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cqs.plotting.colors import OKABE_ITO
from cqs.plotting.figures import PLAIN, add_legend, new_axes

Rows = Sequence[Mapping[str, Any]]
"""Rows of the benchmark ``patterns``, as the JSON objects of its files."""


def plot_speedups(rows: Rows, axes: Any = None) -> Any:
    """Plot a bar for each pattern at the longest length, the fastest on top, and dots at others.

    Args:
        rows: Rows of one device; forward passes by ``cqs`` are drawn.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes((7, 6)) if axes is None else axes
    found = _speedups(rows)
    longest = max(tokens for speedups in found.values() for tokens in speedups)
    names = sorted(found, key=lambda name: found[name].get(longest, 0))
    names = [name for name in names if longest in found[name]]
    axes.barh(names, [found[name][longest] for name in names], color=OKABE_ITO[0], label=longest)
    shorter = sorted({tokens for name in names for tokens in found[name]} - {longest})
    for i, tokens in enumerate(shorter):
        points = [(found[name][tokens], name) for name in names if tokens in found[name]]
        shade = str(0.8 - 0.7 * i / len(shorter))
        axes.plot(*zip(*points, strict=True), "o", ms=3.5, color=shade, label=tokens)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("times as fast as dense attention")
    axes.set_title(f"{rows[0]['device']}, {rows[0]['dtype']}")
    axes.legend(title="tokens", fontsize="small", loc="lower right")
    return axes


def plot_gains(rows_of: Mapping[str, Rows], axes: Any = None) -> Any:
    """Plot the median speed-up of patterns against the length, with lowest and highest.

    A length counts the patterns that every device has at that length.

    Args:
        rows_of: Label of a device -> its rows.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes((7, 3.2)) if axes is None else axes
    lengths = sorted({row["details"]["tokens"] for rows in rows_of.values() for row in rows})
    width = 0.8 / len(rows_of)
    by_device = {label: _speedups(rows) for label, rows in rows_of.items()}
    common = {
        tokens: [
            name
            for name in next(iter(by_device.values()))
            if all(tokens in found.get(name, ()) for found in by_device.values())
        ]
        for tokens in lengths
    }
    lengths = [tokens for tokens in lengths if common[tokens]]
    for i, (label, found) in enumerate(by_device.items()):
        places = [place + (i - (len(rows_of) - 1) / 2) * width for place in range(len(lengths))]
        speedups = [[found[name][tokens] for name in common[tokens]] for tokens in lengths]
        middle = [median(each) for each in speedups]
        low = [median(each) - min(each) for each in speedups]
        high = [max(each) - median(each) for each in speedups]
        axes.bar(
            places, middle, width, yerr=(low, high), capsize=2, color=OKABE_ITO[i], label=label,
            error_kw={"linewidth": 0.8},
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xticks(
        range(len(lengths)), [f"{tokens // 1024}K\n{len(common[tokens])}" for tokens in lengths]
    )
    axes.set(xlabel="tokens, and number of patterns", ylabel="times as fast as dense")
    return add_legend(axes)


def _speedups(rows: Rows) -> dict[str, dict[int, float]]:
    """Return the speed-up over dense attention by pattern and length."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["executor"] == "cqs" and row["benchmark"] == "patterns forward":
            name = row["case"].rpartition("-")[0]
            found.setdefault(name, {})[row["details"]["tokens"]] = 1 / row["ratio"]
    return found
