"""The benchmark ``host`` verifies calls, and times them alone and on the ranks of a group."""

import json
import os

import pytest
import torch
from ranks import run_as_torchrun

import cqs
from benchmarks import host
from benchmarks.__main__ import main
from cqs.executors.verify import VerificationError

pytestmark = pytest.mark.long
PASSES = ("forward", "forward, recorded", "forward + backward")


@pytest.fixture
def few_calls(monkeypatch):
    monkeypatch.setattr(host, "_NUM_CALLS", 2)
    monkeypatch.delenv("RANK", raising=False)


def test_rows_of_one_process(few_calls, tmp_path, capsys, one_thread):
    out = tmp_path / "rows.jsonl"
    assert main(["host", "--repeats", "2", "--seqlen", "8", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["benchmark"], row["executor"]) for row in rows] == [
        (f"host {name}", by) for name in PASSES for by in ("scaled_dot_product_attention", "local")
    ]
    for row in rows:
        is_baseline = row["executor"] == row["baseline"]
        assert row["case"] == "full-8-h8-d64" and row["num_tasks"] == 1
        assert row["ratio"] == 1 if is_baseline else row["ratio"] > 0
        assert (row["details"]["over_us"] == 0) == is_baseline


def test_rows_of_ranks_come_from_the_first(few_calls, tmp_path):
    out = tmp_path / "rows.jsonl"
    run_as_torchrun(2, run_benchmark, str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    by_ranks = [row for row in rows if row["executor"] == "2 ranks"]
    assert [row["benchmark"] for row in by_ranks] == [f"host {name}" for name in PASSES]
    assert all(row["num_tasks"] == 2 and row["details"]["over_us"] > 0 for row in by_ranks)


def run_benchmark(out):
    assert os.environ["WORLD_SIZE"] == "2"
    host._NUM_CALLS = 2
    host.run(tokens=8, repeats=1, out=out)


def test_a_wrong_result_is_not_timed(few_calls, monkeypatch, one_thread):
    monkeypatch.setattr(cqs, "attention", lambda *tensors: torch.zeros_like(tensors[0]))
    with pytest.raises(VerificationError):
        host.run(tokens=8, repeats=1)
