"""The operator ``cqs::sharded_attention``: :func:`cqs.distributed.attention` in graphs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


class Options(NamedTuple):
    """The options of the operator; ``None`` is the default of :func:`cqs.distributed.attention`."""

    sinks: Tensor | None
    """``[num_heads]``, see :class:`cqs.Scores`."""
    alibi_slopes: Tensor | None
    bias: Tensor | None
    pattern: Tensor | None
    """Handle of the pattern."""
    seed: Tensor | None
    """Random seed of dropout, int64 on the CPU."""
    is_drawn: bool
    """Whether the graph has drawn the seed."""
    is_causal: bool
    scale: float | None
    softcap: float | None
    bias_requires_grad: bool
    dropout_p: float
    head_parallel: str
    num_chunks: int | None
    plan: str | None
    links: list[float] | None
    max_bytes: int | None
    backend: str | None
    return_lse: bool
    verify: bool
    group: str
    """Name of the process group; ``""`` is the default group."""
    joint_position: str
    joint_rows: list[int]
    """Number of joint queries and of joint keys, which are in the shards already."""
    keeps: bool
    """Whether there will be a backward pass."""
    place: int
    """Index of the call in its graph, from 1; 0 outside of graphs."""


# Operators run without the dispatch keys of autograd. These are the keys of ordinary calls.
_INCLUDED_KEYS = torch._C._dispatch_tls_local_include_set()
_EXCLUDED_KEYS = torch._C._dispatch_tls_local_exclude_set()

_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? slopes, Tensor? bias, "
    "Tensor? pattern, Tensor? seed, bool is_drawn, bool is_causal, float? scale, float? softcap, "
    "bool bias_requires_grad, float dropout_p, "
    "str head_parallel, int? num_chunks, str? plan, float[]? links, int? max_bytes, str? backend, "
    "bool return_lse, bool verify, str group, str joint_position, SymInt[] joint_rows, bool keeps, "
    "int place"
)
_SCHEMA_BACKWARD = (
    "Tensor grad_output, Tensor state, Tensor? sinks, Tensor? bias, SymInt[] query, SymInt[] key, "
    "SymInt[] value"
)


def define_operator(attend: Callable[..., Any]) -> Any:
    """Define the operator and its backward pass, which is an operator too.

    The forward pass records a graph of autograd, and returns a handle of it. The backward pass
    differentiates this graph, so both passes are those of an eager call.

    Args:
        attend: The function :func:`cqs.distributed.attention`.

    Returns:
        The operator. It returns output, LSE (0 if it is not asked for) and the handle.
    """

    def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
        chosen = Options(*options)
        sinks, bias = (
            None if each is None else each.detach().requires_grad_(chosen.keeps and is_required)
            for each, is_required in (
                (chosen.sinks, True),
                (chosen.bias, chosen.bias_requires_grad),
            )
        )
        tensors = [
            *(each.detach().requires_grad_(chosen.keeps) for each in (query, key, value)),
            *(each for each in (sinks, bias) if each is not None),
        ]
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
            scores = Scores(sinks, chosen.softcap, chosen.alibi_slopes, bias)
            found = attend(*tensors[:3], scores=scores, **_arguments(chosen))
        output, lse = found if chosen.return_lse else (found, None)
        if lse is None:
            lse = output.new_zeros(output.shape[:3], dtype=lse_dtype(output.dtype))
        state = torch.zeros(1, dtype=torch.float64, device="cpu")
        if chosen.keeps:
            leaves = [each for each in tensors if each.requires_grad]
            state = torch.from_numpy(new_handle((leaves, output)))
        results = (
            each.clone() if _memory_of(each) in kept else each.contiguous()
            for each in (output.detach(), lse)
        )
        return *results, state

    def check(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
        state = torch.empty(1, dtype=torch.float64, device="cpu")
        return *_answer_of(query, key, value), state

    def backward(
        grad_output: Tensor,
        state: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        *shapes: list[int],
    ) -> tuple[Tensor, ...]:
        leaves, output = read_handle(state.numpy())
        found = iter(torch.autograd.grad(output, leaves, grad_output, retain_graph=True))
        gradients = [next(found) for _ in shapes]
        for each in (sinks, bias):
            gradients.append(grad_output.new_empty(0) if each is None else next(found))
        return tuple(map(Tensor.contiguous, gradients))

    def check_backward(
        grad_output: Tensor,
        state: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        *shapes: Any,
    ) -> tuple[Tensor, ...]:
        of_scores = (
            grad_output.new_empty(0) if each is None else each.new_empty(each.shape)
            for each in (sinks, bias)
        )
        return *map(grad_output.new_empty, shapes), *of_scores

    define: Any = torch.library.custom_op
    tags: dict[str, Any] = {"mutates_args": (), "tags": HOST_TAGS}
    schema = f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    operator = define("cqs::sharded_attention", forward, schema=schema, **tags)
    schema = f"({_SCHEMA_BACKWARD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    differentiate = define("cqs::sharded_attention_backward", backward, schema=schema, **tags)
    operator.register_fake(check)
    differentiate.register_fake(check_backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        bias = inputs[5] if Options(*inputs[3:]).bias_requires_grad else None
        ctx.save_for_backward(output[2], inputs[3], bias)
        ctx.mark_non_differentiable(*output[1:])
        ctx.shapes = [each.shape for each in inputs[:3]]

    def differentiate_saved(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Any, ...]:
        state, sinks, bias = ctx.saved_tensors
        found = differentiate(grad_output, state, sinks, bias, *ctx.shapes)
        of_sinks, of_bias = (
            None if each is None else gradient
            for each, gradient in zip((sinks, bias), found[3:], strict=True)
        )
        return *found[:3], of_sinks, None, of_bias, *[None] * (len(Options._fields) - 3)

    operator.register_autograd(differentiate_saved, setup_context=save)
    return operator


def _arguments(chosen: Options) -> dict[str, Any]:
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


def place_in_graph() -> int:
    """Return the number of calls so far in the graph that is being traced.

    Inductor may reorder independent calls by their sizes, which differ between ranks.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph: Any = InstructionTranslator.current_tx().output
    graph.num_sharded_calls = 1 + getattr(graph, "num_sharded_calls", 0)
    place: int = graph.num_sharded_calls
    return place


# As torch.compiler.assume_constant_result does, which imports the compiler.
place_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _answer_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Return an output and an LSE without values, after a check of the tensors."""
    return check_problem(query, key, value, scale=1.0).empty_answer()


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
