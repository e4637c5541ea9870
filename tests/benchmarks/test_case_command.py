"""``python -m benchmarks case-study`` measures, tabulates and plots, and appends its rows."""

import pytest
from case_rows import make_cases

from benchmarks.plots import case_study

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("plot", "quantity"),
    [
        (case_study.plot_longest, lambda row: row.held_tokens),
        (case_study.plot_longest_times, lambda row: row.median_ms),
        (case_study.plot_ratios, lambda row: row.ratio),
    ],
)
def test_every_number_of_workers_has_a_line(plot, quantity):
    rows = make_cases()
    lines = {line.get_label(): line for line in plot(rows).lines}
    for number in {row.num_tasks for row in rows}:
        points = [(row.tokens, quantity(row)) for row in rows if row.num_tasks == number]
        assert lines[f"W = {number}"].get_xydata().tolist() == [
            pytest.approx(point) for point in points
        ]
