"""The examples for Ray run as scripts, on the Ray of the other tests."""

import runpy
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(ray_session, monkeypatch, capsys):
    """Run a script with arguments as ``python`` would; return the lines that it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.long
def test_a_killed_worker_does_not_change_the_final_loss(run_example, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process less
    printed = run_example("ray_train.py", "--num-steps", 8, "--seqlen", 130)
    assert "worker 1 was killed in step 6" in printed
    assert "the run resumed at step 5" in printed
    assert printed[-1] == "the final losses are equal"


def test_too_few_steps_to_kill_a_worker_are_rejected(run_example):
    with pytest.raises(SystemExit):
        run_example("ray_train.py", "--num-steps", 4)


@pytest.mark.long
def test_documents_are_embedded_by_a_cluster_that_frees_its_workers(run_example, ray_session):
    before = ray_session.available_resources()["GPU"]
    printed = run_example(
        "ray_data.py", "--num-documents", 3, "--max-length", 600, "--num-workers", 1
    )
    assert sum(line.startswith("document ") for line in printed) == 3
    assert "document 2: 600 tokens" in "\n".join(printed)
    assert "largest deviation" in printed[-1]
    deadline = time.monotonic() + 60
    while ray_session.available_resources().get("GPU") != before:
        assert time.monotonic() < deadline, ray_session.available_resources()
        time.sleep(0.1)
