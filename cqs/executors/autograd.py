"""Autograd integration that all executors share."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem
from cqs.problem.scores import sink_rows, sinks_gradient
from cqs.worker.units import one_thread

Kept = tuple[Tensor, ...]
"""Tensors that the forward pass saves for the backward pass."""


class Attended(NamedTuple):
    """The result of a forward pass, and its backward pass."""

    answer: Partial
    """Output and LSE, with sinks if the problem has them."""
    kept: Kept
    """Inputs of the backward pass. Saved by autograd, so activation checkpointing can drop them."""
    differentiate: Callable[[Kept, Tensor, Sequence[Tensor]], Gradients]
    """Computes the gradients from ``kept`` and the gradient of the output, and adds those of
    :attr:`cqs.problem.score_terms.ScoreTerms.leaves` to sums."""
    gather_rows: Callable[[Tensor], Tensor] = lambda rows: rows
    """Returns the terms of the gradient of the sinks that are summed here, given those of the
    queries; see :func:`cqs.problem.scores.sink_rows`."""


def attend_differentiably(
    problem: Problem,
    attend: Callable[[Problem], Attended],
    forward: Callable[[Problem], Partial] | None = None,
) -> Partial:
    """Compute attention and record its backward pass for autograd.

    Autograd treats the LSE as a constant. A backward pass with ``create_graph=True`` raises
    NotImplementedError. Autocast is disabled.

    Args:
        problem: The checked problem. Per-head patterns are computed in parts.
        attend: Computes the forward pass of a problem with a single pattern.
        forward: Computes it if no gradients are required; ``None`` means ``attend``.

    Returns:
        Output and LSE.
    """
    query, key, value = problem.query, problem.key, problem.value
    if torch.is_autocast_enabled(query.device.type):  # the inputs keep their dtypes
        with torch.autocast(query.device.type, enabled=False):
            return attend_differentiably(problem, attend, forward)
    if problem.differs_by_head:
        rows: dict[int | None, list[Partial]] = {}
        for (row, _), part in problem.parts():
            rows.setdefault(row.start, []).append(attend_differentiably(part, attend, forward))
        return _join([_join(row, dim=1) for row in rows.values()], dim=0)
    if problem.requires_grad:
        leaves = () if problem.terms is None else problem.terms.leaves
        options = problem.sinks, problem, attend
        return Partial(*_Attention.apply(query, key, value, *options, *leaves))
    return attend(problem).answer if forward is None else forward(problem)


def keep_operands(
    forward: Callable[[Problem], Partial],
    backward: Callable[[Problem, Partial, Tensor], Gradients],
    problem: Problem,
) -> Attended:
    """Compute a problem, and keep query, key, value, output and LSE for ``backward``.

    Args:
        forward: Computes output and LSE of a problem.
        backward: Computes the gradients from the problem, its output and LSE, and the gradient of
            the output.
        problem: The checked problem, with a single pattern.
    """
    tensors, terms = (problem.query, problem.key, problem.value), problem.terms
    answer = forward(problem)
    # The closure must not refer to the tensors: autograd alone decides how long they live.
    nothing = problem.query.new_empty(0)
    bias = () if terms is None or terms.bias is None else (terms.bias,)
    options = replace(
        problem,
        query=nothing,
        key=nothing,
        value=nothing,
        sinks=None,
        terms=replace(terms, bias=nothing) if bias and terms else terms,
    )

    def differentiate(kept: Kept, grad_output: Tensor, sums: Sequence[Tensor]) -> Gradients:
        query, key, value, output, lse, *bias = kept
        whole = replace(options, query=query, key=key, value=value)
        if options.terms is not None:
            terms = replace(options.terms, sums=tuple(sums))
            whole = replace(whole, terms=replace(terms, bias=bias[0]) if bias else terms)
        return backward(whole, Partial(output, lse), grad_output)

    return Attended(answer, (*tensors, *answer, *bias), differentiate)


def _join(answers: Sequence[Partial], dim: int) -> Partial:
    return Partial(*(torch.cat(tensors, dim) for tensors in zip(*answers, strict=True)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        problem: Problem,
        attend: Callable[[Problem], Attended],
        *leaves: Tensor,
    ) -> Partial:
        """Compute the answer, and save the tensors that the backward pass needs."""
        answer, kept, differentiate, gather_rows = attend(
            replace(problem, query=query, key=key, value=value, sinks=sinks)
        )
        sink_tensors = () if sinks is None else (sinks, *answer)
        watched = () if problem.terms is None else problem.terms.watched
        ctx.save_for_backward(*kept, *sink_tensors, *leaves, *watched)  # PyTorch notices writes
        ctx.num_kept = len(kept)
        ctx.mark_non_differentiable(answer.lse)
        ctx.differentiate, ctx.gather_rows = differentiate, gather_rows
        ctx.is_reproducible = problem.is_reproducible
        ctx.leaves = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return answer

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value, sinks and leaves of the score terms."""
        if torch.is_grad_enabled():  # autograd records this pass, to differentiate it again
            raise NotImplementedError(
                "attention can be differentiated only once: leave out create_graph=True"
            )
        device, dtype = grad_output.device.type, grad_output.dtype
        is_autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if is_autocast else nullcontext():
            saved = ctx.saved_tensors  # read once: activation checkpointing permits one access
            sums = [
                torch.zeros(shape, dtype=lse_dtype(dtype), device=place)
                for shape, _, place in ctx.leaves
            ]
            gradients = ctx.differentiate(saved[: ctx.num_kept], grad_output, sums)
            grad_sinks = None
            if ctx.needs_input_grad[3]:
                sinks, *answer = saved[ctx.num_kept : ctx.num_kept + 3]
                with one_thread() if ctx.is_reproducible else nullcontext():
                    if ctx.is_reproducible:  # sums depend on strides
                        grad_output = grad_output.contiguous()
                        answer = [tensor.contiguous() for tensor in answer]
                    rows = ctx.gather_rows(sink_rows(sinks, Partial(*answer), grad_output))
                    grad_sinks = sinks_gradient(sinks, rows)
        query, key, value = [g if g.dtype == dtype else g.to(dtype) for g in gradients]
        leaf_gradients = [total.to(of) for total, (_, of, _) in zip(sums, ctx.leaves, strict=True)]
        return query, key, value, grad_sinks, None, None, *leaf_gradients
