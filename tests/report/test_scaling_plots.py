"""Pictures of rows show what the rows say."""

import matplotlib.pyplot as plt
import pytest
from scaling_rows import MANY, make_rows

from cqs.report import charts
from cqs.report.charts import Chart

ROWS = make_rows(executor="ray")


def lines_of(axes):
    """The numbers of each line by number of workers, by what the legend calls it."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: dict(zip(*handle.get_data(), strict=True))
        for handle, label in zip(handles, labels, strict=True)
    }


@pytest.mark.parametrize(
    ("chart", "label", "quantity"),
    [
        (charts.HELD_TOKENS, "share", lambda row: 100 * row.held_tokens / row.tokens),
        (charts.RESPONSIBILITY, "responsibility ratio", lambda row: row.responsibility_ratio),
        (charts.BALANCE, "slowest / mean", lambda row: row.slowest_ms / row.mean_ms),
        (charts.BALANCE, "busiest / mean", lambda row: row.balance),
        (charts.PEAK_BYTES, "measured MiB", lambda row: row.peak_bytes / 2**20),
        (charts.PEAK_BYTES, "predicted MiB", lambda row: row.predicted_bytes / 2**20),
        (charts.TRAFFIC, "MiB in", lambda row: row.bytes_in / 2**20),
        (charts.TRAFFIC, "MiB out", lambda row: row.bytes_out / 2**20),
        (charts.TIMES, "slowest", lambda row: row.slowest_ms),
        (charts.TIMES, "mean", lambda row: row.mean_ms),
        (charts.TIMES, "merge", lambda row: row.merge_ms),
        (charts.TIMES, "transfer", lambda row: row.transfer_ms),
        (charts.SPEEDUP, "over one task", lambda row: row.speedup),
        (charts.SPEEDUP, "over dense", lambda row: 1 / row.ratio),
        (charts.SPEEDUP, "devices", lambda row: min(row.num_tasks, 2)),
        (charts.EFFICIENCY, "efficiency", lambda row: 100 * row.speedup / row.num_devices),
        *((charts.RUN_PARTS, part, lambda row: 10.0) for part in charts.RUN_PARTS.lines),
    ],
)
def test_a_line_has_the_numbers_of_the_rows(chart, label, quantity):
    _, axes = plt.subplots()
    assert chart.plot(ROWS, axes) is axes
    expected = {row.num_tasks: pytest.approx(quantity(row)) for row in ROWS}
    assert lines_of(axes)[label] == expected


def test_every_chart_is_tested():
    marks = test_a_line_has_the_numbers_of_the_rows.pytestmark
    (tested,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    every = {chart for chart in vars(charts).values() if isinstance(chart, Chart)}
    assert {(chart, name) for chart, name, _ in tested} == {
        (chart, name) for chart in every for name in chart.lines
    }


def test_what_no_row_has_is_not_drawn():
    backward = make_rows(passes="backward")
    assert set(lines_of(charts.PEAK_BYTES.plot(backward))) == {"measured MiB"}
    assert set(lines_of(charts.TIMES.plot(backward))) == {"slowest", "mean", "merge"}


def test_references_are_what_they_are_called():
    curve = lines_of(charts.HELD_TOKENS.plot(ROWS))[r"$1/\sqrt{W}$"]
    assert curve == {workers: pytest.approx(100 * workers**-0.5) for workers in curve}
    assert min(curve) == 1 and max(curve) == MANY[-1]
