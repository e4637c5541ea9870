"""``cqs report`` writes a page of its rows, and replaces nothing else."""

import os
from functools import partial
from pathlib import Path

import pytest

from cqs.__main__ import main
from cqs.commands import report
from cqs.executors.verify import VerificationError
from cqs.report.measurement import read_rows
from cqs.report.rows import PASSES

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


def keys_of(path):
    return read_rows(path, lambda row: [(row["num_tasks"], row["benchmark"].split()[-1])])


def test_a_report_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    out = tmp_path / "new" / "folder"
    options = ["--tasks", "3,1", "--backward", "--backend", "reference", "--out", str(out)]
    assert main([*TINY, *options]) == 0
    assert read_rows(out / "rows.jsonl", lambda row: [row["backend"]]) == 4 * ["reference"]
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "rows.jsonl"]
    forward, backward = [[(number, name) for number in (1, 3)] for name in PASSES]
    assert keys_of(out / "rows.jsonl") == forward + backward
    memory, speedup, merge, header, *_, path = capsys.readouterr().out.splitlines()
    assert memory.startswith("Memory: with 3 tasks,") and speedup.startswith("Speed-up: 3 devices")
    assert merge.startswith("Merge: ") and header.split()[:2] == ["W", "pass"]
    assert path == str(out / "report.html")


def test_another_run_appends_its_rows_and_shows_them_alone(tmp_path, written):
    for tasks in ("1", "3,2"):
        assert main([*TINY, "--tasks", tasks, "--out", str(tmp_path)]) == 0
    assert [tasks for tasks, _ in keys_of(tmp_path / "rows.jsonl")] == [1, 2, 3]
    assert written == [[1], [2, 3]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, VerificationError])
def test_what_fails_keeps_what_was_measured(tmp_path, monkeypatch, written, capsys, error):
    from cqs.report.passes import MeasuredPass

    verify, path = MeasuredPass.verify, tmp_path / "rows.jsonl"

    def fail_at_three(work, result):
        if path.exists():
            raise error("it is wrong")
        verify(work, result)

    monkeypatch.setattr(MeasuredPass, "verify", fail_at_three)
    command = [*TINY, "--tasks", "2,3", "--out", str(tmp_path)]
    try:
        assert main(command) == 1
        assert "cqs report: it is wrong" in capsys.readouterr().err
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert written == [[2]] and keys_of(path) == [(2, "forward")]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("report.html", partial(Path.write_text, data="cqs report, by hand")),
        ("report.html", os.mkfifo),
        ("rows.jsonl", os.mkdir),
        ("rows.jsonl", partial(os.symlink, "elsewhere")),
    ],
    ids=["file", "pipe", "folder", "link"],
)
def test_what_a_report_has_not_written_stays(tmp_path, monkeypatch, capsys, name, make):
    path = tmp_path / name
    make(path)
    before = os.lstat(path)
    monkeypatch.setattr(
        "cqs.report.drivers.MeasuredPass", lambda *_: pytest.fail("it was measured")
    )
    assert main([*TINY, "--tasks", "1", "--out", str(tmp_path)]) == 2
    assert str(path) in capsys.readouterr().err.splitlines()[-1]
    after = os.lstat(path)
    assert os.listdir(tmp_path) == [name]
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
