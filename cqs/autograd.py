"""Gradients through an attention problem, whoever computes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        problem: The checked problem.
        forward: Computes the answer.
        backward: Computes the gradients from the answer and the gradient of its output. The lse is
            a constant to autograd.
    """
    tensors = problem.query, problem.key, problem.value
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return forward(problem)
    return Partial(*_Attention.apply(*tensors, problem, forward, backward))


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
        ctx.options = problem.is_causal, problem.scale, backward
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *answer = ctx.saved_tensors
        is_causal, scale, backward = ctx.options
        problem = Problem(query, key, value, is_causal, scale)
        gradients = backward(problem, Partial(*answer), grad_output)
        return *(gradient.to(query.dtype) for gradient in gradients), None, None, None
