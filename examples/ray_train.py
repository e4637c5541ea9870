"""Train a language model on packed documents with Ray Train, through the failure of a worker.

Run ``python examples/ray_train.py``. Each worker of the ``TorchTrainer`` is a rank of
``cqs.distributed`` and holds a contiguous shard of the packed sequence. The last worker is killed,
and the run resumes from its checkpoint. Afterwards the workers train once more from the start,
without an interruption, and the script compares the final losses.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cqs.distributed
from cqs.patterns import Pattern, documents

VOCABULARY = 16
NO_TARGET = -100
"""Target of the last token of a document, which ``cross_entropy`` ignores."""


class Block(nn.Module):
    """Attention over the whole sequence, for the tokens of this worker."""

    def __init__(self, width: int, num_heads: int) -> None:
        """Initialise the parameters."""
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.heads, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, pattern: Pattern) -> Tensor:
        """Compute ``[1, rows, width]`` for this worker's rows."""
        heads = self.heads(self.norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        output = cqs.distributed.attention(query, key, value, pattern=pattern)
        assert isinstance(output, Tensor)
        merged: Tensor = self.output(output.transpose(1, 2).flatten(2))
        return hidden + merged


class LanguageModel(nn.Module):
    """Embedding, two blocks and the output projection."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        """Initialise the parameters."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, pattern: Pattern) -> Tensor:
        """Return the logits of this worker's tokens, ``[1, rows, VOCABULARY]``."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, pattern)
        logits: Tensor = self.head(hidden)
        return logits


def pack_documents(step: int, seqlen: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the packed sequence of a step: tokens and targets, ``[1, seqlen]``, and cu_seqlens.

    Each document counts with a stride of its own, modulo the vocabulary. All workers make the same
    documents, because the step is the random seed.
    """
    generator = torch.Generator().manual_seed(step)
    ends = torch.randperm(seqlen - 1, generator=generator)[:5] + 1
    cu_seqlens = [0, *sorted(ends.tolist()), seqlen]
    tokens, targets = [], []
    for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        first, stride = torch.randint(1, 4, (2,), generator=generator)
        document = (first + stride * torch.arange(stop - start + 1)) % VOCABULARY
        tokens.append(document[:-1])
        targets.append(document[1:].clone())
        targets[-1][-1] = NO_TARGET
    return torch.cat(tokens)[None], torch.cat(targets)[None], cu_seqlens


class Training:
    """Model and optimizer of one worker."""

    def __init__(self, seqlen: int) -> None:
        """Initialise the same weights on every worker.

        Args:
            seqlen: Tokens of a packed sequence, of all workers together.
        """
        self.seqlen, self.rank, self.num_ranks = seqlen, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = LanguageModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def step(self, number: int) -> float:
        """Train on the documents of a step; return the mean loss over the whole sequence."""
        tokens, targets, cu_seqlens = pack_documents(number, self.seqlen)
        own_tokens, own_targets = (
            each.tensor_split(self.num_ranks, dim=1)[self.rank] for each in (tokens, targets)
        )
        logits = self.model(own_tokens, documents(cu_seqlens))
        loss = cross_entropy(logits[0], own_targets[0], ignore_index=NO_TARGET, reduction="sum")
        loss = loss / (targets != NO_TARGET).sum()  # the ranks' losses add up to the mean
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item()

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint after a step, on rank 0, and report metrics; every rank calls this."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self.rank == 0:
                parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({**parts, "step": step}, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint)

    def load(self, checkpoint: Checkpoint) -> int:
        """Load a checkpoint; return the number of its step."""
        with checkpoint.as_directory() as folder:
            parts = torch.load(Path(folder) / "state.pt", weights_only=True)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        return int(parts["step"])


def train(settings: dict[str, int]) -> None:
    """Train on one worker; Ray Train calls this on every worker, and again after a failure."""
    training, checkpoint = Training(settings["seqlen"]), ray.train.get_checkpoint()
    first = 0 if checkpoint is None else training.load(checkpoint) + 1
    for step in range(first, settings["num_steps"]):
        is_last_rank = training.rank == training.num_ranks - 1
        if step == settings["killed_at"] and checkpoint is None and is_last_rank:
            ray.train.get_all_reported_checkpoints()  # waits until the checkpoint is registered
            os.kill(os.getpid(), signal.SIGKILL)
        loss = training.step(step)
        if step % settings["steps_per_checkpoint"] == 0:
            training.report(step, {"loss": loss})

    uninterrupted = Training(settings["seqlen"])
    losses = [uninterrupted.step(step) for step in range(settings["num_steps"])]
    metrics = {"loss": loss, "first": losses[0], "uninterrupted": losses[-1]}
    training.report(step, {"resumed_at": first, **metrics})


def main(arguments: list[str] | None = None) -> None:
    """Train with Ray; after a failure Ray starts all workers again from the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=256, help="tokens of a packed sequence")
    parser.add_argument("--num-steps", type=int, default=16, help="at least 5")
    options = parser.parse_args(arguments)
    if options.num_steps < 5:
        parser.error(f"--num-steps must be at least 5, got {options.num_steps}")
    settings = {
        "seqlen": options.seqlen,
        "num_steps": options.num_steps,
        "steps_per_checkpoint": options.num_steps // 2,
        "killed_at": options.num_steps // 2 + 2,
    }
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config=settings,
            torch_config=TorchConfig(backend="gloo"),  # "nccl" on GPUs
            scaling_config=ScalingConfig(num_workers=options.num_workers),  # use_gpu=True on GPUs
            run_config=RunConfig(
                storage_path=storage, failure_config=FailureConfig(max_failures=1)
            ),
        )
        found = trainer.fit().metrics
    assert found is not None
    if not found["resumed_at"]:
        raise SystemExit("no worker was killed")
    print(f"worker {options.num_workers - 1} was killed in step {settings['killed_at']}")
    print(f"the run resumed at step {found['resumed_at']}")
    print(f"loss after step 0: {found['first']:.6f}, final: {found['loss']:.6f}")
    print(f"final without an interruption: {found['uninterrupted']:.6f}")
    if found["loss"] != found["uninterrupted"]:
        raise SystemExit("the final losses differ")
    print("the final losses are equal")


if __name__ == "__main__":
    main()
