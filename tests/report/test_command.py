"""``cqs report`` goes on where it was stopped, and mixes nothing."""

import errno
import json
import os
from pathlib import Path

import pytest

from cqs.__main__ import main
from cqs.commands import report
from cqs.executors.verify import VerificationError
from cqs.report.rows import read_rows

pytestmark = pytest.mark.slow

TINY = ["report", "--seqlen", "60", "--heads", "2", "--head-dim", "8", "--repeats", "1"]


@pytest.fixture
def written(monkeypatch):
    """The numbers of tasks of each report that was written."""
    found = []

    def write(rows, directory):
        found.append([row.num_tasks for row in rows])

    monkeypatch.setattr(report, "write_report", write)
    return found


def test_a_report_is_written(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert main([*TINY, "--tasks", "3,1", "--backward", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "rows.jsonl"]
    rows = read_rows(out / "rows.jsonl")
    assert [row.key for row in rows] == [
        (1, "forward"), (3, "forward"), (1, "backward"), (3, "backward"),
    ]  # fmt: skip
    assert str(out / "report.html") in capsys.readouterr().out


def test_an_interrupted_report_goes_on(tmp_path, monkeypatch, written, capsys):
    path, append = tmp_path / "rows.jsonl", report.append_rows

    def interrupt(rows, out):
        append(rows, out)
        if len(read_rows(path)) == 2:
            raise KeyboardInterrupt

    options = [*TINY, "--tasks", "1,2,3,7", "--out", str(tmp_path)]
    monkeypatch.setattr(report, "append_rows", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    kept = path.read_text()
    assert kept.count("\n") == 2 and written == [[1, 2]]

    monkeypatch.setattr(report, "append_rows", append)
    assert main(options) == 0
    assert path.read_text().startswith(kept) and written == [[1, 2], [1, 2, 3, 7]]
    with monkeypatch.context() as patch:
        patch.setattr("cqs.report.drivers.MeasuredPass", lambda *_: pytest.fail("it was measured"))
        assert main(options) == 0 and len(written) == 3


def test_what_fails_keeps_what_was_measured(tmp_path, monkeypatch, written, capsys):
    from cqs.report.passes import MeasuredPass

    verify = MeasuredPass.verify

    def fail_at_three(work, result):
        if read_rows(tmp_path / "rows.jsonl"):
            raise VerificationError("it is wrong")
        verify(work, result)

    monkeypatch.setattr(MeasuredPass, "verify", fail_at_three)
    assert main([*TINY, "--tasks", "2,3", "--out", str(tmp_path)]) == 1
    assert "cqs report: it is wrong" in capsys.readouterr().err and written == [[2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlen", "0"], "--seqlen must be at least 1, got 0"),
        (["--tasks", "3,0"], "--tasks must be at least 1, got 0"),
        (["--heads", "3", "--kv-heads", "2"], "num_heads must be a positive multiple"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--pattern", "strided("], "is no expression"),
        (["--actors", "2"], "--executor must be ray with --actors"),
    ],
)
def test_impossible_options_are_refused_in_one_line(tmp_path, capsys, options, message):
    assert main([*TINY, "--out", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("cqs report: ") and message in error
    assert not (tmp_path / "rows.jsonl").exists()


def test_rows_of_other_options_or_machines_are_left_alone(tmp_path, written, capsys):
    path = tmp_path / "rows.jsonl"
    assert main([*TINY, "--tasks", "1", "--out", str(tmp_path)]) == 0
    options = [*TINY, "--seqlen", "70", "--causal", "--out", str(tmp_path)]
    assert main(options) == 2
    assert f"{path} with tokens 60, not 70; is_causal False, not True" in capsys.readouterr().err
    row = json.loads(path.read_text()) | {"device": "elsewhere"}
    path.write_text(json.dumps(row) + "\n")
    assert main([*TINY, "--tasks", "1", "--out", str(tmp_path)]) == 0
    assert main([*TINY, "--tasks", "1,2", "--out", str(tmp_path)]) == 2
    assert "machine elsewhere, not " in capsys.readouterr().err
    assert path.read_text().count("\n") == 1


@pytest.mark.parametrize("name", ["report.html", "rows.jsonl"])
@pytest.mark.parametrize("kind", ["file", "folder", "pipe"])
def test_what_a_report_has_not_written_stays(tmp_path, monkeypatch, capsys, name, kind):
    path = tmp_path / name
    if kind == "file":
        path.write_text("cqs report, by hand\n")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = os.stat(path)
    monkeypatch.setattr(
        "cqs.report.drivers.MeasuredPass", lambda *_: pytest.fail("it was measured")
    )
    assert main([*TINY, "--tasks", "1", "--out", str(tmp_path)]) == 2
    assert str(path) in capsys.readouterr().err.splitlines()[-1]
    after = os.stat(path)
    assert os.listdir(tmp_path) == [name]
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    options = [*TINY, "--tasks", "1", "--out", str(tmp_path)]
    assert main(options) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupt(self, text, write=Path.write_text, **options):
        write(self, text[:100], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", interrupt)
        assert main(options) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert main(options) == 0


def test_one_process_at_a_time_writes_a_report(tmp_path, monkeypatch, capsys):
    """Two that measure the same, or another problem, would both find no rows and add their own."""
    command = [*TINY, "--tasks", "1", "--out", str(tmp_path)]
    measure, statuses = report._measure, []

    def measure_twice(*arguments):
        monkeypatch.setattr(report, "_measure", measure)
        statuses.append(main([*command, "--seqlen", "70"]))
        measure(*arguments)

    monkeypatch.setattr(report, "_measure", measure_twice)
    assert main(command) == 0 and statuses == [2]
    error = capsys.readouterr().err
    assert (
        "--out must be a directory that no other process uses" in error and str(tmp_path) in error
    )
    assert [row.tokens for row in read_rows(tmp_path / "rows.jsonl")] == [60]


def test_a_report_may_be_in_a_directory_whose_name_is_no_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff"
    assert main([*TINY, "--tasks", "1", "--out", os.fsdecode(path)]) == 0
    assert Path(os.fsdecode(path), "report.html").exists()
