"""``python -m benchmarks case-study`` measures, tabulates and plots, and appends its rows."""

import pytest

from benchmarks.__main__ import main
from benchmarks.case_measurement import CaseRow
from cqs.report.measurement import read_rows

pytestmark = pytest.mark.slow

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
    ("options", "message"),
    [
        (["--seqlen", "60,0"], "--seqlen must be at least 1, got 0"),
        (["--tasks", "0"], "--tasks must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(capsys, options, message):
    assert main([*SMALL, "--seqlen", "60", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", [["--executor", "ray"], ["--backward"], ["--workers", "2"]])
def test_options_of_reports_are_rejected(capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, *options])
    assert options[0] in capsys.readouterr().err.splitlines()[-1]
