"""Differentiable context-parallel attention over the shards of a process group."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.arguments import as_integer, with_advice
from cqs.executors.distributed.agreement import errors_shared
from cqs.executors.distributed.checked_call import (
    FIXED,
    check_call,
    check_capture,
    joined_group,
    values_of,
)
from cqs.executors.distributed.dtensors import as_dtensor, group_of, to_local
from cqs.executors.distributed.joint import JointTokens
from cqs.executors.distributed.operator import define_operator, place_in_graph
from cqs.executors.distributed.prepared import prepared_calls
from cqs.executors.operators import handle_of, plan_text, seed_of
from cqs.partial import AttentionOutput, Partial
from cqs.patterns import Pattern
from cqs.problem import check_problem
from cqs.problem.scores import Scores, take_apart
from cqs.problem.tensors import autocast
from cqs.scheduler.kinds import Kind
from cqs.uncompiled import replaced_in_graphs, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _attention_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scores: Scores | None = None,
    head_parallel: int | str = "auto",
    num_chunks: int | None = None,
    plan: Kind | str | None = None,
    links: Iterable[float] | None = None,
    max_bytes: int | None = None,
    joint_query: Tensor | None = None,
    joint_key: Tensor | None = None,
    joint_value: Tensor | None = None,
    joint_position: str = "front",
    backend: str | None = None,
    return_lse: bool = False,
    verify: bool = False,
) -> Any:
    """Call the operator in place of :func:`attention`."""
    joined = group_of(group, query)
    shards, mesh = to_local(*autocast(query, key, value))
    joint = JointTokens(joint_query, joint_key, joint_value, joint_position, joined)
    shards, scores = joint.join(shards, scores, is_causal, pattern, dropout_p, verify)
    of_scores, softcap, bias_requires_grad, is_eager = take_apart(scores)
    if is_eager:
        return NotImplemented
    sinks = of_scores[0]
    output, lse, _ = _operator(
        *shards,
        *of_scores,
        handle_of(pattern),
        seed_of(dropout_p, seed),
        seed is None,
        is_causal,
        scale,
        softcap,
        bias_requires_grad,
        dropout_p,
        str(head_parallel),
        num_chunks,
        plan_text(plan),
        None if links is None else [*links],
        max_bytes,
        backend,
        return_lse,
        verify,
        "" if joined is None else joined.group_name,
        joint.rows.position,
        [*joint.rows[1:]],
        bias_requires_grad
        or torch.is_grad_enabled()
        and any(each is not None and each.requires_grad for each in (*shards, sinks)),
        place_in_graph() if torch.compiler.is_dynamo_compiling() else 0,
    )
    return _to_result(Partial(output, lse), query, mesh, joint, return_lse)


@replaced_in_graphs(with_advice(_attention_in_graph), torch._C._len_torch_dispatch_stack)
@with_advice
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scores: Scores | None = None,
    head_parallel: int | str = "auto",
    num_chunks: int | None = None,
    plan: Kind | str | None = None,
    links: Iterable[float] | None = None,
    max_bytes: int | None = None,
    joint_query: Tensor | None = None,
    joint_key: Tensor | None = None,
    joint_value: Tensor | None = None,
    joint_position: str = "front",
    backend: str | None = None,
    return_lse: bool = False,
    verify: bool = False,
) -> Tensor | AttentionOutput:
    """Compute exact attention over a sequence that is sharded over the ranks of a group.

    Every rank of the group calls this function with its shard, a contiguous part of the sequence in
    rank order. Shards may differ in length and may be empty. Each rank gets the output for its own
    queries and the gradients of its own shard. Causal attention requires no zig-zag order.

    Each rank sends its tokens once to the ranks that compute with them, and each partial output is
    sent once to the query owner. The result is deterministic. CUDA graphs can capture the call if
    all ranks capture it.

    Joint tokens are those of which every rank has a copy, for example text beside a video or
    registers. They come before or after the shards in the whole sequence, and each of their queries
    is computed once.

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
        is_causal: Whether query i sees only keys up to ``i + seqlen_kv - seqlen_q``, counted
            over the whole sequence.
        pattern: Sparse pattern over the whole sequence, of :mod:`cqs.patterns`, or ``None``.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        dropout_p: Probability in [0, 1) that a pair is dropped after the softmax. The dropout mask
            equals that of :func:`cqs.attention` with the same seed.
        seed: Random seed of dropout, from 0 to 2^63 - 1; ``None`` draws one on rank 0 for all.
        scores: Sinks, soft cap, ALiBi or a score function, the same on all ranks, and a bias of
            this rank's queries, broadcastable to ``[batch, num_heads, rows, seqlen_kv]``; see
            :class:`cqs.Scores`. With joint queries the rows are those of the result, on every rank.
            The gradients of sinks, of a bias with one row for all queries, and of tensors of the
            score function are a share; their sum over the ranks is the gradient, as with any
            parameter of which every rank has a copy.
        head_parallel: Head-parallel (Ulysses) degree. The heads are divided into so many groups,
            each computed by ``ranks / head_parallel`` ranks with ``plan``. A degree of 1 uses the
            plan alone; the number of ranks is Ulysses (Jacobs et al., arXiv 2309.14509).
            ``"auto"`` picks, among the degrees and plans predicted within 2 % of the fastest, those
            with the lowest peak memory; without gradients and up to 512K keys, the smallest degree.
            The ranks of a host should be consecutive.
        num_chunks: Maximum number of head chunks of a rank: one chunk is sent while another is
            computed. ``None`` chooses it by the work and the links. The number used divides the
            KV heads of a rank.
        plan: Kind of the plan of ``ranks / head_parallel`` tasks: ``"quorums"``, ``"rows"`` (the
            traffic of ring attention and all-gather), ``"grid"``, ``"documents"``, or a
            kind of :func:`cqs.make_plan`. ``None`` means quorums on one host, and on several hosts
            or with ``links`` the kind that is predicted to be the fastest, also within ``"grid"``.
            With a pattern of :func:`cqs.patterns.documents` it means ``"documents"`` on one host,
            and otherwise includes it.
        links: ``(bandwidth, latency)`` of the links between hosts or, on one host, within it, for
            the choice of ``plan`` and ``head_parallel``: bytes per second of a rank and direction,
            and seconds. ``None`` means, on one host, those of rank 0's device in
            :data:`cqs.scheduler.machines.MACHINES`; on several, what rank 0 measures in the first
            call on the group. Another run may measure other links and choose another plan, which
            rounds differently: pass them for results that are bitwise reproducible.
        max_bytes: Most bytes that a rank holds at once for its exchanges with others, at least 1:
            received queries, keys and values, with its own rows among them; packed rows until they
            are sent; partial outputs and gradients that it computes for other ranks or receives
            from them; the float32 sums of its own; and what it keeps for the backward pass beside
            its own shard. Not counted are the shard, its results and gradients, blocks of a bias,
            joint outputs, and the scratch of a kernel or a merge while it runs. The cost model
            chooses the fastest order of receiving tokens that fits; the backward pass receives
            them again. ``None`` means no limit on CPUs, and on GPUs 90 % of the memory that is free
            on every rank in the first call with these shards.
        joint_query: ``[batch or 1, num_heads, any length, head_dim]``, queries of joint tokens, the
            same on all ranks, or ``None``. Plain tensors or, also for joint_key and joint_value,
            DTensors with the placements ``[Replicate()]``. Their gradient on a rank is its share,
            as with sinks: the sum over the ranks is the gradient of the sum of their losses.
        joint_key: ``[batch or 1, num_kv_heads, any length, head_dim]``, or ``None``. There may be
            joint keys without joint queries.
        joint_value: ``[batch or 1, num_kv_heads, length of joint_key, value_dim]``, or ``None``.
        joint_position: ``"front"`` if joint tokens come before the tokens of rank 0, ``"rear"`` if
            they come after those of the last rank. Masks count positions in this order.
        backend: Name of the kernels, as in :func:`cqs.attention`; ``None`` takes the best that
            supports the tensors.
        return_lse: Whether to return the log-sum-exp of the scores too.
        verify: Whether every rank recomputes sampled rows of its queries in float64. Keys and
            values of one KV head at a time are then gathered on all ranks.

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
    call = check_call(
        query,
        key,
        value,
        group=group,
        joint_query=joint_query,
        joint_key=joint_key,
        joint_value=joint_value,
        joint_position=joint_position,
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        scores=scores,
        head_parallel=head_parallel,
        num_chunks=num_chunks,
        plan=plan,
        links=links,
        max_bytes=max_bytes,
        backend=backend,
        return_lse=return_lse,
        verify=verify,
    )
    answer = prepared_calls(call.group, call.values).attend(call.group, call.problem)
    return _to_result(answer, query, call.mesh, call.joint, return_lse)


_operator = define_operator(attention)


@uncompiled
@with_advice
def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    scores: Scores | None = None,
    head_parallel: int | str = "auto",
    num_chunks: int | None = None,
    plan: Kind | str | None = None,
    links: Iterable[float] | None = None,
    max_bytes: int | None = None,
    joint_query: Tensor | None = None,
    joint_key: Tensor | None = None,
    joint_value: Tensor | None = None,
    joint_position: str = "front",
    backend: str | None = None,
    return_lse: bool = False,
    verify: bool = False,
) -> "PreparedAttention":
    """Prepare calls of :func:`attention` that have the same options and shapes.

    Every rank of the group calls this. It checks the arguments, compares them between the ranks,
    chooses the plan and lays out what each rank computes, sends and receives. It computes nothing.

    Args:
        query: A tensor with the shape, dtype and device of later queries, which requires gradients
            if those do; its values are not read.
        key: A tensor like later keys.
        value: A tensor like later values.
        group: See :func:`attention`, also for the other arguments.
        is_causal: Whether attention is causal.
        pattern: Sparse pattern, or ``None``.
        scale: Factor on the scores, or ``None``.
        dropout_p: Probability that a pair is dropped. The seed is an argument of the call.
        scores: Options of the scores of later calls, or ``None``; values of sinks are not read.
        head_parallel: Head-parallel degree, or ``"auto"``.
        num_chunks: Maximum number of head chunks, or ``None``.
        plan: Kind of the plan, or ``None``.
        links: Bandwidth and latency of the links, or ``None``.
        max_bytes: Most bytes that a rank holds for exchanges, or ``None``.
        joint_query: Tensors like later joint queries, or ``None``; their length may differ later.
        joint_key: Tensors like later joint keys, or ``None``.
        joint_value: Tensors like later joint values, or ``None``.
        joint_position: Position of the joint tokens of all later calls.
        backend: Name of the kernels, or ``None``.
        return_lse: Whether calls return the log-sum-exp too.
        verify: Whether calls recompute sampled rows in float64.

    Returns:
        A function of query, key and value that computes what :func:`attention` computes with these
        options.

    Raises:
        RuntimeError: See :func:`attention`, also for the other errors.
        TypeError: An argument has the wrong type.
        ValueError: Arguments do not fit, or ranks differ; the message names the rank.
        NotImplementedError: The backend does not support the tensors or the pattern.
    """
    call = check_call(
        query,
        key,
        value,
        group=group,
        joint_query=joint_query,
        joint_key=joint_key,
        joint_value=joint_value,
        joint_position=joint_position,
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=None,
        scores=scores,
        head_parallel=head_parallel,
        num_chunks=num_chunks,
        plan=plan,
        links=links,
        max_bytes=max_bytes,
        backend=backend,
        return_lse=return_lse,
        verify=verify,
    )
    prepared_calls(call.group, call.values).prepare(call.group, call.problem)
    return PreparedAttention(call.group, call.values)


class PreparedAttention:
    """A function that computes attention over shards, with options that were checked before.

    Returned by :func:`prepare`. Shard lengths may differ from call to call; new lengths are laid
    out in the first call that has them.
    """

    def __init__(self, group: "dist.ProcessGroup | None", values: dict[str, Any]) -> None:
        """Take a group and the values on which its ranks have agreed; use :func:`prepare`."""
        self._group, self._values = group, values

    @uncompiled
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        seed: int | None = None,
        scores: Scores | None = None,
        joint_query: Tensor | None = None,
        joint_key: Tensor | None = None,
        joint_value: Tensor | None = None,
    ) -> Tensor | AttentionOutput:
        """Compute attention; every rank of the group calls this.

        Args:
            query: ``[batch, num_heads, rows, head_dim]``. Only ``rows`` may differ from the query
                that was prepared.
            key: ``[batch, num_kv_heads, rows_kv, head_dim]``.
            value: ``[batch, num_kv_heads, rows_kv, value_dim]``.
            seed: Random seed of dropout; ``None`` draws one on rank 0 for all.
            scores: Options of the scores, as prepared; only the values of sinks may differ.
            joint_query: ``[batch or 1, num_heads, any rows, head_dim]``, or ``None``.
            joint_key: ``[batch or 1, num_kv_heads, any rows_kv, head_dim]``, or ``None``.
            joint_value: ``[batch or 1, num_kv_heads, any rows_kv, value_dim]``, or ``None``.

        Returns:
            What :func:`attention` returns.

        Raises:
            ValueError: A tensor differs from those that were prepared, or ranks differ; other
                errors are those of :func:`attention`.
        """
        values, group = self._values, joined_group(self._group)
        with errors_shared(group):
            shards, mesh = to_local(*autocast(query, key, value))
            scale, dropout_p = values["scale"], values["dropout_p"]
            position = values["joint tokens"].position
            joint = JointTokens(joint_query, joint_key, joint_value, position, group)
            is_causal, pattern, verify = (values[k] for k in ("is_causal", "pattern", "verify"))
            shards, scores = joint.join(shards, scores, is_causal, pattern, dropout_p, verify)
            options = {"dropout_p": dropout_p, "seed": seed, "scores": scores}
            problem = check_problem(*shards, scale=scale, is_shard=True, **options)
            found = values_of(shards[0], problem)
            for name in FIXED:
                if found[name] != values[name]:
                    raise ValueError(
                        f"{name} must be as prepared, {values[name]}, got {found[name]}"
                    )
            seed = None if seed is None else as_integer("seed", seed, 0)
            values = values | found | {"seed": seed, "joint tokens": joint.rows}
            check_capture(values)
        answer = prepared_calls(group, values).attend(group, problem)
        return _to_result(answer, query, mesh, joint, values["return_lse"])


def _to_result(
    answer: Partial,
    query: Tensor,
    mesh: "DeviceMesh | None",
    joint: JointTokens,
    return_lse: bool,
) -> Tensor | AttentionOutput:
    """Return what a call returns, as DTensors with the rows of ``query`` if there is a mesh."""
    if joint.are_given:
        output, lse = joint.gather(answer.output), answer.lse
        return Partial(output, joint.gather(lse) if return_lse else lse).to_result(return_lse)
    output, lse = (as_dtensor(each, query, mesh) for each in answer)
    return Partial(output, lse).to_result(return_lse)
