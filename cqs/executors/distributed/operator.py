"""The operator ``cqs::sharded_attention``: :func:`cqs.distributed.attention` in graphs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cqs.executors.define_operator import define_operator, options_class
from cqs.executors.distributed.agreement import at_place
from cqs.executors.distributed.shards import (
    NO_ROWS,
    JointParts,
    JointRows,
    JointTokens,
    as_dtensors,
    group_of,
    to_local,
)
from cqs.executors.distributed.strategy import Strategy
from cqs.executors.operators import (
    HOST_TAGS,
    handle_of,
    place_in_graph,
    plan_text,
    read_pattern,
    read_plan,
    seed_of,
)
from cqs.partial import Partial, lse_dtype
from cqs.patterns.handle import new_handle, read_handle
from cqs.problem import check_problem
from cqs.problem.options import AttentionOptions
from cqs.problem.scores import Scores, take_apart
from cqs.problem.tensors import autocast


class DrawnSeed(int):
    """A random seed that a graph has drawn on this rank; all ranks use that of rank 0."""


# Operators run without the dispatch keys of autograd. These are the keys of ordinary calls.
_INCLUDED_KEYS = torch._C._dispatch_tls_local_include_set()
_EXCLUDED_KEYS = torch._C._dispatch_tls_local_exclude_set()

# Among them are: whether the graph has drawn the seed; the name of the group, "" for the default
# one; position and numbers of the joint tokens that are in the shards already; whether there will
# be a backward pass; and the index of the call in its graph, from 1, or 0 outside of graphs.
_Options = options_class(
    "bool is_drawn, bool is_causal, float? scale, float? softcap, bool bias_requires_grad, "
    "float dropout_p, str head_parallel, int? num_chunks, str? plan, float[]? links, "
    "int? max_bytes, str? backend, bool return_lse, bool verify, str group, str joint_position, "
    "SymInt[] joint_rows, bool keeps, int place"
)
_SAVED = "Tensor state, Tensor? sinks, Tensor? bias, SymInt[] query, SymInt[] key, SymInt[] value"


def attention_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    strategy: Strategy | None = None,
    joint: JointTokens | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Call the operator in place of :func:`cqs.distributed.attention`."""
    joined = group_of(group, query)
    shards, mesh = to_local(*autocast(query, key, value))
    parts = None if joint is None else JointParts(joint, joined)
    if parts is not None:
        shards, options = parts.join(shards, options)
    tensors, softcap, bias_requires_grad, is_eager = take_apart(options.get("scores"))
    if is_eager:
        return NotImplemented
    strategy, seed = Strategy() if strategy is None else strategy, options.get("seed")
    dropout_p, return_lse = options.get("dropout_p", 0.0), options.get("return_lse", False)
    rows = NO_ROWS if parts is None else parts.rows
    output, lse, _ = torch.ops.cqs.sharded_attention.default(
        *shards,
        *tensors,
        handle_of(options.get("pattern")),
        seed_of(dropout_p, seed),
        seed is None,
        options.get("is_causal", False),
        options.get("scale"),
        softcap,
        bias_requires_grad,
        dropout_p,
        str(strategy.head_parallel),
        strategy.num_chunks,
        plan_text(strategy.plan),
        None if strategy.links is None else [*strategy.links],
        strategy.max_bytes,
        options.get("backend"),
        return_lse,
        options.get("verify", False),
        "" if joined is None else joined.group_name,
        rows.position,
        [*rows[1:]],
        bias_requires_grad
        or torch.is_grad_enabled()
        and any(part is not None and part.requires_grad for part in (*shards, tensors[0])),
        place_in_graph() if torch.compiler.is_dynamo_compiling() else 0,
    )
    answer = Partial(output, lse)
    if parts is not None:
        answer = parts.gather(answer, with_lse=return_lse)
    elif mesh is not None:
        answer = as_dtensors(answer, query, mesh)
    return answer.to_result(return_lse)


def define_sharded_attention(attend: Callable[..., Any]) -> None:
    """Define the operator and its backward pass, which is an operator too.

    Args:
        attend: Computes a call, given its shards, group, strategy, joint tokens and options.
    """
    define_operator(
        *("sharded_attention", _Options.schema, (partial(_compute, attend), _check), _SAVED),
        *(_save, (_differentiate, _check_gradients)),
        num_results=3,
        tags=HOST_TAGS,
    )


def _compute(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """Return output, LSE (0 if it is not asked for) and a handle of a recorded graph of autograd.

    The backward pass differentiates this graph, so both passes are those of an eager call.
    """
    chosen = _Options(*options)
    given = query, key, value, chosen.sinks, chosen.bias
    required = *[chosen.keeps] * 4, chosen.keeps and chosen.bias_requires_grad
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(is_required)
        for tensor, is_required in zip(given, required, strict=True)
    ]
    (*shards, sinks, bias), tensors = leaves, [leaf for leaf in leaves if leaf is not None]
    # A compiled graph may reuse the memory of these tensors, and of the results.
    borrowed, kept = set(map(_memory_of, tensors)), set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(_memory_of(tensor))
        return tensor.clone() if _memory_of(tensor) in borrowed else tensor

    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED_KEYS, _EXCLUDED_KEYS),
        torch.set_grad_enabled(chosen.keeps),
        saved_tensors_hooks(keep, lambda saved: saved),
        at_place(chosen.place),
    ):
        scores = Scores(sinks, chosen.softcap, chosen.slopes, bias)
        result = attend(tuple(shards), *_arguments(chosen, scores))
    output, lse = result if chosen.return_lse else (result, None)
    if lse is None:
        lse = output.new_zeros(output.shape[:3], dtype=lse_dtype(output.dtype))
    state = torch.zeros(1, dtype=torch.float64, device="cpu")
    if chosen.keeps:
        differentiated = [tensor for tensor in tensors if tensor.requires_grad]
        state = torch.from_numpy(new_handle((differentiated, output)))
    results = output.detach(), lse
    return *(part.clone() if _memory_of(part) in kept else part for part in results), state


def _check(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Return output, LSE and state without values, after a check of the tensors."""
    state = torch.empty(1, dtype=torch.float64, device="cpu")
    return *check_problem(query, key, value, scale=1.0).empty_answer(), state


def _save(inputs: Sequence[Any], results: Sequence[Tensor]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the state, sinks and a bias with gradients, then the shapes of the shards."""
    bias = inputs[5] if _Options(*inputs[3:]).bias_requires_grad else None
    return (results[2], inputs[3], bias), [shard.shape for shard in inputs[:3]]


def _differentiate(grad_output: Tensor, state: Tensor, *saved: Any) -> list[Tensor]:
    """Compute the gradients of query, key, value, sinks and bias."""
    leaves, output = read_handle(state.numpy())
    gradients = iter(torch.autograd.grad(output, leaves, grad_output, retain_graph=True))
    sinks, bias, *shapes = saved
    return [
        grad_output.new_empty(0) if part is None else next(gradients)
        for part in (*shapes, sinks, bias)
    ]


def _check_gradients(grad_output: Tensor, state: Tensor, *saved: Any) -> list[Tensor]:
    """Return gradients without values."""
    score_tensors = (grad_output.new_empty(0) if part is None else part for part in saved[:2])
    gradients = list(map(grad_output.new_empty, saved[2:]))
    return gradients + [part.new_empty(part.shape) for part in score_tensors]


def _arguments(chosen: Any, scores: Scores) -> tuple[Any, ...]:
    """Return group, strategy, joint tokens and options of a call."""
    names = "is_causal", "scale", "dropout_p", "backend", "return_lse", "verify"
    degree, group, seed = chosen.head_parallel, None, chosen.seed
    if chosen.group:
        resolve: Any = dist.distributed_c10d._resolve_process_group
        group = resolve(chosen.group)
    strategy = Strategy(
        head_parallel=int(degree) if degree.isdecimal() else degree,
        num_chunks=chosen.num_chunks,
        plan=chosen.plan and read_plan(chosen.plan),
        links=chosen.links,
        max_bytes=chosen.max_bytes,
    )
    options = {
        **{name: getattr(chosen, name) for name in names},
        "scores": scores,
        "pattern": None if chosen.pattern is None else read_pattern(chosen.pattern),
        "seed": None if seed is None else (DrawnSeed if chosen.is_drawn else int)(seed),
    }
    return group, strategy, JointRows(chosen.joint_position, *chosen.joint_rows), options


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
