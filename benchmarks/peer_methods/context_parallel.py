"""PyTorch's own context parallelism."""
# ruff: noqa: D102, Method documents the methods

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peer_methods.chunked import Chunked
from benchmarks.peer_methods.differentiable import Differentiable


class Torch(Chunked, Differentiable):
    """PyTorch's context parallelism, a prototype, with its own zig-zag if causal.

    It uses cuDNN's kernel, because it does not support ours, and merges partial outputs by PyTorch
    operators. Shards are contiguous; otherwise it would copy them.
    """

    def why_not(self) -> str | None:
        problem, tokens = self.problem, 256 * self.num_ranks
        if not problem.query.is_cuda:
            return "requires GPUs"
        if problem.pattern is not None:
            return "does not support sparse patterns"
        if reason := super().why_not():
            return reason
        trial = [self.shard(t[:, :, :tokens]) for t in (problem.query, problem.key, problem.value)]
        try:
            with torch.enable_grad():
                output, saved = self.forward(*trial)
            self.backward(saved, output)
        except Exception as error:  # a prototype may raise anything
            return f"fails: {error!r}"
        return None

    def shard(self, whole: Tensor) -> Tensor:
        return super().shard(whole).contiguous()

    def attend(self, *tensors: Tensor) -> Tensor:
        _prototype()._cp_options.enable_load_balance = self.problem.is_causal  # global in PyTorch
        output: Tensor = _context_parallel_attention(self.num_ranks)(
            *tensors,
            is_causal=self.problem.is_causal,
            scale=self.problem.scale,
            enable_gqa=tensors[0].shape[1] != tensors[1].shape[1],
        )
        return output


class _Attention(torch.nn.Module):
    """The module that PyTorch makes context-parallel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output: Tensor = F.scaled_dot_product_attention(query, key, value, **options)
        return output


@lru_cache(maxsize=1)
def _context_parallel_attention(num_ranks: int) -> torch.nn.Module:
    """Return PyTorch's attention over shards, for the default group."""
    prototype = _prototype()
    prototype._enable_context_parallel_dispatcher()
    kind = prototype._ContextParallel.AttentionType.SDPA
    style = prototype._ContextParallel(seq_dim=2, attention_type=kind)
    return parallelize_module(_Attention(), init_device_mesh("cuda", (num_ranks,)), style)


def _prototype() -> ModuleType:
    """Import PyTorch's private module at first use; without it only this method is left out."""
    return import_module("torch.distributed.tensor.experimental._context_parallel._attention")
