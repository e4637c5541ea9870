"""Training with examples/trainer.py on several ranks has the losses of one process."""

import json
from pathlib import Path

import pytest
from program import run_program


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directories of all runs."""
    top = tmp_path_factory.mktemp("runs")
    run_program("training_runs.py", top)
    return top


def losses(directory: Path):
    history = json.loads((directory / "state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.long
def test_ranks_have_the_losses_of_one_process(runs):
    expected = losses(runs / "one")
    assert losses(runs / "ranks") == pytest.approx(expected, abs=1e-5)
    assert len(expected) == 9 and expected[-1] < expected[0] - 0.05


@pytest.mark.long
def test_a_resumed_run_has_the_losses_of_one_that_was_not_killed(runs):
    assert losses(runs / "resumed") == pytest.approx(losses(runs / "ranks"), abs=1e-5)


@pytest.mark.slow
def test_losses_of_shards_that_would_differ_are_rejected(tmp_path):
    pytest.importorskip("transformers")
    from examples.trainer import make_trainer

    trainer = make_trainer(tmp_path, max_steps=1, label_smoothing_factor=0.1)
    with pytest.raises(NotImplementedError, match="label_smoothing_factor"):
        trainer.train()
