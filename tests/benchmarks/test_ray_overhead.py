"""The benchmarks ``ray`` and ``sharded``: overhead of Ray, and results after failures."""

import json
import types

import pytest
import torch

from benchmarks import ray, sharded
from benchmarks.__main__ import main
from cqs.executors.verify import VerificationError


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
    options = ["--seqlen", "600", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    options += ["--workers", "2", "--repeats", "1", "--failures", "1", "--out", str(out)]
    options += ["--only", "any moment,any call,compute"]
    assert main(["sharded", *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["benchmark"], row["executor"], row["num_tasks"]) for row in rows] == [
        ("sharded", "in the workers", 2),
        ("sharded", "ray, one call", 2),
        ("sharded", "ray, a call each", 2),
        ("failures", "ray, 1 killed", 2),
        ("failures", "ray, 1 killed in any call", 2),
        ("failures", "ray, 1 killed in compute", 2),
    ]
    assert {row["case"] for row in rows} == {"causal-600-h4-kv2-d16"}
    assert rows[0]["ratio"] == 1
    for row in rows[3:]:
        assert row["ratio"] > 1
        assert row["details"]["longest_ms"] == pytest.approx(row["median_ms"])


@pytest.mark.ray
def test_rows_of_tasks_on_actors(ray_session, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["ray", "--seqlen", "700", "--repeats", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    per_case = [("ray", 7), ("ray", 13), ("ray both", 7), ("ray both", 13), ("ray failure", 13)]
    assert [(row["benchmark"], row["num_tasks"]) for row in rows] == 2 * per_case
    assert [row["case"].split("-")[0] for row in rows] == 5 * ["full"] + 5 * ["causal"]
    assert len({row["executor"] for row in rows}) == 1
    for row in rows:
        parts = [row["details"][part] for part in ray._PARTS.values()] if row["details"] else []
        assert sum(parts) == pytest.approx(row["median_ms"] / 1e3 if parts else 0, rel=0.01)
        assert row["baseline"] == (
            "undisturbed" if row["benchmark"] == "ray failure" else "one process"
        )


@pytest.mark.parametrize("moment", ["any moment", "any call", "compute"])
@pytest.mark.parametrize("wrong", ["undisturbed", "after a kill"])
def test_a_result_that_changes_is_an_error(monkeypatch, wrong, moment):
    answers = [torch.zeros(3), torch.zeros(3), torch.ones(3)]
    if wrong == "after a kill":
        answers.insert(0, torch.zeros(3))
    passes = iter(answers)
    for run in ("_run_in_one_call", "_run_in_calls"):
        monkeypatch.setattr(sharded, run, lambda *_: sharded._Run(0.01, [], next(passes)))
    cluster = types.SimpleNamespace(pids=[1, 2])
    message = "undisturbed runs differ" if wrong == "undisturbed" else "after 1 workers"
    with pytest.raises(VerificationError, match=message):
        sharded._time_failures(cluster, None, "case", 1, moment)


def test_a_run_without_a_failure_does_not_count(monkeypatch):
    pids = iter([[1, 2]] * 5 + [[3, 4]])
    seconds = iter([1.0, 1, 1, 2, 1, 4])
    monkeypatch.setattr(
        sharded,
        "_run_in_one_call",
        lambda *_: sharded._Run(next(seconds), next(pids), torch.zeros(3)),
    )
    cluster = types.SimpleNamespace(pids=[1, 2])
    row = sharded._time_failures(cluster, None, "case", 1, "any moment")
    assert (row.repeats, row.ratio, row.details) == (1, 4, {"longest_ms": 4000})


def test_failures_at_unknown_moments_are_rejected():
    with pytest.raises(ValueError, match="'x'"):
        sharded.run(failures=1, only="return,x")
    with pytest.raises(ValueError, match="only='return'"):
        sharded.run(only="return")


@pytest.mark.ray
def test_failures_require_two_actors(ray_session):
    with pytest.raises(ValueError, match="at least two workers, got 1"):
        sharded.run(tokens=[64], workers=1, failures=1)


def test_numbers_that_are_too_small_are_rejected(capsys):
    for option, least in (("--workers", 1), ("--failures", 0)):
        assert main(["sharded", option, str(least - 1)]) == 2
        assert option in capsys.readouterr().err
