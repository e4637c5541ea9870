"""Methods that are differentiable functions of PyTorch."""
# ruff: noqa: D102, Method documents the methods

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_methods.method import Method


class Differentiable(Method):
    """A method with a backward pass of its own."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of a shard, differentiable."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        tensors = [tensor.detach() for tensor in (query, key, value)]
        for tensor in tensors:
            tensor.requires_grad_(torch.is_grad_enabled())
        output = self.attend(*tensors)
        return output.detach(), (output, tensors)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        output, tensors = saved
        found: tuple[Tensor, ...] = torch.autograd.grad(
            output, tensors, grad_output, retain_graph=True
        )
        return found
