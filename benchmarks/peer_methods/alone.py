"""Attention over all tokens of all heads on one rank."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

from torch import Tensor

from benchmarks.peer_methods.differentiable import Differentiable, attend_whole


class One(Differentiable):
    """The first rank computes the whole problem alone."""

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return (range(0 if self.rank else seqlen),)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        tensors = query, key, value
        return (query, tensors) if self.rank else super().forward(*tensors)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return tuple(saved) if self.rank else super().backward(saved, grad_output)

    def attend(self, *tensors: Tensor) -> Any:
        return attend_whole(self.problem, self.backend, self.problem.pattern, *tensors)
