"""``python -m benchmarks``: options, files and errors."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from support.files import written_files

from benchmarks.__main__ import main


def test_only_regular_files_of_bounded_size_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    with open("rows.jsonl", "w") as file:
        file.truncate(10 * 2**30)
    for path in ("pipe", "folder", "/dev/zero", "rows.jsonl"):
        assert main(["simulate", "--fit", path]) == 2
        output, error = capsys.readouterr()
        assert output == "" and path in error


def test_pictures_replace_nothing_that_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    os.symlink("rows.jsonl", "rows.png")
    before = written_files()
    for command in (
        ["simulate", "--fit", "rows.jsonl", "--picture", "rows.png"],
        ["simulate", "--spread", "rows.jsonl", "--mtbf", "opt", "--picture", "rows.png"],
        ["patterns", "--out", "rows.jsonl", "--picture", "rows.png"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "--picture" in error and repr(command[-1]) in error
    assert written_files() == before


@pytest.mark.parametrize("name", ["thesis.tex", "folder", "pipe", "one.json", "array.npy"])
def test_rows_are_appended_to_rows_alone(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("thesis.tex").write_text("\\begin{document}\n")
    Path("one.json").write_text("[1, 2]\n")
    np.save("array.npy", np.zeros(3))
    os.mkdir("folder")
    os.mkfifo("pipe")
    monkeypatch.setattr("benchmarks.accuracy.run", lambda **_: pytest.fail("it is measured"))
    before = written_files()
    assert main(["accuracy", "--out", name]) == 2
    error = capsys.readouterr().err
    assert repr(name) in error and error.count("\n") == 1
    assert written_files() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --mtbf opt --tasks 1e8", "--tasks must be at most"),
        ("simulate --mtbf opt --tasks 1K --devices 1K", "--devices must be at most"),
        ("simulate --mtbf opt --trials 1000000000", "--trials must be at most"),
        ("simulate --mtbf opt --saves 1000000000", "--saves must be at most"),
        ("simulate --mtbf opt --slow 2:1", "slow_share must be in 0..1, got 2"),
        ("simulate --mtbf opt --trials 0", "--trials must be at least 1, got 0"),
        ("simulate --check missing.jsonl", "missing.jsonl"),
        ("simulate --slow=0.1", "--slow"),
        ("kernels --heads 2", "--heads"),
        ("block --causal yes", "--causal"),
        ("block --heads 0", "--heads must be at least 1, got 0"),
        ("case-study --backward", "--backward"),
        ("case-study --tasks 0", "--tasks must be at least 1, got 0"),
        ("peers --only star", "only must name some of one, cqs, cqs quorums"),
        ("peers --seqlen 64K,0", "--seqlen must be at least 1, got 0"),
        ("sharded --failures -1", "--failures must be at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused_at_once_with_their_name(capsys, command, message):
    start = time.process_time()
    try:
        assert main(command.split()) == 2
    except SystemExit as error:
        assert error.code == 2
    assert time.process_time() - start < 10
    output, error = capsys.readouterr()
    assert output == "" and message in error.splitlines()[-1]
