"""``python -m benchmarks case-study`` writes a report, continues it, and mixes no rows."""

import shlex

import pytest

from benchmarks import case_measurement, case_sections, case_study
from benchmarks.__main__ import main
from benchmarks.case_measurement import read_rows
from cqs.__main__ import main as run_cqs
from cqs.commands import report

pytestmark = pytest.mark.slow

SMALL = ["case-study", "--heads", "2", "--head-dim", "8", "--repeats", "1"]


@pytest.fixture
def written(monkeypatch):
    """The lengths of every report that was written."""
    found = []

    def write(content, directory):
        found.append([length.tokens for length in content.chapters[0].rows])

    monkeypatch.setattr(report, "write_report", write)
    return found


def test_a_report_is_written_and_its_command_measures_the_same(tmp_path, capsys):
    out = tmp_path / "new"
    options = ["--seqlen", "120,60", "--tasks", "7,1", "--causal", "--out", str(out)]
    assert main([*SMALL, *options]) == 0
    found = sorted(path.name for path in out.iterdir())
    assert found == ["report.html", "report.md", "rows.jsonl"]
    rows = read_rows(out / "rows.jsonl")
    assert [row.key for row in rows] == [(60, 1), (60, 7), (120, 1), (120, 7)]
    assert str(out / "report.html") in capsys.readouterr().out
    (out / "rows.jsonl").unlink()
    line = case_sections.command(rows, str(out))
    assert line in (out / "report.md").read_text()
    assert main(shlex.split(line.removeprefix("python -m benchmarks "))) == 0
    again = read_rows(out / "rows.jsonl")
    assert [row.key for row in again] == [row.key for row in rows]
    assert not any(pair[0].differences(pair[1]) for pair in zip(again, rows, strict=True))


def test_an_interrupted_report_goes_on_with_the_next_length(tmp_path, monkeypatch, written, capsys):
    path, append = tmp_path / "rows.jsonl", case_study.append_rows

    def interrupt(rows, out):
        append(rows, out)
        raise KeyboardInterrupt

    options = [*SMALL, "--seqlen", "60,90", "--tasks", "1,3", "--out", str(tmp_path)]
    monkeypatch.setattr(case_study, "append_rows", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 130 and "interrupted" in capsys.readouterr().err
    kept = path.read_text()
    assert kept.count("\n") == 2 and written == [[60]]

    monkeypatch.setattr(case_study, "append_rows", append)
    assert main(options) == 0
    assert path.read_text().startswith(kept) and path.read_text().count("\n") == 4
    with monkeypatch.context() as patch:
        patch.setattr(case_measurement, "measure", lambda *_: pytest.fail("it was measured"))
        assert main(options) == 0
        assert main([*options, "--seed", "1"]) == 2
    assert "seed 0, not 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlen", "60,0"], "--seqlen must be at least 1, got 0"),
        (["--tasks", "0"], "--tasks must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(tmp_path, capsys, options, message):
    assert main([*SMALL, "--seqlen", "60", "--out", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", [["--executor", "ray"], ["--backward"], ["--actors", "2"]])
def test_options_of_other_reports_are_rejected(tmp_path, capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--out", str(tmp_path), *options])
    assert options[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_directory_has_rows_of_one_kind(tmp_path, written, capsys):
    out = ["--seqlen", "60", "--tasks", "1", "--out", str(tmp_path)]
    assert main([*SMALL, *out]) == 0
    assert run_cqs(["report", *SMALL[1:], *out]) == 2
    assert "rows.jsonl, line 1" in capsys.readouterr().err
