"""``python -m benchmarks case-study`` measures, tabulates and plots, and appends its rows."""

import pytest
from case_rows import make_cases

from benchmarks.__main__ import main
from benchmarks.case_measurement import CaseRow
from benchmarks.plots import case_study
from cqs.report.measurement import read_rows

pytestmark = pytest.mark.long

SMALL = ["case-study", "--heads", "2", "--head-dim", "8", "--repeats", "1"]


def test_rows_are_appended_and_drawn(tmp_path, capsys):
    path, picture = tmp_path / "rows.jsonl", tmp_path / "study.png"
    options = ["--seqlen", "120,60", "--tasks", "7,1", "--causal", "--out", str(path)]
    assert main([*SMALL, *options, "--picture", str(picture)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:3] == ["N", "W", "longest"]
    rows = read_rows(path, lambda row: [CaseRow(**row)])
    assert [(row.tokens, row.num_tasks) for row in rows] == [(60, 1), (60, 7), (120, 1), (120, 7)]
    assert all(row.is_causal and row.num_kv_heads == 2 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*SMALL, *options]) == 0
    assert path.read_text().count("\n") == 8


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
