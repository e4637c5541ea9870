"""The benchmarks ``ray`` and ``sharded``: overhead of Ray, and results after failures."""

import json
import types

import pytest
import torch

from benchmarks import sharded
from benchmarks.__main__ import main
from cqs.executors.verify import VerificationError

pytestmark = pytest.mark.long


@pytest.fixture
def few_layers(ray_session, monkeypatch):
    """Also in the workers, which get the functions of the module instead of importing it."""
    monkeypatch.setattr(sharded, "_NUM_CALLS", 4)
    monkeypatch.setattr(sharded, "_NUM_LAYERS", 16)
    ray_session.cloudpickle.register_pickle_by_value(sharded)
    yield
    ray_session.cloudpickle.unregister_pickle_by_value(sharded)


@pytest.mark.ray
def test_rows_of_calls_and_failures(few_layers, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = "--seqlen 600 --heads 4 --kv-heads 2 --head-dim 16 --workers 2 --repeats 1".split()
    options += ["--failures", "1", "--only", "any moment,any call,compute", "--out", str(out)]
    assert main(["sharded", *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    executors = ["in the workers", "ray, one call", "ray, a call each"]
    executors += [f"ray, 1 killed{when}" for when in ("", " in any call", " in compute")]
    assert [row["executor"] for row in rows] == executors
    assert {(row["case"], row["num_tasks"]) for row in rows} == {("causal-600-h4-kv2-d16", 2)}
    assert rows[0]["ratio"] == 1
    for row in rows[3:]:
        assert row["ratio"] > 1
        assert row["details"]["longest_ms"] == pytest.approx(row["median_ms"])


@pytest.mark.parametrize(
    ("answers", "message"),
    [([0, 0, 1], "undisturbed runs differ"), ([0, 0, 0, 1], "after 1 workers")],
)
def test_a_result_that_changes_is_an_error(monkeypatch, answers, message):
    passes = iter(sharded._Run(0.01, [], torch.tensor([answer])) for answer in answers)
    monkeypatch.setattr(sharded, "_run_in_one_call", lambda *_: next(passes))
    cluster = types.SimpleNamespace(pids=[1, 2])
    with pytest.raises(VerificationError, match=message):
        sharded._time_failures(cluster, None, "case", 1, "any moment")
