"""What was measured, by number of tasks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import add_legend, make_logarithmic, new_axes, write_plainly

if TYPE_CHECKING:
    from cqs.report.rows import ScalingRow

Rows = Sequence["ScalingRow"]
"""Of one report and one pass, by number of tasks."""

_SIZE = (4, 3.2)
"""Inches, of a new figure."""
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Of Okabe and Ito, "Color Universal Design", 2008: apart for all eyes, on white and on black."""
_STYLES = ((_BLUE, "o", "-"), (_ORANGE, "s", "--"), (_GREEN, "^", "-."), (_PURPLE, "D", ":"))
_SMOOTH = 64
"""Pieces of a curve."""
_MIB = 2**20


def plot_held_tokens(rows: Rows, axes: Any = None) -> Any:
    """Plot the share of all tokens in the longest subsequence, and the least that is possible.

    A quorum of m groups must hold W pairs of groups, so m is at least sqrt(W), and the share about
    1 / sqrt(W).

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "share of the tokens, %")
    _draw_reference(axes, rows, lambda workers: 100 * workers**-0.5, r"$1/\sqrt{W}$")
    _draw_lines(axes, rows, {"longest subsequence": lambda row: 100 * row.held_share})
    axes.set_ylim(0, 105)
    return add_legend(axes)


def plot_responsibility(rows: Rows, axes: Any = None) -> Any:
    """Plot the responsibility ratio, which is W where work is shared evenly.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "responsibility ratio")
    _draw_reference(axes, rows, float, "W")
    _draw_lines(axes, rows, {"responsibility ratio": lambda row: row.responsibility_ratio})
    make_logarithmic(axes)
    return add_legend(axes)


def plot_balance(rows: Rows, axes: Any = None) -> Any:
    """Plot the busiest task over the mean, in pairs as planned and in time as measured.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "most over mean")
    lines: dict[str, Callable[[ScalingRow], float | None]] = {
        "live pairs": lambda row: row.balance,
        "time": lambda row: row.time_balance,
    }
    _draw_lines(axes, rows, lines)
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    return add_legend(axes)


def plot_peak_bytes(rows: Rows, axes: Any = None) -> Any:
    """Plot the peak memory of the task that needs most, as predicted and as measured.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "peak of a task, MiB")
    lines: dict[str, Callable[[ScalingRow], float | None]] = {
        "measured": lambda row: row.peak_bytes / _MIB,
        "predicted": lambda row: row.predicted_bytes and row.predicted_bytes / _MIB,
    }
    _draw_lines(axes, rows, lines, ((_BLUE, "o", "none"), (_ORANGE, "x", "--")))
    make_logarithmic(axes)
    return add_legend(axes)


def plot_traffic(rows: Rows, axes: Any = None) -> Any:
    """Plot the most that a task receives and returns.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "of a task, MiB")
    lines: dict[str, Callable[[ScalingRow], float | None]] = {
        "received": lambda row: row.bytes_in / _MIB,
        "returned": lambda row: row.bytes_out / _MIB,
    }
    _draw_lines(axes, rows, lines)
    make_logarithmic(axes)
    return add_legend(axes)


def plot_times(rows: Rows, axes: Any = None) -> Any:
    """Plot the slowest and the mean task, merge and transfer, where they were timed.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "milliseconds")
    lines: dict[str, Callable[[ScalingRow], float | None]] = {
        "slowest task": lambda row: row.slowest_ms,
        "mean task": lambda row: row.mean_ms,
        "merge": lambda row: row.merge_ms,
        "transfer, waiting": lambda row: row.transfer_ms,
    }
    _draw_lines(axes, rows, lines)
    make_logarithmic(axes)
    return add_legend(axes)


def plot_speedup(rows: Rows, axes: Any = None) -> Any:
    """Plot the speed-up over one task and over one dense call, and the number of devices.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "speed-up")
    lines: dict[str, Callable[[ScalingRow], float | None]] = {
        "over one task": lambda row: row.speedup,
        "over one dense call": lambda row: row.speedup_over_dense,
    }
    _draw_lines(axes, rows, lines)
    devices = {row.num_tasks: row.num_devices for row in rows}
    axes.plot([*devices], [*devices.values()], color="gray", linewidth=1, label="devices")
    make_logarithmic(axes)
    return add_legend(axes)


def plot_efficiency(rows: Rows, axes: Any = None) -> Any:
    """Plot the parallel efficiency: the speed-up over one task, for each device.

    Args:
        rows: At least one.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _prepare(rows, axes, "parallel efficiency, %")
    axes.axhline(100, color="gray", linewidth=1)
    _draw_lines(axes, rows, {"efficiency": lambda row: 100 * row.efficiency})
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    return add_legend(axes)


def plot_run_parts(rows: Rows, axes: Any = None) -> Any:
    """Plot where the time of a run on a cluster goes, as bars.

    Args:
        rows: Of executor ``"ray"``, at least one.
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


def _prepare(rows: Rows, axes: Any, label: str) -> Any:
    """Return axes whose horizontal one has the numbers of tasks from 1 on."""
    axes = new_axes(_SIZE) if axes is None else axes
    axes.set_xscale("log", base=2)
    write_plainly(axes.xaxis)
    axes.set(xlim=(0.9, 1.2 * max(row.num_tasks for row in rows)), xlabel="tasks", ylabel=label)
    axes.grid(color="gray", alpha=0.3)
    return axes


def _draw_lines(
    axes: Any,
    rows: Rows,
    lines: "dict[str, Callable[[ScalingRow], float | None]]",
    styles: Sequence[tuple[str, str, str]] = _STYLES,
) -> None:
    """Draw a line for each quantity that some row has, in its color, marker and style of line."""
    for (label, quantity), (color, marker, style) in zip(lines.items(), styles, strict=False):
        points = [(row.num_tasks, quantity(row)) for row in rows]
        points = [(workers, number) for workers, number in points if number is not None]
        if points:
            workers, numbers = zip(*points, strict=True)
            axes.plot(
                workers, numbers, color=color, marker=marker, linestyle=style, ms=5, label=label
            )


def _draw_reference(axes: Any, rows: Rows, of_workers: Callable[[float], float], name: str) -> None:
    """Draw in grey what a quantity is compared with."""
    most = max(row.num_tasks for row in rows)
    workers = [most ** (i / _SMOOTH) for i in range(_SMOOTH + 1)]
    axes.plot(workers, list(map(of_workers, workers)), color="gray", linewidth=1, label=name)
