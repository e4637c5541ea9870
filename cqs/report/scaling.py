"""Plots of scaling rows against the number of tasks."""

from collections.abc import Callable, Sequence
from typing import Any

from cqs.plotting.figures import add_legend, make_logarithmic, new_axes, write_plainly
from cqs.report.rows import ScalingRow

Rows = Sequence[ScalingRow]
"""Rows of one report and one pass, sorted by number of tasks."""
Lines = dict[str, Callable[[ScalingRow], float | None]]
"""Labels of lines, and the quantity of a row that each shows."""
Reference = tuple[str, Callable[[float], float]]
"""Label of a curve, and its value for a number of tasks."""

_SIZE = (4, 3.2)
"""Width and height of a new figure in inches."""
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Colour-blind safe colours of Okabe and Ito, "Color Universal Design", 2008."""
_STYLES = ((_BLUE, "o", "-"), (_ORANGE, "s", "--"), (_GREEN, "^", "-."), (_PURPLE, "D", ":"))
_SMOOTH = 64
"""Line segments of a reference curve."""
_MIB = 2**20


def plot_held_tokens(rows: Rows, axes: Any = None) -> Any:
    """Plot the longest subsequence as a fraction of all tokens, and its lower bound.

    A quorum of m groups must hold W pairs of groups, so m is at least sqrt(W) and the fraction at
    least about 1 / sqrt(W).

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {"longest subsequence": lambda row: 100 * row.held_share}
    bound: Reference = r"$1/\sqrt{W}$", lambda workers: 100 * workers**-0.5
    return _plot(rows, axes, "share of the tokens, %", lines, reference=bound, headroom=1.05)


def plot_responsibility(rows: Rows, axes: Any = None) -> Any:
    """Plot the responsibility ratio, which is W if the work is balanced.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {"responsibility ratio": lambda row: row.responsibility_ratio}
    return _plot(rows, axes, "responsibility ratio", lines, reference=("W", float))


def plot_balance(rows: Rows, axes: Any = None) -> Any:
    """Plot the busiest task divided by the mean, in planned pairs and in measured time.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {"live pairs": lambda row: row.balance, "time": lambda row: row.time_balance}
    return _plot(rows, axes, "most over mean", lines, headroom=1.1)


def plot_peak_bytes(rows: Rows, axes: Any = None) -> Any:
    """Plot the largest peak memory of a task, predicted and measured.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {
        "measured": lambda row: row.peak_bytes / _MIB,
        "predicted": lambda row: row.predicted_bytes and row.predicted_bytes / _MIB,
    }
    styles = (_BLUE, "o", "none"), (_ORANGE, "x", "--")
    return _plot(rows, axes, "peak of a task, MiB", lines, styles)


def plot_traffic(rows: Rows, axes: Any = None) -> Any:
    """Plot the most bytes that a task receives and returns.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {
        "received": lambda row: row.bytes_in / _MIB,
        "returned": lambda row: row.bytes_out / _MIB,
    }
    return _plot(rows, axes, "of a task, MiB", lines)


def plot_times(rows: Rows, axes: Any = None) -> Any:
    """Plot the times of the slowest and the mean task, of merge and transfer.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {
        "slowest task": lambda row: row.slowest_ms,
        "mean task": lambda row: row.mean_ms,
        "merge": lambda row: row.merge_ms,
        "transfer, waiting": lambda row: row.transfer_ms,
    }
    return _plot(rows, axes, "milliseconds", lines)


def plot_speedup(rows: Rows, axes: Any = None) -> Any:
    """Plot the speed-up over one task and over one dense call, with the number of devices.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    lines: Lines = {
        "over one task": lambda row: row.speedup,
        "over one dense call": lambda row: row.speedup_over_dense,
        "devices": lambda row: row.num_devices,
    }
    return _plot(rows, axes, "speed-up", lines, (*_STYLES[:2], ("gray", "", "-")))


def plot_efficiency(rows: Rows, axes: Any = None) -> Any:
    """Plot the parallel efficiency: the speed-up over one task divided by the devices.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes(_SIZE) if axes is None else axes
    axes.axhline(100, color="gray", linewidth=1)
    lines: Lines = {"efficiency": lambda row: 100 * row.efficiency}
    return _plot(rows, axes, "parallel efficiency, %", lines, headroom=1.1)


def plot_run_parts(rows: Rows, axes: Any = None) -> Any:
    """Plot the parts of the time of runs on a cluster as stacked bars.

    Args:
        rows: At least one row of executor ``"ray"``.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes(_SIZE) if axes is None else axes
    names = [str(row.num_tasks) for row in rows]
    below = [0.0] * len(rows)
    for part, (color, _, _) in zip(("slowest", "before", "between", "after"), _STYLES, strict=True):
        heights = [1e3 * max(row.details[f"{part}_seconds"], 0) for row in rows]
        label = "slowest actor computes" if part == "slowest" else part
        axes.bar(names, heights, bottom=below, color=color, label=label)
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    axes.set(xlabel="tasks", ylabel="milliseconds")
    if len(names) > 10:
        axes.tick_params(axis="x", rotation=90)
    return add_legend(axes)


def _plot(
    rows: Rows,
    axes: Any,
    label: str,
    lines: Lines,
    styles: Sequence[tuple[str, str, str]] = _STYLES,
    *,
    reference: Reference | None = None,
    headroom: float | None = None,
) -> Any:
    """Plot a line for each quantity that some row has, against the number of tasks.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.
        label: Label of the vertical axis.
        lines: The quantities.
        styles: Colour, marker and line style of each line; lines without markers are thin.
        reference: A grey curve from 1 task on.
        headroom: Upper limit of a linear axis from 0, relative to its data; ``None`` makes the
            axis logarithmic.

    Returns:
        The matplotlib axes.
    """
    most = max(row.num_tasks for row in rows)
    axes = new_axes(_SIZE) if axes is None else axes
    axes.set_xscale("log", base=2)
    write_plainly(axes.xaxis)
    axes.set(xlim=(0.9, 1.2 * most), xlabel="tasks", ylabel=label)
    axes.grid(color="gray", alpha=0.3)
    if reference is not None:
        name, of_workers = reference
        workers = [most ** (i / _SMOOTH) for i in range(_SMOOTH + 1)]
        axes.plot(workers, list(map(of_workers, workers)), color="gray", linewidth=1, label=name)
    for (name, quantity), (color, marker, style) in zip(lines.items(), styles, strict=False):
        points = [(row.num_tasks, quantity(row)) for row in rows]
        points = [(tasks, number) for tasks, number in points if number is not None]
        options = {"color": color, "marker": marker, "linestyle": style, "label": name}
        if points:
            axes.plot(*zip(*points, strict=True), ms=5, lw=None if marker else 1, **options)
    if headroom is None:
        make_logarithmic(axes)
    else:
        axes.set_ylim(0, headroom * axes.dataLim.y1)
    return add_legend(axes)
