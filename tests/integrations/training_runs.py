"""Train with examples/trainer.py in several processes: one, several, killed and resumed."""

import multiprocessing
import os
import sys
from pathlib import Path

from ranks import find_free_port
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from examples.trainer import make_trainer

STEPS = 50
SAVED = 20


class Killed(TrainerCallback):
    """End the process after the first checkpoint, within a step."""

    def on_pre_optimizer_step(self, args, state, control, **options):
        if state.global_step == SAVED + 3:
            os._exit(0)


def _train(num_ranks, rank, port, attention, directory, is_killed):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    directory.mkdir(exist_ok=True)
    trainer = make_trainer(
        directory, attention=attention, max_steps=STEPS, save_steps=SAVED, log_level="error"
    )
    if is_killed:
        trainer.add_callback(Killed())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(directory))
    if rank == 0:
        trainer.state.save_to_json(directory / "state.json")


def _run(num_ranks, attention, directory, *, is_killed=False):
    """Run the ranks in copies of this process, which has imported what they need."""
    context, port = multiprocessing.get_context("fork"), find_free_port()
    processes = [
        context.Process(
            target=_train, args=(num_ranks, rank, port, attention, directory, is_killed)
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * num_ranks


if __name__ == "__main__":
    top = Path(sys.argv[1])
    _run(1, "sdpa", top / "one")
    _run(3, "cqs", top / "three")
    _run(3, "cqs", top / "resumed", is_killed=True)
    _run(3, "cqs", top / "resumed")
