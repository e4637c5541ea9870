"""Train a small Llama with torchtitan's Trainer: with its attention in one process, cqs in three.

The argument is the directory for the losses of all steps.
"""

import json
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import run_as_torchrun
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

SEQLEN, VOCABULARY, STEPS = 48, 64, 3

# Torchtitan supports accelerators only: a CPU lacks these functions of its device.
_CPU = types.ModuleType("device")
_CPU.current_device = lambda: 0
_CPU.get_device_name = lambda _: "cpu"
_CPU.get_device_properties = lambda _: types.SimpleNamespace(total_memory=1)
_CPU.memory_stats = lambda _: {}
for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
    setattr(_CPU, name, lambda *_: None)
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: _CPU

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3 import _build_llama3_layers, model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from cqs.integrations.torchtitan import convert  # noqa: E402


class Tokenizer(BaseTokenizer):
    """Required by the Trainer, and not used."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


class PackedDocuments(BaseDataLoader):
    """Rows of packed documents that count up; the rows of a batch differ."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **_):
        pass

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            # The second row has documents as long as the shards of three ranks.
            rows = [(5, 1, 30, 12), (16, 16, 16)]
            positions = torch.stack([torch.cat([*map(torch.arange, lengths)]) for lengths in rows])
            first = torch.randint(VOCABULARY, (2, 1), generator=generator)
            tokens = (first + 3 * torch.arange(SEQLEN + 1)) % VOCABULARY
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, _):
        pass


def make_spec():
    """Return the debug model with fewer layers, and KV heads that three ranks do not divide."""
    spec = model_registry("debugmodel")
    spec.model.layers = _build_llama3_layers(
        n_layers=2,
        dim=256,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=256,
        rope=spec.model.layers[0].attention.rope,
        attn_backend="flex",
    )
    for layer in spec.model.layers:
        layer.attention.rope.dim = 64
    return spec


def dense_attention(query, key, value, *, block_mask, scale, enable_gqa, **_):
    """Compute FlexAttention with the dense mask of torchtitan's block mask."""
    mask = create_mask(block_mask.mask_mod, len(query), None, SEQLEN, SEQLEN, query.device)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options), None


def train(spec, path):
    # FlexAttention has no gradients on a CPU, and compilation takes longer than the computation.
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    attention._compiled_create_block_mask = create_block_mask
    # It calls torch.distributed.set_timeout, which PyTorch 2.13 lacks.
    utils.set_pg_timeouts = lambda **_: None
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=str(path.parent),
        tokenizer=Tokenizer.Config(),
        dataloader=PackedDocuments.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=1e-3, implementation="for-loop"),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=SEQLEN,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            context_parallel_degree=int(os.environ["WORLD_SIZE"]),
            context_parallel_load_balancer=None,
            spmd_backend="full_dtensor",
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )
    config.metrics.log_freq = 1
    trainer = config.build()
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no scaled sums
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # random weights depend on the number of ranks
        whole = torch.randn(parameter.shape, generator=generator) / 16
        mesh, placements = parameter.device_mesh, parameter.placements
        with torch.no_grad():
            parameter.copy_(distribute_tensor(whole, mesh, placements))
    losses, step = [], trainer.forward_backward_step

    def recorded_step(**options):
        loss = step(**options)
        losses.append(float(loss.full_tensor()))  # the sum of all ranks
        return loss

    trainer.forward_backward_step = recorded_step
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(losses))


if __name__ == "__main__":
    top = Path(sys.argv[1])
    run_as_torchrun(1, train, make_spec(), top / "flex.json", start_method="fork")
    run_as_torchrun(3, train, convert(make_spec()), top / "cqs.json", start_method="fork")
