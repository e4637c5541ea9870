"""Train a small Llama of transformers to bitwise identical weights on any number of ranks.

Run ``torchrun --nproc-per-node 3 examples/reproducible_training.py``, or with any other number.
Attention is divided among the ranks. Every rank computes all other layers on whole sequences,
because their bits depend on the number of rows. The printed digest is the same for every number.
"""

import hashlib
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import cqs.distributed
from cqs.integrations.transformers import register

SIZES: Any = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
HEADS: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


class WholeAttention(torch.autograd.Function):
    """Attention of whole sequences that every rank has, computed on shards of them."""

    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> Tensor:
        """Attend from this rank's part of the sequence, and gather the outputs."""
        rank, number = dist.get_rank(group), dist.get_world_size(group)
        marks = [tensors[0].shape[2] * i // number for i in range(number + 1)]
        ctx.gather = partial(gather, group, [stop - start for start, stop in pairwise(marks)])
        ctx.own = slice(*marks[rank : rank + 2])
        ctx.leaves = [tensor[:, :, ctx.own].requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            options: Any = {"group": group, "is_causal": True, "reproducible": True}
            ctx.output = cqs.distributed.attention(*ctx.leaves, **options)
        whole: Tensor = ctx.gather(ctx.output.detach())
        return whole

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate this rank's part, and gather the gradients."""
        own = grad_output[:, :, ctx.own]
        return None, *map(ctx.gather, torch.autograd.grad(ctx.output, ctx.leaves, own))


def gather(group: Any, lengths: list[int], own: Tensor) -> Tensor:
    """Return the parts ``[batch, heads, rows, dim]`` of all ranks as one tensor."""
    parts = [own.new_empty((*own.shape[:2], length, own.shape[3])) for length in lengths]
    parts[dist.get_rank(group)].copy_(own)
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)
    return torch.cat(parts, dim=2)


def train(group: Any) -> list[Tensor]:
    """Train for 20 steps; return the losses, ``[20]``, and the weights.

    Args:
        group: The process group, or ``None`` to compute in this process alone.
    """
    register("whole", reproducible=True)
    if group is not None:

        def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
            return WholeAttention.apply(group, query, key, value).transpose(1, 2), None

        AttentionInterface.register("whole", attend)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation="whole"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, losses = torch.randint(64, (2, 70)), []
    for _ in range(20):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(weight.detach() for weight in model.parameters())]


def main() -> None:
    """Train as a rank of torchrun's, and print a digest of losses and weights."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = train(dist.group.WORLD)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in results))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {digest.hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
