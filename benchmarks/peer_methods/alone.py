"""Attention over all tokens of all heads on one rank."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

from torch import Tensor

from benchmarks.peer_methods.differentiable import Differentiable, attend_whole


class One(Differentiable):
    """The first rank computes the whole problem alone; or every rank computes all of it."""

    def __init__(self, *arguments: Any, each: bool = False) -> None:
        """With ``each``, all ranks compute it; the slowest shows how devices differ."""
        super().__init__(*arguments)
        self.each = each
        self.has_nothing = self.rank > 0 and not each

    def why_not(self) -> str | None:
        if self.each and not self.problem.query.is_cuda:
            return "would measure how ranks share one CPU"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return (range(0 if self.has_nothing else seqlen),)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        return (
            (query, (query, key, value)) if self.has_nothing else super().forward(query, key, value)
        )

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return tuple(saved) if self.has_nothing else super().backward(saved, grad_output)

    def attend(self, *tensors: Tensor) -> Tensor:
        options = self.problem, self.backend, self.problem.pattern
        output: Tensor = attend_whole(*options, *tensors)
        return output
