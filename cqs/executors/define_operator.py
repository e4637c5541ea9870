"""Definition of the operators of ``torch.compile``, with their backward passes."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def options_class(schema: str) -> Any:
    """Return the class of the options of an operator, a named tuple.

    Its attribute ``schema`` begins with the tensors of the options of
    :func:`cqs.attention`: sinks, slopes and bias of :class:`cqs.Scores`, the handle of the pattern
    and the random seed of dropout, which is int64 on the CPU.

    Args:
        schema: Schema of the other options; one that is None has its default.
    """
    tensors = "Tensor? sinks, Tensor? slopes, Tensor? bias, Tensor? pattern, Tensor? seed"
    schema = f"{tensors}, {schema}"
    names: Any = " ".join(argument.split()[-1] for argument in schema.split(", "))
    return type("Options", (namedtuple("options", names),), {"schema": schema})


Pass = tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
"""A function that computes results, and one that checks its arguments while a graph is traced and
returns results without values."""


def define_operator(
    name: str,
    options: str,
    forward: Pass,
    saved: str,
    save: Callable[..., tuple[Sequence[Tensor | None], Sequence[Any]]],
    backward: Pass,
    *,
    num_results: int = 2,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define an operator and its backward pass, which is an operator too.

    Args:
        name: Name of the operator in ``torch.ops.cqs``.
        options: Schema of the arguments after query, key and value, see :func:`options_class`.
        forward: Return the output, the LSE and other results.
        saved: Schema of the arguments of the backward pass after the gradient of the output.
        save: Returns these arguments, first the tensors, given all arguments and all results.
        backward: Return the gradients of query, key, value, sinks and bias, of any shape if they
            are not required.
        num_results: Number of results.
        tags: Tags of both operators.

    Returns:
        The operator, a function.
    """
    schema = f"(Tensor query, Tensor key, Tensor value, {options})"
    operators = []
    for suffix, arguments, number, (compute, check) in (
        ("", schema, num_results, forward),
        ("_backward", f"(Tensor grad_output, {saved})", 5, backward),
    ):
        results = f"({', '.join(['Tensor'] * number)})"
        operator: Any = torch.library.custom_op(
            f"cqs::{name}{suffix}",
            partial(_call_contiguous, compute),
            mutates_args=(),
            schema=f"{arguments} -> {results}",
            tags=tags,
        )
        operator.register_fake(partial(_call_contiguous, check))
        operators.append(operator)
    attention, differentiate = operators

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept, ctx.options = save(inputs, output)
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*output[1:])

    def differentiate_kept(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Any, ...]:
        *gradients, sinks, bias = differentiate(grad_output, *ctx.saved_tensors, *ctx.options)
        required = ctx.needs_input_grad
        # Inputs 3 to 5 are sinks, slopes and bias.
        gradients += [sinks if required[3] else None, None, bias if required[5] else None]
        return *gradients, *[None] * (len(required) - len(gradients))

    attention.register_autograd(differentiate_kept, setup_context=keep)
    return attention


def _call_contiguous(compute: Callable[..., Sequence[Tensor]], *args: Any) -> tuple[Tensor, ...]:
    return tuple(map(Tensor.contiguous, compute(*args)))
