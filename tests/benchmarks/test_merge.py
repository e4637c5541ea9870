"""The benchmark ``merge``."""

import json

import pytest

from benchmarks import merge
from benchmarks.__main__ import main
from cqs.executors.verify import VerificationError


def test_each_dtype_and_shape_has_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(merge, "_COPY_BYTES", 2**16)
    out = tmp_path / "rows.jsonl"
    assert main(["merge", "--seqlen", "20", "--repeats", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shapes = [f"{parts}-parts-20-h{heads}-d{dim}" for heads, dim, _, parts in merge._SHAPES]
    assert [(row["dtype"], row["case"]) for row in rows] == [
        (dtype, shape)
        for dtype in ("float32", "float64", "bfloat16", "float16")
        for shape in shapes
    ]
    for row in rows:
        rates = row["details"]
        assert row["ratio"] > 0 and rates["threads"] >= 1
        assert rates["gigabytes_per_second"] > 0 and rates["copy_gigabytes_per_second"] > 0


def test_a_wrong_merge_is_not_timed(monkeypatch):
    monkeypatch.setattr(merge, "merge_rows", lambda answer, parts: [t.zero_() for t in answer])
    monkeypatch.setattr(merge, "time_in_turn", lambda *_: pytest.fail("it is timed"))
    with pytest.raises(VerificationError):
        merge.run(tokens=20, repeats=1)
