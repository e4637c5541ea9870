"""Training steps of a model of transformers, on one device and on ranks that share its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bottleneck import load_config
from cqs.integrations.transformers import register

_IMPLEMENTATIONS = {"cqs one": "cqs-one", "cqs": "cqs-on-ranks"}
"""Name of a method -> name of its attention in transformers; others compute ``sdpa``."""


class Training:
    """A model, its optimizer, and one sequence."""

    results = "loss", "query", "key", "value"
    """Names of the tensors that a step returns."""

    def __init__(self, shape: str, length: int, device: torch.device) -> None:
        """Make a model with the same random weights and tokens on every rank."""
        from transformers import AutoModelForCausalLM

        register("cqs-one")
        register("cqs-on-ranks", group=dist.group.WORLD)
        config = load_config(shape)
        config.max_position_embeddings = length
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        number = min(dist.get_world_size() - 1, 2 if device.type == "cuda" else 1)
        self.methods = ["cqs", "torch"][:number]
        torch.manual_seed(0)
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            tokens = torch.randint(0, config.vocab_size, (1, length + 1))
            positions = torch.arange(length)[None]
        keys = "input_ids", "labels", "position_ids"
        self._inputs = dict(zip(keys, (tokens[:, :-1], tokens[:, 1:], positions), strict=True))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)

    def step(self, name: str) -> list[Tensor]:
        """Run one step by a method; every rank calls this if the method is one of all ranks.

        Returns:
            The loss, and the gradients of the weights of the first layer's queries, keys and
            values.
        """
        self._model.set_attn_implementation(_IMPLEMENTATIONS.get(name, "sdpa"))
        self._optimizer.zero_grad()
        with self._shards(name) as inputs:
            inputs |= {"shift_labels": inputs["labels"], "use_cache": False}
            number = self._inputs["labels"].numel()
            loss: Tensor = self._model(**inputs, num_items_in_batch=number).loss
            loss.backward()
        gradients = [parameter.grad for parameter in self._model.parameters()]
        for tensor in [loss.detach(), *gradients] if name in self.methods else []:
            dist.all_reduce(tensor)
        nn.utils.get_total_norm(gradients)
        self._optimizer.step()
        layer = self._model.model.layers[0].self_attn
        weights = layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight
        return [loss.detach().float(), *(weight.grad.clone() for weight in weights)]

    @cached_property
    def _mesh(self) -> DeviceMesh:
        world: Any = dist.group.WORLD
        return DeviceMesh.from_group(world, "cuda")

    @contextmanager
    def _shards(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield what this rank computes with, in the context in which it does."""
        if name != "torch":
            parts = dist.get_world_size() if name in self.methods else 1
            own = dist.get_rank() % parts
            yield {key: each.tensor_split(parts, 1)[own] for key, each in self._inputs.items()}
            return
        from torch.distributed.tensor.experimental import context_parallel

        inputs = {key: each.clone() for key, each in self._inputs.items()}
        # Without a mask, positions that do not increase by 1 would mean packed sequences.
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        buffers = list(inputs.values())
        divided = context_parallel(
            self._mesh,
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers={*buffers},
        )
        with divided, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield inputs
