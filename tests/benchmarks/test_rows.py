"""Programs that measure write rows of what they compare, and time no wrong result."""

import json

import pytest
import torch

import cqs
from benchmarks import host, merge
from benchmarks.__main__ import main
from cqs.executors.verify import VerificationError

SMALL = "--repeats 1 --heads 2 --head-dim 16"
PROGRAMS = {
    "merge": ("--seqlen 20 --repeats 2", {"cpu"}),
    "packed": ("--seqlen 16384 --repeats 2", {"plan of one rank"}),
    "host": ("--seqlen 8 --repeats 2", {"scaled_dot_product_attention", "local"}),
    "block": (f"--seqlen 64,96 {SMALL}", {"one"}),
    "case-study": (f"--seqlen 120,60 --tasks 7,1 --causal {SMALL}", {"local"}),
    "patterns": (
        "--seqlen 1024 --repeats 1 --only block-diagonal,window-50",
        {"cqs", "dense", "masked", "naive"},
    ),
}
"""Program -> options, and the executors of its rows."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they are benchmarks")
@pytest.mark.sample(1000)  # the first alone
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_all_executors_are_written(name, monkeypatch, tmp_path, one_thread):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(merge, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(host, "_NUM_CALLS", 2)
    (options, executors), out = PROGRAMS[name], tmp_path / "rows.jsonl"
    assert main([name, *options.split(), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["executor"] for row in rows} == executors
    assert all(row["median_ms"] > 0 and row["ratio"] > 0 and row["repeats"] > 0 for row in rows)


def test_a_wrong_result_is_not_timed(monkeypatch, one_thread):
    monkeypatch.setattr(merge, "merge_rows", lambda answer, parts: [t.zero_() for t in answer])
    monkeypatch.setattr(merge, "time_in_turn", lambda *_: pytest.fail("it is timed"))
    monkeypatch.setattr(cqs, "attention", lambda *tensors: torch.zeros_like(tensors[0]))
    for program, tokens in ((merge, 20), (host, 8)):
        with pytest.raises(VerificationError):
            program.run(tokens=tokens, repeats=1)
