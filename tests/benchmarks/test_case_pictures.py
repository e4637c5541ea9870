"""Pictures of the case study show what its rows say."""

import pytest
from case_rows import make_cases

from benchmarks.plots import case_study

ROWS = make_cases()


@pytest.mark.parametrize(
    ("plot", "quantity"),
    [
        (case_study.plot_longest, lambda row: row.held_tokens),
        (case_study.plot_longest_times, lambda row: row.median_ms),
        (case_study.plot_ratios, lambda row: row.ratio),
    ],
)
def test_every_number_of_workers_has_a_line(plot, quantity):
    lines = {line.get_label(): line for line in plot(ROWS).lines}
    for number in {row.num_tasks for row in ROWS}:
        points = [(row.tokens, quantity(row)) for row in ROWS if row.num_tasks == number]
        assert lines[f"W = {number}"].get_xydata().tolist() == [
            pytest.approx(point) for point in points
        ]


def test_active_memory_is_drawn_on_one_axis():
    rows = make_cases((10_000,))
    axes = case_study.plot_active_memory(rows)
    assert axes.get_xlim()[0] == 0 == axes.get_ylim()[0]
    for line, row in zip(axes.lines, rows, strict=True):
        assert max(line.get_ydata()) == pytest.approx(row.peak_bytes / 2**20)
        assert line.get_xdata()[-1] == pytest.approx(1e3 * row.sample_seconds[-1])
    assert len({line.get_color() for line in axes.lines}) == len(rows)
