"""Attention over all tokens of some heads on one rank."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.peer_methods.method import Method
from cqs.partial import Partial
from cqs.problem import Problem
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker


class One(Method):
    """The first rank computes the whole problem alone; or every rank computes all of it."""

    def __init__(self, group: Any, worker: Worker, *, is_causal: bool, each: bool = False) -> None:
        """With ``each``, all ranks compute it; the slowest shows how devices differ."""
        super().__init__(group, worker, is_causal=is_causal)
        self.each = each
        self.has_nothing = self.rank > 0 and not each

    def why_not(self, problem: Problem) -> str | None:
        if self.each and not problem.query.is_cuda:
            return "would measure how ranks share one CPU"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return (range(0 if self.has_nothing else seqlen),)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        if self.has_nothing:
            return query, (query, key, value)
        answer = attend_alone(self.worker, query, key, value, is_causal=self.is_causal)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        if self.has_nothing:
            return tuple(saved)
        return differentiate_alone(self.worker, saved, grad_output, is_causal=self.is_causal)


def attend_alone(
    worker: Worker, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> Partial:
    """Compute attention over all tokens of some heads."""
    held = map(HeldTokens.whole, (query, key, value))
    return worker.run_together(_whole(query.shape[2], is_causal), *held)


def differentiate_alone(
    worker: Worker, saved: Sequence[Tensor], grad_output: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Compute the gradients of some heads, in the dtype of the query.

    Args:
        worker: The worker that computes.
        saved: Query, key, value, output and LSE.
        grad_output: Gradient of the output, of its shape.
        is_causal: Whether the forward pass was causal.
    """
    query, key, value, *answer = saved
    held = map(HeldTokens.whole, (query, key, value, grad_output, *answer))
    steps = _whole(query.shape[2], is_causal)
    found = worker.run_backward(steps, *held, dtype=query.dtype)
    return tuple(gradient.to(query.dtype) for gradient in found)


def _whole(seqlen: int, is_causal: bool) -> tuple[Step, ...]:
    """Return one step over all tokens, causal or not."""
    tokens = range(seqlen)
    if is_causal:
        return (Step(0, tokens, (), tokens, seqlen * (seqlen + 1) // 2),)
    return (Step(0, tokens, (tokens,), None, seqlen**2),)
