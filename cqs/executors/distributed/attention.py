"""Differentiable context-parallel attention over the shards of a process group."""

from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.arguments import with_advice
from cqs.executors.distributed.checked_call import CheckedCall, check_call
from cqs.executors.distributed.dtensors import as_dtensor, group_of, to_local
from cqs.executors.distributed.joint import NO_ROWS, JointParts, JointRows, JointTokens
from cqs.executors.distributed.operator import define_sharded_attention
from cqs.executors.distributed.prepared import prepared_calls
from cqs.executors.distributed.strategy import Strategy
from cqs.executors.observe import is_observed
from cqs.executors.operators import handle_of, place_in_graph, plan_text, seed_of
from cqs.partial import AttentionOutput, Partial
from cqs.problem.options import AttentionOptions
from cqs.problem.scores import Scores, take_apart
from cqs.problem.tensors import autocast
from cqs.uncompiled import replaced_in_graphs, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _attention_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    strategy: Strategy | None = None,
    joint: JointTokens | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Call the operator in place of :func:`attention`."""
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
    output, lse, _ = _operator(
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
    return _to_result(Partial(output, lse), query, mesh, parts, return_lse)


@with_advice
@replaced_in_graphs(_attention_in_graph, torch._C._len_torch_dispatch_stack)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    strategy: Strategy | None = None,
    joint: JointTokens | JointRows | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | AttentionOutput:
    """Compute exact attention over a sequence that is sharded over the ranks of a group.

    Every rank of the group calls this function with its shard, a contiguous part of the sequence in
    rank order. Shards may differ in length and may be empty. Each rank gets the output for its own
    queries and the gradients of its own shard. Causal attention requires no zig-zag order.

    Each rank sends its tokens once to the ranks that compute with them, and each partial output is
    sent once to the query owner. The result is deterministic. CUDA graphs can capture the call if
    all ranks capture it.

    Args:
        query: ``[batch, num_heads, rows, head_dim]``, on a device of the group; float64, float32,
            bfloat16 or float16. Query, key and value may be DTensors on one 1-D mesh, with the
            placements ``[Shard(2)]``; the results then are DTensors too.
        key: ``[batch, num_kv_heads, rows_kv, head_dim]``, dtype and device of ``query``;
            ``num_heads`` must be a multiple of ``num_kv_heads``.
        value: ``[batch, num_kv_heads, rows_kv, value_dim]``, dtype and device of ``query``.
        group: A process group that this process has joined, or a 1-D ``DeviceMesh``; ``None`` means
            the mesh of DTensors, or else the default group. Only one thread at a time may call on
            it, forward or backward.
        strategy: How the ranks divide the call, see :class:`Strategy`; the same on all ranks.
        joint: Tokens of which every rank has a copy, see :class:`JointTokens`; ``JointRows`` are
            those of the operator, whose tensors include them already.
        **options: See :class:`cqs.problem.options.AttentionOptions`; the same on all ranks except
            ``scores``. Masks count positions in the whole sequence. A bias has this rank's queries
            and is broadcastable to ``[batch, num_heads, rows, seqlen_kv]``; with joint queries the
            rows are those of the result, on every rank. The gradients of sinks, of a bias with one
            row for all queries, and of tensors of the score function are a share; their sum over
            the ranks is the gradient, as with any parameter of which every rank has a copy. With
            ``verify`` keys and values of one KV head at a time are gathered on all ranks.

    Returns:
        ``output``, ``[batch, num_heads, rows, value_dim]``, dtype and device of ``query``; with
        ``return_lse`` also ``lse``, ``[batch, num_heads, rows]``, float32 (float64 for float64).
        With joint tokens they are plain tensors, and ``rows`` includes those of all joint queries,
        on every rank, first ("front") or last ("rear").

    Raises:
        RuntimeError: torch.distributed is not initialized, another rank has failed, two threads
            call on the group at the same time, or a CUDA graph is captured before a first call
            with the same arguments.
        TypeError: An argument has the wrong type or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes, devices or values do not fit, this process is not in ``group``,
            or another rank has an error or other arguments. In the last case every rank raises,
            and the message names that rank.
        NotImplementedError: The backend does not support the tensors or the pattern.
        cqs.VerificationError: ``verify`` found a row with an error larger than rounding explains.
            Every rank raises, and the message names the rank and the row of the whole sequence.
    """
    call = check_call(query, key, value, group, strategy, joint, options)
    return _attend(call, query)


_operator = define_sharded_attention(attention)


@uncompiled
@with_advice
def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    strategy: Strategy | None = None,
    joint: JointTokens | None = None,
    **options: Unpack[AttentionOptions],
) -> "PreparedAttention":
    """Prepare calls of :func:`attention` that have the same options and shapes.

    Every rank of the group calls this. It checks the arguments, compares them between the ranks,
    chooses the plan and lays out what each rank computes, sends and receives. It computes nothing.

    Args:
        query: A tensor with the shape, dtype and device of later queries, which requires gradients
            if those do; its values are not read.
        key: A tensor like later keys.
        value: A tensor like later values.
        group: The process group, see :func:`attention`.
        strategy: How the ranks divide the calls, see :class:`Strategy`.
        joint: Tensors like later joint tokens, or ``None``; their length may differ later.
        **options: The options of later calls, see :func:`attention`. The seed is an argument of the
            call, and values of sinks are not read.

    Returns:
        A function of query, key and value that computes what :func:`attention` computes with these
        options.

    Raises:
        RuntimeError: See :func:`attention`, also for the other errors.
        TypeError: An argument has the wrong type.
        ValueError: Arguments do not fit, or ranks differ; the message names the rank.
        NotImplementedError: The backend does not support the tensors or the pattern.
    """
    call = check_call(query, key, value, group, strategy, joint, {**options, "seed": None})
    prepared_calls(call.group, call.values).prepare(call.group, call.problem)
    return PreparedAttention(call.group, strategy, options, call.values)


class PreparedAttention:
    """A function that computes attention over shards, with options that were checked before.

    Returned by :func:`prepare`. Shard lengths may differ from call to call; new lengths are laid
    out in the first call that has them.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None",
        strategy: Strategy | None,
        options: AttentionOptions,
        values: dict[str, Any],
    ) -> None:
        """Take the options of a call, and the values on which the ranks have agreed."""
        self._group, self._strategy = group, strategy
        self._options, self._values = options, values

    @uncompiled
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        seed: int | None = None,
        scores: Scores | None = None,
        joint: JointTokens | None = None,
    ) -> Tensor | AttentionOutput:
        """Compute attention; every rank of the group calls this.

        Args:
            query: ``[batch, num_heads, rows, head_dim]``. Only ``rows`` may differ from the query
                that was prepared.
            key: ``[batch, num_kv_heads, rows_kv, head_dim]``.
            value: ``[batch, num_kv_heads, rows_kv, value_dim]``.
            seed: Random seed of dropout; ``None`` draws one on rank 0 for all.
            scores: Options of the scores, as prepared; only the values of sinks may differ.
            joint: Joint tokens, or ``None``.

        Returns:
            What :func:`attention` returns.

        Raises:
            ValueError: A tensor differs from those that were prepared, or ranks differ; other
                errors are those of :func:`attention`.
        """
        options: AttentionOptions = {**self._options, "seed": seed, "scores": scores}
        operands = query, key, value, self._group, self._strategy, joint, options
        return _attend(check_call(*operands, self._values), query)


def _attend(call: CheckedCall, query: Tensor) -> Tensor | AttentionOutput:
    """Compute a checked call."""
    if call.compute is not None and not is_observed():
        answer = call.compute(call.problem.query, call.problem.key, call.problem.value)
    else:
        answer = prepared_calls(call.group, call.values).attend(call.group, call.problem)
    return _to_result(answer, query, call.mesh, call.joint, call.values["return_lse"])


def _to_result(
    answer: Partial,
    query: Tensor,
    mesh: "DeviceMesh | None",
    joint: JointParts | None,
    return_lse: bool,
) -> Tensor | AttentionOutput:
    """Return what a call returns, as DTensors with the rows of ``query`` if there is a mesh."""
    if joint is not None:
        output, lse = joint.gather(answer.output), answer.lse
        answer = Partial(output, joint.gather(lse) if return_lse else lse)
    elif mesh is not None:
        answer = Partial(*(as_dtensor(result, query, mesh) for result in answer))
    return answer.to_result(return_lse)
