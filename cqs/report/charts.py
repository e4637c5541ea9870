"""Quantities of scaling rows, and their charts against the number of tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cqs.plotting.figures import add_legend, make_logarithmic, new_axes, write_plainly
from cqs.report.content import NOTHING
from cqs.report.rows import ScalingRow
from cqs.report.table import digits

_SIZE = (4, 3.2)
"""Width and height of a new figure in inches."""
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Colour-blind safe colours of Okabe and Ito, "Color Universal Design", 2008."""
_STYLES = ((_BLUE, "o", "-"), (_ORANGE, "s", "--"), (_GREEN, "^", "-."), (_PURPLE, "D", ":"))
_SMOOTH = 64
"""Line segments of a reference curve."""
_MIB = 2**20


@dataclass(frozen=True)
class Quantity:
    """A number of a row, and its text in tables."""

    of: Callable[[ScalingRow], float | None]
    """Returns the number; ``None`` if it was not measured."""
    show: Callable[[Any], str] = digits
    """Formats the number."""

    def __call__(self, row: ScalingRow) -> str:
        """Return the text of the number of a row."""
        number = self.of(row)
        return NOTHING if number is None else self.show(number)


QUANTITIES = {
    "tokens": Quantity(lambda row: row.held_tokens, "{:,}".format),
    "share": Quantity(lambda row: 100 * row.held_tokens / row.tokens, "{:.3g} %".format),
    "responsibility ratio": Quantity(lambda row: row.responsibility_ratio, "{:.4g}".format),
    "busiest / mean": Quantity(lambda row: row.balance, "{:.3f}".format),
    "predicted MiB": Quantity(
        lambda row: row.predicted_bytes and row.predicted_bytes / _MIB, "{:.1f}".format
    ),
    "measured MiB": Quantity(lambda row: row.peak_bytes / _MIB, "{:.1f}".format),
    "measured / predicted": Quantity(lambda row: row.peak_ratio, "{:.3f}".format),
    "MiB in": Quantity(lambda row: row.bytes_in / _MIB, "{:.1f}".format),
    "MiB out": Quantity(lambda row: row.bytes_out / _MIB, "{:.1f}".format),
    "slowest": Quantity(lambda row: row.slowest_ms),
    "mean": Quantity(lambda row: row.mean_ms),
    "slowest / mean": Quantity(lambda row: row.time_balance, "{:.2f}".format),
    "merge": Quantity(lambda row: row.merge_ms),
    "transfer": Quantity(lambda row: row.transfer_ms),
    "ms": Quantity(lambda row: row.median_ms),
    "over one task": Quantity(lambda row: row.speedup),
    "over dense": Quantity(lambda row: 1 / row.ratio),
    "devices": Quantity(lambda row: row.num_devices, str),
    "efficiency": Quantity(lambda row: 100 * row.efficiency, "{:.3g} %".format),
    "before": Quantity(lambda row: 1e3 * row.details["before_seconds"]),
    "computing": Quantity(lambda row: 1e3 * row.details["slowest_seconds"]),
    "between": Quantity(lambda row: 1e3 * row.details["between_seconds"]),
    "after": Quantity(lambda row: 1e3 * row.details["after_seconds"]),
}
"""Quantities by name: the header of their column and the label of their line."""


@dataclass(frozen=True)
class Chart:
    """A line for each quantity that some row has, against the number of tasks."""

    caption: str
    """Caption of the picture."""
    label: str
    """Label of the vertical axis."""
    lines: tuple[str, ...]
    """Names of the quantities."""
    styles: Sequence[tuple[str, str, str]] = _STYLES
    """Colour, marker and line style of each line; lines without markers are thin."""
    reference: tuple[str, Callable[[float], float]] | None = None
    """Label of a grey curve from 1 task on, and its value for a number of tasks."""
    headroom: float | None = None
    """Upper limit of a linear axis from 0, relative to its data; ``None`` is a logarithmic axis."""

    def plot(self, rows: Sequence[ScalingRow], axes: Any = None) -> Any:
        """Plot rows of one report and one pass.

        Args:
            rows: At least one row, sorted by number of tasks.
            axes: Matplotlib axes to draw on; ``None`` makes a new figure.

        Returns:
            The matplotlib axes.
        """
        most = max(row.num_tasks for row in rows)
        axes = new_axes(_SIZE) if axes is None else axes
        axes.set_xscale("log", base=2)
        write_plainly(axes.xaxis)
        axes.set(xlim=(0.9, 1.2 * most), xlabel="tasks", ylabel=self.label)
        axes.grid(color="gray", alpha=0.3)
        if self.reference is not None:
            name, value_of = self.reference
            tasks = [most ** (i / _SMOOTH) for i in range(_SMOOTH + 1)]
            axes.plot(tasks, list(map(value_of, tasks)), color="gray", linewidth=1, label=name)
        for name, (color, marker, style) in zip(self.lines, self.styles, strict=False):
            points = [(row.num_tasks, QUANTITIES[name].of(row)) for row in rows]
            points = [(tasks, number) for tasks, number in points if number is not None]
            options = {"color": color, "marker": marker, "linestyle": style, "label": name}
            if points:
                axes.plot(*zip(*points, strict=True), ms=5, lw=None if marker else 1, **options)
        if self.headroom is None:
            make_logarithmic(axes)
        else:
            axes.set_ylim(0, self.headroom * axes.dataLim.y1)
        return add_legend(axes)


HELD_TOKENS = Chart(
    "Longest subsequence, compared with 1 / sqrt(W)",
    "share of the tokens, %",
    ("share",),
    reference=(r"$1/\sqrt{W}$", lambda tasks: 100 * tasks**-0.5),
    headroom=1.05,
)
"""A quorum of m groups must hold W pairs of groups, so m is at least sqrt(W), and the share of the
tokens at least about 1 / sqrt(W)."""
RESPONSIBILITY = Chart(
    "Responsibility ratio, compared with W",
    "responsibility ratio",
    ("responsibility ratio",),
    reference=("W", float),
)
BALANCE = Chart(
    "Busiest task divided by the mean, in pairs and in time",
    "most over mean",
    ("busiest / mean", "slowest / mean"),
    headroom=1.1,
)
PEAK_BYTES = Chart(
    "Peak memory of a task",
    "peak of a task, MiB",
    ("measured MiB", "predicted MiB"),
    styles=((_BLUE, "o", "none"), (_ORANGE, "x", "--")),
)
TRAFFIC = Chart("Bytes that a task receives and returns", "of a task, MiB", ("MiB in", "MiB out"))
TIMES = Chart(
    "Time of tasks, merge and transfer", "milliseconds", ("slowest", "mean", "merge", "transfer")
)
SPEEDUP = Chart(
    "Speed-up, compared with the number of devices",
    "speed-up",
    ("over one task", "over dense", "devices"),
    styles=(*_STYLES[:2], ("gray", "", "-")),
)
EFFICIENCY = Chart(
    "Parallel efficiency",
    "parallel efficiency, %",
    ("efficiency",),
    reference=("_ideal", lambda tasks: 100.0),
    headroom=1.1,
)
RUN_PARTS = Chart(
    "Parts of a run on the slowest actor",
    "milliseconds",
    ("computing", "before", "between", "after"),
    headroom=1.1,
)
