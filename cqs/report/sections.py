"""Sections of a report: quantities of rows, as tables and as pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cqs.plotting.colors import OKABE_ITO
from cqs.plotting.figures import PLAIN, add_legend, make_logarithmic, new_axes
from cqs.report.measurement import format_rows
from cqs.report.rows import ScalingRow
from cqs.report.table import Table, digits, percent

Rows = Sequence[ScalingRow]

_SIZE = (4, 3.2)
"""Width and height of a new figure in inches."""
_LINES = ("o-", "s--", "^-.", "D:")
_MIB = 2**20
_IDEAL_SHARE = r"$1/\sqrt{W}$"


@dataclass(frozen=True)
class Quantity:
    """A number of a row, and its text in tables."""

    of: Callable[[ScalingRow], float | None]
    """Returns the number; ``None`` if it was not measured."""
    show: Callable[[Any], str] = digits
    """Formats the number."""

    def __call__(self, row: ScalingRow) -> str:
        """Return the text of the number of a row, ``-`` if it was not measured."""
        number = self.of(row)
        return "-" if number is None else self.show(number)


QUANTITIES = {
    "tokens": Quantity(lambda row: row.held_tokens, "{:,}".format),
    "share": Quantity(lambda row: 100 * row.held_tokens / row.tokens, "{:.3g} %".format),
    _IDEAL_SHARE: Quantity(lambda row: 100 * row.num_tasks**-0.5),
    "responsibility ratio": Quantity(lambda row: row.responsibility_ratio, "{:.4g}".format),
    "busiest / mean": Quantity(lambda row: row.balance, "{:.3f}".format),
    "predicted MiB": Quantity(
        lambda row: row.predicted_bytes and row.predicted_bytes / _MIB, "{:.1f}".format
    ),
    "measured MiB": Quantity(lambda row: row.peak_bytes / _MIB, "{:.1f}".format),
    "share of one task": Quantity(lambda row: row.memory_share, percent),
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
    "efficiency": Quantity(lambda row: row.efficiency, percent),
}
"""Quantities by name: the header of their column and the label of their line."""
_REFERENCES = _IDEAL_SHARE, "devices"
"""Quantities with thin grey lines, with which others are compared."""


@dataclass(frozen=True)
class Section:
    """A table with a row for each number of tasks, and a picture of it."""

    columns: tuple[str, ...]
    """Names of the tabulated quantities."""
    label: str
    """Label of the vertical axis of the picture."""
    lines: tuple[str, ...]
    """Names of the quantities with a line in the picture."""

    def table(self, rows: Rows) -> list[list[str]]:
        """Return the header and a line for each row, without quantities that no row has."""
        names = [name for name in self.columns if any(_points(rows, name))]
        lines = ([str(row.num_tasks), *(QUANTITIES[name](row) for name in names)] for row in rows)
        return [["W", *names], *lines]

    def plot(self, rows: Rows, axes: Any = None) -> Any:
        """Plot a line for each quantity that some row has, against the number of tasks.

        Args:
            rows: At least one row, all of one report and one pass, sorted by number of tasks.
            axes: Matplotlib axes to draw on; ``None`` makes a new figure.

        Returns:
            The matplotlib axes.
        """
        axes = new_axes(_SIZE) if axes is None else axes
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(PLAIN)
        axes.set(xlim=(0.9, 1.2 * rows[-1].num_tasks), xlabel="tasks", ylabel=self.label)
        axes.grid(color="gray", alpha=0.3)
        for name, color, line in zip(self.lines, OKABE_ITO, _LINES, strict=False):
            points = [point for point in _points(rows, name) if point[1] > 0]
            if points:  # the axis is logarithmic
                axes.plot(*zip(*points, strict=True), line, color=color, ms=5, label=name)
                if name in _REFERENCES:
                    axes.lines[-1].set(color="gray", linewidth=1, marker="", linestyle="-")
        make_logarithmic(axes)
        return add_legend(axes)


def _points(rows: Rows, name: str) -> list[tuple[int, float]]:
    """Return the numbers of tasks at which a quantity was measured, and the quantity there."""
    numbers = ((row.num_tasks, QUANTITIES[name].of(row)) for row in rows)
    return [(num_tasks, number) for num_tasks, number in numbers if number is not None]


def summarize_rows(rows: Rows) -> Table:
    """Return a table of the main quantities, for the terminal."""
    names = "share", "measured MiB", "share of one task", "ms", "over one task", "over dense"
    columns: dict[str, Callable[[ScalingRow], object]] = {
        "W": lambda row: row.num_tasks,
        "pass": lambda row: row.passes,
        **{name: QUANTITIES[name] for name in (*names, "efficiency")},
    }
    return format_rows(rows, columns)


SHARES = Section(
    ("tokens", "share", "responsibility ratio", "busiest / mean"),
    "share of the tokens, %",
    ("share", _IDEAL_SHARE),
)
MEMORY = Section(
    ("predicted MiB", "measured MiB", "measured / predicted", "share of one task"),
    "peak of a task, MiB",
    ("measured MiB", "predicted MiB"),
)
TRAFFIC = Section(("MiB in", "MiB out"), "of a task, MiB", ("MiB in", "MiB out"))
TIMES = Section(
    ("slowest", "mean", "slowest / mean", "merge", "transfer"),
    "milliseconds",
    ("slowest", "mean", "merge", "transfer"),
)
SPEEDUP = Section(
    ("ms", "over one task", "over dense", "devices", "efficiency"),
    "speed-up",
    ("over one task", "over dense", "devices"),
)
