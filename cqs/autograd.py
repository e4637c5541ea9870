"""Gradients through an attention problem, whoever computes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.problem import Problem


def attend_differentiably(
    problem: Problem,
    forward: Callable[[Problem], Partial],
    backward: Callable[[Problem, Partial, Tensor], Gradients],
) -> Partial:
    """Compute ``forward(problem)`` so that its output can be differentiated, once.

    Args:
        problem: The checked problem. One whose pattern differs by head is computed in parts.
        forward: Computes the answer.
        backward: Computes the gradients from the answer and the gradient of its output. The lse is
            a constant to autograd.
    """
    if problem.differs_by_head:
        answers = [attend_differentiably(part, forward, backward) for _, part in problem.parts()]
        assert problem.pattern is not None
        _, heads = problem.pattern.heads
        rows = [answers[first : first + heads] for first in range(0, len(answers), heads)]
        return _join([_join(row, dim=1) for row in rows], dim=0)
    tensors = problem.query, problem.key, problem.value
    with torch.autocast(problem.query.device.type, enabled=False):  # dtypes are the caller's
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return Partial(*_Attention.apply(*tensors, problem, forward, backward))
        return forward(problem)


def _join(answers: Sequence[Partial], dim: int) -> Partial:
    return Partial(*(torch.cat(tensors, dim) for tensors in zip(*answers, strict=True)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        forward: Callable[[Problem], Partial],
        backward: Callable[[Problem, Partial, Tensor], Gradients],
    ) -> Partial:
        answer = forward(replace(problem, query=query, key=key, value=value))
        ctx.save_for_backward(query, key, value, *answer)
        ctx.mark_non_differentiable(answer.lse)
        ctx.options = problem.is_causal, problem.scale, problem.dropout, problem.pattern
        ctx.compute = backward
        return answer

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *answer = ctx.saved_tensors
        problem = Problem(query, key, value, *ctx.options)
        compute = partial(ctx.compute, problem, Partial(*answer))
        return *_Gradients.apply(query, key, value, grad_output, compute), None, None, None


class _Gradients(torch.autograd.Function):
    """The gradients as a function of their own, which says that it has no derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        compute: Callable[[Tensor], Gradients],
    ) -> tuple[Tensor, ...]:
        with torch.autocast(query.device.type, enabled=False):
            return tuple(gradient.to(query.dtype) for gradient in compute(grad_output))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("attention can be differentiated only once")
