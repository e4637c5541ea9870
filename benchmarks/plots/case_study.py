"""Plots of the case study: memory and time of the task with the longest subsequence."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from benchmarks.plots.memory import plot_memory
from cqs.plotting.colors import OKABE_ITO
from cqs.plotting.figures import add_legend, make_logarithmic, new_axes

if TYPE_CHECKING:
    from benchmarks.case_measurement import CaseRow

Rows = Sequence["CaseRow"]
"""Rows of one report, sorted by number of tokens and of tasks."""

_SIZE = (4, 3.2)
"""Width and height of a new figure in inches."""
_MARKERS = "os^Dv"


def plot_study(rows: Rows) -> Any:
    """Return a figure of memory over time for each length, longest subsequences and times.

    Args:
        rows: At least one row.
    """
    from matplotlib.figure import Figure

    lengths = sorted({row.tokens for row in rows})
    plots = plot_longest, plot_longest_times, plot_ratios
    width, height = _SIZE
    number = len(lengths) + len(plots)
    figure = Figure(figsize=(3 * width, -(-number // 3) * height), layout="constrained")
    panels = iter(figure.subplots(-(-number // 3), 3, squeeze=False).flat)
    for length, panel in zip(lengths, panels, strict=False):
        plot_active_memory([row for row in rows if row.tokens == length], panel)
        panel.set_xlabel(f"milliseconds, N = {length:,}")
    for plot, panel in zip(plots, panels, strict=False):
        plot(rows, panel)
    for panel in panels:
        panel.set_axis_off()
    return figure


def plot_active_memory(rows: Rows, axes: Any = None) -> Any:
    """Plot the memory of one task over time, for every number of tasks.

    Args:
        rows: At least one row, all of one number of tokens.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    from matplotlib.ticker import MaxNLocator

    axes = new_axes(_SIZE) if axes is None else axes
    axes.set_prop_cycle(color=OKABE_ITO[:6])
    for row in rows:
        plot_memory(row.samples, axes)
        axes.lines[-1].set_label(f"W = {row.num_tasks}")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    return add_legend(axes, 3)


def plot_longest(rows: Rows, axes: Any = None) -> Any:
    """Plot the longest subsequence against the number of tokens.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _draw_lines(rows, axes, lambda row: row.held_tokens)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("longest subsequence, tokens")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return add_legend(axes, 3)


def plot_longest_times(rows: Rows, axes: Any = None) -> Any:
    """Plot the time of the task with the longest subsequence against the number of tokens.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _draw_lines(rows, axes, lambda row: row.median_ms)
    axes.set_ylabel("milliseconds")
    make_logarithmic(axes)
    return add_legend(axes, 3)


def plot_ratios(rows: Rows, axes: Any = None) -> Any:
    """Plot the time of that task divided by that of the whole problem, compared with 1 / W.

    Args:
        rows: At least one row.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = _draw_lines(rows, axes, lambda row: row.ratio)
    for i, number in enumerate(sorted({row.num_tasks for row in rows})):
        axes.axhline(1 / number, color="gray", linewidth=1, zorder=1, label=None if i else "1 / W")
    axes.set_ylabel("task over whole")
    make_logarithmic(axes)
    return add_legend(axes, 3)


def _draw_lines(rows: Rows, axes: Any, quantity: "Callable[[CaseRow], float]") -> Any:
    """Draw a line for each number of tasks."""
    from matplotlib.ticker import MaxNLocator

    axes = new_axes(_SIZE) if axes is None else axes
    workers = sorted({row.num_tasks for row in rows})
    for number, color, marker in zip(workers, cycle(OKABE_ITO[:6]), cycle(_MARKERS), strict=False):
        points = [(row.tokens, quantity(row)) for row in rows if row.num_tasks == number]
        lengths, numbers = zip(*points, strict=True)
        axes.plot(lengths, numbers, color=color, marker=marker, ms=5, label=f"W = {number}")
    axes.set(xlim=(0, 1.1 * max(row.tokens for row in rows)), xlabel="tokens")
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color="gray", alpha=0.3)
    return axes
