"""Train with examples/trainer.py in several processes: one, several, killed and resumed."""

import os
import sys
from pathlib import Path

from ranks import run_as_torchrun
from transformers import TrainerCallback

from examples.trainer import find_checkpoint, make_trainer

RANKS, STEPS, SAVED = 2, 9, 4


class Killed(TrainerCallback):
    """End the process after the first checkpoint, within a step."""

    def on_pre_optimizer_step(self, args, state, control, **options):
        if state.global_step == SAVED + 2:
            os._exit(0)


def _train(attention, directory, is_killed):
    directory.mkdir(exist_ok=True)
    trainer = make_trainer(
        directory, attention=attention, max_steps=STEPS, save_steps=SAVED, log_level="error"
    )
    if is_killed:
        trainer.add_callback(Killed())
    trainer.train(resume_from_checkpoint=find_checkpoint(directory))
    if os.environ["RANK"] == "0":
        trainer.state.save_to_json(directory / "state.json")


def _run(num_ranks, attention, directory, *, is_killed=False):
    run_as_torchrun(num_ranks, _train, attention, directory, is_killed, start_method="fork")


if __name__ == "__main__":
    top = Path(sys.argv[1])
    _run(1, "sdpa", top / "one")
    _run(RANKS, "cqs", top / "ranks")
    _run(RANKS, "cqs", top / "resumed", is_killed=True)
    assert [path.name for path in (top / "resumed").iterdir()] == [f"checkpoint-{SAVED}"]
    partial = top / "resumed" / f"checkpoint-{2 * SAVED}"  # as if the run was killed while it wrote
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"")
    _run(RANKS, "cqs", top / "resumed")
