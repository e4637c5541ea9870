"""The operators of :func:`cqs.attention`: ``cqs::attention`` and ``cqs::dense_attention``."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.arguments import as_integer
from cqs.executors.contract import Planned, attend
from cqs.executors.local import LocalExecutor
from cqs.executors.observe import observe
from cqs.executors.operators import HOST_TAGS, as_raw, define_attention, read_pattern, read_plan
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem, check_problem
from cqs.problem.scores import Scores, sinks_gradient
from cqs.scheduler import Plan
from cqs.scheduler.kinds import check_kind
from cqs.worker.backends import check_backend_name

_EXECUTOR = LocalExecutor()


class Options(NamedTuple):
    """The options of an operator; ``None`` is the default of :func:`cqs.attention`."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    pattern: Tensor | None
    """Handle of the pattern."""
    seed: Tensor | int | None
    """Random seed of dropout, in a graph int64 on the CPU."""
    is_causal: bool
    scale: float | None
    softcap: float | None
    bias_requires_grad: bool
    dropout_p: float
    num_tasks: int | None
    plan: str | None
    """Text of the kind, see :func:`cqs.executors.operators.plan_text`."""
    backend: str | None
    verify: bool

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """Return the checked problem."""
        problem = check_problem(
            query,
            key,
            value,
            is_causal=self.is_causal,
            pattern=None if self.pattern is None else read_pattern(self.pattern),
            scale=self.scale,
            dropout_p=self.dropout_p,
            seed=None if self.seed is None else int(self.seed),
            scores=Scores(self.sinks, self.softcap, self.alibi_slopes, self.bias),
        )
        if self.bias_requires_grad and problem.terms is not None:
            return replace(problem, terms=replace(problem.terms, bias_requires_grad=True))
        return problem

    def make_plan(self, part: Problem) -> Plan:
        """Return the plan of a part of the problem."""
        return part.make_plan(self.num_tasks or 1, self.plan and read_plan(self.plan))


_SCHEMA = (
    "bool is_causal, float? scale, float? softcap, bool bias_requires_grad, float dropout_p, "
    "int? num_tasks, str? plan, str? backend, bool verify"
)


def _attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Partial:
    """Compute output and LSE."""
    chosen = Options(*options)
    problem = chosen.check(query, key, value)
    with torch.no_grad():
        return attend(
            _EXECUTOR,
            problem,
            chosen.make_plan,
            backend=chosen.backend,
            verify=chosen.verify,
        )


def _check(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Partial:
    """Check the arguments of a graph that is traced, and return tensors without values."""
    chosen = Options(*options)
    if chosen.num_tasks is not None:
        as_integer("num_tasks", chosen.num_tasks, 1)
    check_backend_name(chosen.backend)
    if chosen.plan is not None:
        check_kind(read_plan(chosen.plan))
    scale = 1.0 if chosen.scale is None else chosen.scale  # head_dim may be a symbol
    without_values = chosen._replace(scale=scale, pattern=None, seed=0)
    return without_values.check(query, key, value).empty_answer()


def _differentiate(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of query, key, value, sinks and bias."""
    output, lse, *options = saved
    chosen = Options(*options)
    problem = chosen.check(query, key, value)
    if problem.terms is not None:
        terms = problem.terms.with_sums(lse_dtype(query.dtype))
        problem = replace(problem, terms=terms)
    cuts, found = list(problem.cuts()), []
    for (where, _), (_, part) in zip(cuts, problem.parts(), strict=True):
        planned = Planned(part, chosen.make_plan(part), chosen.backend)
        name_backend = partial(_EXECUTOR.name_backend, planned)
        answer = Partial(output[where], lse[where])
        with observe("backward", planned.plan, part.num_bytes, name_backend):
            found.append(_EXECUTOR.run_backward(planned, answer, grad_output[where]))
    total = found[0]
    if len(found) > 1:
        total = Gradients.zeros(problem.query, problem.key, problem.value)
        for (where, of_keys), gradients in zip(cuts, found, strict=True):
            total.query[where] += gradients.query
            total.key[of_keys] += gradients.key  # several parts may share a KV head
            total.value[of_keys] += gradients.value
    of_sinks = query.new_empty(0)
    of_bias = (
        query.new_empty(0) if chosen.bias is None else chosen.bias.new_empty(chosen.bias.shape)
    )
    if problem.sinks is not None:
        of_sinks = sinks_gradient(problem.sinks, Partial(output, lse), grad_output)
    if problem.terms is not None and problem.terms.sums:
        of_bias = problem.terms.sums[0].view_as(of_bias).to(of_bias.dtype).contiguous()
    return *as_raw(total, query, key, value), of_sinks, of_bias


attention = define_attention("attention", _SCHEMA, _attend, _check, _differentiate, HOST_TAGS)
dense_attention = define_attention("dense_attention", _SCHEMA, _attend, _check, _differentiate)
"""The same without pattern, dropout and verification; CUDA graphs may replay it."""
