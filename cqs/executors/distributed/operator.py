"""The operator ``cqs::sharded_attention``: :func:`cqs.distributed.attention` in graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cqs.executors.define_operator import define_operator, options_class
from cqs.executors.distributed.agreement import at_place
from cqs.executors.distributed.joint import JointRows
from cqs.executors.distributed.strategy import Strategy
from cqs.executors.operators import HOST_TAGS, read_pattern, read_plan
from cqs.partial import lse_dtype
from cqs.patterns.handle import new_handle, read_handle
from cqs.problem import check_problem
from cqs.problem.scores import Scores


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


def define_sharded_attention(attend: Callable[..., Any]) -> Any:
    """Define the operator and its backward pass, which is an operator too.

    The forward pass records a graph of autograd, and returns a handle of it. The backward pass
    differentiates this graph, so both passes are those of an eager call.

    Args:
        attend: The function :func:`cqs.distributed.attention`.

    Returns:
        The operator. It returns output, LSE (0 if it is not asked for) and the handle.
    """

    def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
        chosen = _Options(*options)
        sinks, bias = chosen.sinks, chosen.bias
        shards = [part.detach().requires_grad_(chosen.keeps) for part in (query, key, value)]
        tensors = list(shards)
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(chosen.keeps)
            tensors.append(sinks)
        if bias is not None:
            bias = bias.detach().requires_grad_(chosen.keeps and chosen.bias_requires_grad)
            tensors.append(bias)
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
            answer = attend(*shards, scores=scores, **_arguments(chosen))
        output, lse = answer if chosen.return_lse else (answer, None)
        if lse is None:
            lse = output.new_zeros(output.shape[:3], dtype=lse_dtype(output.dtype))
        state = torch.zeros(1, dtype=torch.float64, device="cpu")
        if chosen.keeps:
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            state = torch.from_numpy(new_handle((leaves, output)))
        results = output.detach(), lse
        return *(part.clone() if _memory_of(part) in kept else part for part in results), state

    return define_operator(
        *("sharded_attention", _Options.schema, (forward, _check), _SAVED),
        *(_save, (_differentiate, _check_gradients)),
        num_results=3,
        tags=HOST_TAGS,
    )


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


def _arguments(chosen: Any) -> dict[str, Any]:
    """Return the arguments of :func:`cqs.distributed.attention` after query, key and value."""
    names = "is_causal", "scale", "dropout_p", "backend", "return_lse", "verify"
    degree, group, seed = chosen.head_parallel, None, chosen.seed
    if chosen.group:
        resolve: Any = dist.distributed_c10d._resolve_process_group
        group = resolve(chosen.group)
    return {
        **{name: getattr(chosen, name) for name in names},
        "group": group,
        "strategy": Strategy(
            head_parallel=int(degree) if degree.isdecimal() else degree,
            num_chunks=chosen.num_chunks,
            plan=chosen.plan and read_plan(chosen.plan),
            links=chosen.links,
            max_bytes=chosen.max_bytes,
        ),
        "joint": JointRows(chosen.joint_position, *chosen.joint_rows),
        "pattern": None if chosen.pattern is None else read_pattern(chosen.pattern),
        "seed": None if seed is None else (DrawnSeed if chosen.is_drawn else int)(seed),
    }


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
