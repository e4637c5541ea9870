"""Pictures of rows show what the rows say."""

import matplotlib.pyplot as plt
import pytest
from scaling_rows import MANY, make_rows

from cqs.report import scaling

ROWS = make_rows(executor="ray")


def lines_of(axes):
    """The numbers of each line by number of workers, by what the legend calls it."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: dict(zip(*handle.get_data(), strict=True))
        for handle, label in zip(handles, labels, strict=True)
    }


@pytest.mark.parametrize(
    ("plot", "label", "quantity"),
    [
        (scaling.plot_held_tokens, "longest subsequence", lambda row: 100 * row.held_share),
        (scaling.plot_responsibility, "responsibility ratio", lambda row: row.responsibility_ratio),
        (scaling.plot_balance, "time", lambda row: row.slowest_ms / row.mean_ms),
        (scaling.plot_balance, "live pairs", lambda row: row.balance),
        (scaling.plot_peak_bytes, "measured", lambda row: row.peak_bytes / 2**20),
        (scaling.plot_peak_bytes, "predicted", lambda row: row.predicted_bytes / 2**20),
        (scaling.plot_traffic, "received", lambda row: row.bytes_in / 2**20),
        (scaling.plot_traffic, "returned", lambda row: row.bytes_out / 2**20),
        (scaling.plot_times, "slowest task", lambda row: row.slowest_ms),
        (scaling.plot_times, "mean task", lambda row: row.mean_ms),
        (scaling.plot_times, "merge", lambda row: row.merge_ms),
        (scaling.plot_times, "transfer, waiting", lambda row: row.transfer_ms),
        (scaling.plot_speedup, "over one task", lambda row: row.speedup),
        (scaling.plot_speedup, "over one dense call", lambda row: 1 / row.ratio),
        (scaling.plot_speedup, "devices", lambda row: min(row.num_tasks, 2)),
        (scaling.plot_efficiency, "efficiency", lambda row: 100 * row.speedup / row.num_devices),
    ],
)
def test_a_line_has_the_numbers_of_the_rows(plot, label, quantity):
    _, axes = plt.subplots()
    assert plot(ROWS, axes) is axes
    expected = {row.num_tasks: pytest.approx(quantity(row)) for row in ROWS}
    assert lines_of(axes)[label] == expected


def test_what_no_row_has_is_not_drawn():
    backward = make_rows(passes="backward")
    assert set(lines_of(scaling.plot_peak_bytes(backward))) == {"measured"}
    assert set(lines_of(scaling.plot_times(backward))) == {"slowest task", "mean task", "merge"}


def test_references_are_what_they_are_called():
    curve = lines_of(scaling.plot_held_tokens(ROWS))[r"$1/\sqrt{W}$"]
    assert curve == {workers: pytest.approx(100 * workers**-0.5) for workers in curve}
    assert min(curve) == 1 and max(curve) == MANY[-1]


def test_bars_add_up_to_a_run():
    axes = scaling.plot_run_parts(ROWS)
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == [pytest.approx(1e3 * 4 * 0.01)] * len(ROWS)
