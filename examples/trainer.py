"""Train a small Llama on packed documents whose tokens are sharded over all ranks.

``torchrun --nproc-per-node 3 examples/trainer.py`` writes checkpoints to ``checkpoints/``, and
resumes from the last of them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from cqs.integrations.transformers import register

SHARDED = ("input_ids", "labels", "position_ids", "shift_labels")
"""Inputs of the model with one element per token, ``[batch, tokens]``."""


class ContextParallelTrainer(Trainer):
    """A Trainer whose ranks all read the same batch, and compute one shard of its tokens each."""

    def get_cp_size(self) -> int:
        """Return the number of ranks that share a batch, by which the Trainer divides counts."""
        return int(self.args.world_size)

    def get_train_dataloader(self) -> DataLoader:
        """Return batches of the documents, the same on every rank and in a resumed run."""
        documents: Any = self.train_dataset
        loader = DataLoader(
            documents,
            batch_size=self.args.per_device_train_batch_size,
            sampler=RandomSampler(documents),
            collate_fn=self.data_collator,
        )
        seed = self.args.seed
        same: DataLoader = prepare_data_loader(
            loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed
        )
        return same

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Reject evaluation, which weights the batches of several ranks as different batches."""
        raise NotImplementedError(
            "evaluate() is not supported: evaluate a checkpoint in one process"
        )

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: "Tensor | int | None" = None,
    ) -> Any:
        """Return the sum of this rank's losses, divided by the number of labels on all ranks.

        The Trainer multiplies it by the number of ranks, because it averages losses over the ranks,
        as DistributedDataParallel averages gradients.
        """
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise NotImplementedError(
                "label_smoothing_factor and compute_loss_func are not supported: they would shift "
                "the labels of a shard"
            )
        labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)
        # Before sharding, because the last label of a shard is the first token of the next shard.
        whole = inputs | {"shift_labels": labels[:, 1:]}
        rank, num_ranks = self.args.process_index, self.args.world_size
        shard = {name: whole[name].tensor_split(num_ranks, dim=1)[rank] for name in SHARDED}
        return super().compute_loss(model, whole | shard, return_outputs, num_items_in_batch)


def make_documents(number: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Return documents of random lengths that count up by a random step."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for _ in range(number):
        length, step, first = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((5, 60), (1, 4), (0, vocabulary))
        )
        documents.append({"input_ids": [(first + step * i) % vocabulary for i in range(length)]})
    return documents


def make_trainer(directory: Path, *, attention: str = "cqs", **options: Any) -> Trainer:
    """Return a Trainer of a small Llama.

    Args:
        directory: Where checkpoints are written.
        attention: Name of the ``attn_implementation``.
        options: Further ``TrainingArguments``.
    """
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_total_limit=2,
        report_to="none",
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **options,
    )
    register(group=dist.group.WORLD if dist.is_initialized() else None)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    return ContextParallelTrainer(
        model,
        arguments,
        # Ranks require the lengths of the documents, which may begin in other shards.
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        train_dataset=make_documents(100, config.vocab_size),
    )


def find_checkpoint(directory: Path) -> str | None:
    """Return the last complete checkpoint: the Trainer writes the file of its state at the end."""
    complete = [path.parent for path in directory.glob("checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)
    return None if last is None else str(last)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(asked.directory, max_steps=asked.steps, save_steps=20)
    trainer.train(resume_from_checkpoint=find_checkpoint(asked.directory))


if __name__ == "__main__":
    main()
