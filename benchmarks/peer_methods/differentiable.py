"""Methods that are differentiable functions of PyTorch."""
# ruff: noqa: D102, Method documents the methods

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cqs
from benchmarks.peer_methods.method import Method
from cqs.patterns import Pattern
from cqs.problem import Problem


class Differentiable(Method):
    """A method with a backward pass of its own."""

    @abstractmethod
    def attend(self, *tensors: Tensor) -> Tensor:
        """Return the output of query, key and value of a shard, differentiable."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        return record(self.attend, query, key, value)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return differentiate(saved, grad_output)


def attend_whole(
    problem: Problem,
    backend: str | None,
    pattern: Pattern | None,
    *tensors: Tensor,
    return_lse: bool = False,
) -> Any:
    """Compute all tokens of some heads of a problem on this rank, differentiably.

    Args:
        problem: The problem, for its options.
        backend: Name of a backend, or ``None``.
        pattern: Pattern of the heads, or ``None``.
        tensors: Query, key and value, ``[batch, heads, seqlen, head_dim]``.
        return_lse: Whether to return output and LSE, or else the output.
    """
    query, key, value = tensors
    return cqs.attention(
        query,
        key,
        value,
        is_causal=problem.is_causal,
        scale=problem.scale,
        pattern=pattern,
        backend=backend,
        return_lse=return_lse,
    )


def record(attend: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Any]:
    """Return the output of a function, and what :func:`differentiate` needs."""
    leaves = [tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in inputs]
    output = attend(*leaves)
    return output.detach(), (output, leaves)


def differentiate(saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs of a recorded function; may be called again."""
    output, leaves = saved
    found: tuple[Tensor, ...] = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
    return found
