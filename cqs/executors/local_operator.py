"""The operators of :func:`cqs.attention`: ``cqs::attention`` and ``cqs::dense_attention``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cqs.arguments import as_integer
from cqs.executors.contract import Planned, attend
from cqs.executors.define_operator import define_operator, options_class
from cqs.executors.local import LocalExecutor
from cqs.executors.observe import observe
from cqs.executors.operators import HOST_TAGS, as_raw, read_pattern, read_plan
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem, check_problem
from cqs.problem.scores import Scores, sink_rows, sinks_gradient
from cqs.scheduler import Plan
from cqs.scheduler.kinds import check_kind
from cqs.worker.backends import check_backend_name

_EXECUTOR = LocalExecutor()


_SCHEMA = (
    "bool is_causal, float? scale, float? softcap, bool bias_requires_grad, float dropout_p, "
    "int? num_tasks, str? plan, str? backend, bool verify"
)
_Options = options_class(_SCHEMA)


def _check_problem(query: Tensor, key: Tensor, value: Tensor, options: Any) -> Problem:
    """Return the checked problem of some options."""
    problem = check_problem(
        query,
        key,
        value,
        is_causal=options.is_causal,
        pattern=None if options.pattern is None else read_pattern(options.pattern),
        scale=options.scale,
        dropout_p=options.dropout_p,
        seed=None if options.seed is None else int(options.seed),
        scores=Scores(options.sinks, options.softcap, options.slopes, options.bias),
    )
    if options.bias_requires_grad and problem.terms is not None:
        return replace(problem, terms=replace(problem.terms, bias_requires_grad=True))
    return problem


def _make_plan(options: Any, part: Problem) -> Plan:
    """Return the plan of a part of the problem."""
    return part.make_plan(options.num_tasks or 1, options.plan and read_plan(options.plan))


def _attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Partial:
    """Compute output and LSE."""
    chosen = _Options(*options)
    problem, make_plan = _check_problem(query, key, value, chosen), partial(_make_plan, chosen)
    with torch.no_grad():
        return attend(_EXECUTOR, problem, make_plan, backend=chosen.backend, verify=chosen.verify)


def _check(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Partial:
    """Check the arguments of a graph that is traced, and return tensors without values."""
    chosen = _Options(*options)
    if chosen.num_tasks is not None:
        as_integer("num_tasks", chosen.num_tasks, 1)
    check_backend_name(chosen.backend)
    if chosen.plan is not None:
        check_kind(read_plan(chosen.plan))
    scale = 1.0 if chosen.scale is None else chosen.scale  # head_dim may be a symbol
    without_values = chosen._replace(scale=scale, pattern=None, seed=0)
    return _check_problem(query, key, value, without_values).empty_answer()


def _differentiate(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of query, key, value, sinks and bias."""
    output, lse, *options = saved
    chosen = _Options(*options)
    problem = _check_problem(query, key, value, chosen)
    if problem.terms is not None:
        terms = problem.terms.with_sums(lse_dtype(query.dtype))
        problem = replace(problem, terms=terms)
    cuts, parts = list(problem.cuts()), []
    for (where, _), (_, part) in zip(cuts, problem.parts(), strict=True):
        planned = Planned(part, _make_plan(chosen, part), chosen.backend)
        name_backend = partial(_EXECUTOR.name_backend, planned)
        answer = Partial(output[where], lse[where])
        with observe("backward", planned.plan, part.num_bytes, name_backend):
            parts.append(_EXECUTOR.run_backward(planned, answer, grad_output[where]))
    total = parts[0]
    if len(parts) > 1:
        total = Gradients.zeros(problem.query, problem.key, problem.value)
        for (where, key_place), gradients in zip(cuts, parts, strict=True):
            total.query[where] += gradients.query
            total.key[key_place] += gradients.key  # several parts may share a KV head
            total.value[key_place] += gradients.value
    grad_sinks = query.new_empty(0)
    grad_bias = (
        query.new_empty(0) if chosen.bias is None else chosen.bias.new_empty(chosen.bias.shape)
    )
    if problem.sinks is not None:
        rows = sink_rows(problem.sinks, Partial(output, lse), grad_output)
        grad_sinks = sinks_gradient(problem.sinks, rows)
    if problem.terms is not None and problem.terms.sums:
        grad_bias = problem.terms.sums[0].view_as(grad_bias).to(grad_bias.dtype).contiguous()
    return *as_raw(total, query, key, value), grad_sinks, grad_bias


def _save(inputs: Sequence[Any], results: Sequence[Tensor]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return query, key, value, output, LSE and the tensors of options, then the other options."""
    return (*inputs[:3], *results, *inputs[3:8]), inputs[8:]


def _check_gradients(_: Tensor, *args: Any) -> list[Tensor]:
    """Return gradients of query, key, value, sinks and bias without values."""
    score_tensors = (args[0].new_empty(0) if part is None else part for part in (args[5], args[7]))
    return [part.new_empty(part.shape) for part in (*args[:3], *score_tensors)]


_SAVED = f"Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, {_Options.schema}"
_FORWARD, _BACKWARD = (_attend, _check), (_differentiate, _check_gradients)
_PASSES = _Options.schema, _FORWARD, _SAVED, _save, _BACKWARD
attention = define_operator("attention", *_PASSES, tags=HOST_TAGS)
dense_attention = define_operator("dense_attention", *_PASSES)
"""The same without pattern, dropout and verification; CUDA graphs may replay it."""
