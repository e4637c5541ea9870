"""Differentiable context-parallel attention over the shards of a process group."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.arguments import as_bool, with_advice
from cqs.executors.distributed.agreement import errors_shared
from cqs.executors.distributed.operator import (
    DrawnSeed,
    attention_in_graph,
    define_sharded_attention,
)
from cqs.executors.distributed.prepared import attend_shards, prepare_shards
from cqs.executors.distributed.shards import (
    NO_ROWS,
    JointParts,
    JointRows,
    JointTokens,
    as_dtensors,
    group_of,
    to_local,
)
from cqs.executors.distributed.strategy import Strategy, check_strategy
from cqs.executors.known_calls import find_known
from cqs.executors.observe import is_observed
from cqs.executors.one_call import Attend, make_call
from cqs.partial import AttentionOutput
from cqs.problem import Problem, check_num_tasks, check_problem
from cqs.problem.masks import check_is_pattern
from cqs.problem.options import AttentionOptions, ProblemOptions, problem_options
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import Scores
from cqs.problem.tensors import autocast
from cqs.uncompiled import replaced_in_graphs, uncompiled
from cqs.worker.backends import check_backend_name
from cqs.worker.cuda_graphs import is_captured
from cqs.worker.environment import describe_environment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@with_advice
@replaced_in_graphs(attention_in_graph, torch._C._len_torch_dispatch_stack)
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
    return _attend((query, key, value), group, strategy, joint, options)


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
    tensors, options = (query, key, value), {**options, "seed": None}
    call = _CheckedCall(tensors, group, strategy, joint, options)
    prepare_shards(call.group, call.problem, call.values)
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
        choices = self._group, self._strategy, joint, options
        return _attend((query, key, value), *choices, prepared=self._values)


_FIXED = (
    *("batch", "num_heads", "num_kv_heads", "head_dim", "value_dim"),
    *("dtype", "device", "has_sinks", "softcap", "score_terms", "bias"),
)
"""Values of a call's tensors that all calls after one :func:`cqs.distributed.prepare` have."""


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    *arguments: Any,
    prepared: Mapping[str, Any] | None = None,
) -> Tensor | AttentionOutput:
    """Compute a call.

    Args:
        tensors: Query, key and value.
        *arguments: The other arguments of :class:`_CheckedCall`.
        prepared: The values of :func:`cqs.distributed.prepare`, which the call must have.
    """
    call = _CheckedCall(tensors, *arguments)
    if prepared is not None:
        with errors_shared(call.group):
            for name in _FIXED:
                if (got := call.values[name]) != prepared[name]:
                    rule = f"{name} must be as prepared, {prepared[name]}"
                    raise ValueError(f"{rule}, got {got}")
    if call.compute is not None and not is_observed():
        answer = call.compute(call.problem.query, call.problem.key, call.problem.value)
    else:
        answer = attend_shards(call.group, call.problem, call.values)
    return_lse: bool = call.values["return_lse"]
    if call.joint is not None:
        answer = call.joint.gather(answer, with_lse=return_lse)
    elif call.mesh is not None:
        answer = as_dtensors(answer, tensors[0], call.mesh)
    return answer.to_result(return_lse)


class _CheckedCall:
    """A call whose arguments are valid on this rank."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        group: "dist.ProcessGroup | DeviceMesh | None",
        strategy: Strategy | None,
        joint: JointTokens | JointRows | None,
        options: AttentionOptions,
    ) -> None:
        """Validate the arguments of :func:`cqs.distributed.attention`; send an error to all ranks.

        Args:
            tensors: Query, key and value, see :func:`cqs.distributed.attention`.
            group: The process group.
            strategy: How the ranks divide the call.
            joint: The joint tokens; :class:`JointRows` if the shards have them already.
            options: The other options.

        Raises:
            RuntimeError: torch.distributed is not initialized, or a rank has failed.
            TypeError: An argument has the wrong type.
            ValueError: An argument does not fit.
            NotImplementedError: The tensors are not supported.
        """
        self.group = _joined_group(group, tensors[0])
        self.joint: JointParts | None = None
        """The joint tokens that have joined the shards."""
        self.mesh: DeviceMesh | None = None
        """The mesh of the arguments, if they are DTensors."""
        self.compute: Attend | None = None
        """Computes the tensors of the call, if no other rank is required."""
        if (known := _find_known(tensors, self.group, strategy, joint, options)) is not None:
            self.values, self.compute = known
            """The arguments that must be equal on all ranks, by name."""
            self.problem = Problem(*tensors, is_causal=False, scale=self.values["scale"])
            """This rank's shards, with the joint tokens."""
            return
        with errors_shared(self.group):
            shards, self.mesh = to_local(*autocast(*tensors))
            if not isinstance(joint, JointRows | None):
                self.joint = JointParts(joint, self.group)
                shards, options = self.joint.join(shards, options)
                joint = self.joint.rows
            sizes = self.group.size(), dist.get_backend_config(self.group)
            self.problem, self.values = _check(shards, *sizes, joint, strategy, options)


_DEFAULTS: AttentionOptions = {
    "is_causal": False,
    "pattern": None,
    "scale": None,
    "backend": None,
    "return_lse": False,
    "verify": False,
}
"""The options of calls that their signature identifies, with their default values."""
_KNOWN = {*_DEFAULTS, "dropout_p", "seed", "scores"}


def _find_known(
    tensors: tuple[Tensor, Tensor, Tensor],
    group: Any,
    strategy: Strategy | None,
    joint: JointTokens | JointRows | None,
    options: AttentionOptions,
) -> tuple[dict[str, Any], Attend | None] | None:
    """Return values and function of a call whose signature is known; see :class:`_CheckedCall`."""
    is_known = options.keys() <= _KNOWN and isinstance(tensors[0], Tensor)
    dropout_p = options.get("dropout_p", 0.0)
    has_values = options.get("seed") is not None or options.get("scores") is not None
    if has_values or not is_known or type(dropout_p) is not float or dropout_p:
        return None
    if not isinstance(joint, JointRows | None):
        return None
    # The fields too: equal values of different types are different options.
    fields = vars(strategy).values() if isinstance(strategy, Strategy) else ()
    given = map(options.get, _DEFAULTS, _DEFAULTS.values())
    config = dist.get_backend_config(group)
    call = group.size(), config, joint, strategy, is_captured(tensors[0].device)
    return find_known(_make_known, *tensors, *call, *given, *fields)


def _make_known(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_ranks: int,
    config: str,
    joint: JointRows | None,
    strategy: Strategy | None,
    is_captured: bool,
    *choices: Any,
) -> tuple[dict[str, Any], Attend | None] | None:
    """Return the values that ranks compare, and for one rank the function that computes the call.

    It returns ``None`` if tensors must be expanded or padded.
    """
    options: Any = dict(zip(_DEFAULTS, choices, strict=False))
    tensors = query, key, value
    problem, values = _check(tensors, num_ranks, config, joint, strategy, options)
    shapes = problem.query.shape, problem.key.shape, problem.value.shape
    if shapes != (query.shape, key.shape, value.shape):
        return None
    compute = None
    if num_ranks == 1 and strategy in (None, Strategy()) and not (values["verify"] or is_captured):
        is_causal, scale, pattern = values["is_causal"], values["scale"], values["pattern"]
        compute = make_call(*tensors, is_causal, scale, pattern, True, values["backend"])
    return values, compute


def _check(
    shards: Sequence[Tensor],
    num_ranks: int,
    config: str,
    joint: JointRows | None,
    strategy: Strategy | None,
    options: AttentionOptions,
) -> tuple[Problem, dict[str, Any]]:
    """Validate the shards and options of a call.

    Args:
        shards: Query, key and value, with joint tokens.
        num_ranks: Number of ranks of the group.
        config: Backends of the group by device.
        joint: Number and position of the joint tokens, or ``None``.
        strategy: How the ranks divide the call.
        options: The other options.

    Returns:
        The problem, and the arguments that must be equal on all ranks, by name.
    """
    pattern, seed = options.get("pattern"), options.get("seed")
    whole = {"is_causal": False, "pattern": None}  # masks are bound to the whole sequence later
    shard_options: ProblemOptions = {**problem_options(options), **whole}  # type: ignore[typeddict-item]
    problem = check_problem(*shards, is_shard=True, **shard_options)
    check_backend_name(backend := options.get("backend"))
    if f"{problem.query.device.type}:" not in config:
        raise ValueError(
            f"query must be on a device of the group ({config}), got {problem.query.device}"
        )
    if pattern is not None:
        check_is_pattern(pattern)
    strategy = Strategy() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy or None, got {strategy!r}")
    differs_by_head = pattern is not None and pattern.heads[1] > 1
    shape, terms = problem.query.shape, problem.terms or ScoreTerms()
    flags = ("is_causal", "return_lse", "verify")
    values: dict[str, Any] = {
        "call": "attention",
        "batch": shape[0],
        "num_heads": shape[1],
        "num_kv_heads": problem.key.shape[1],
        "head_dim": shards[0].shape[3],  # before a head_dim of 0 is padded with zeros
        "value_dim": problem.value.shape[3],
        "dtype": shards[0].dtype,
        "device": problem.query.device.type,
        "has_sinks": problem.sinks is not None,
        "softcap": terms.softcap,
        "score_terms": tuple(sorted(terms.names)),
        "bias": None if terms.bias is None else (*terms.bias.shape[:2], terms.bias.shape[3]),
        "requires_grad": problem.requires_grad,
        "is_captured": is_captured(problem.query.device),
        **{name: as_bool(name, options.get(name, False)) for name in flags},
        "pattern": pattern,
        "scale": problem.scale + 0.0,  # -0.0 equals 0.0, but not its text
        "dropout_p": float(options.get("dropout_p", 0.0)),
        "seed": None if seed is None or isinstance(seed, DrawnSeed) else int(seed),
        "joint tokens": joint or NO_ROWS,
        "reproducible": problem.is_reproducible,
        "num_tasks": problem.num_tasks,
        "environment": problem.is_reproducible and describe_environment(problem.query.device.type),
        "backend": backend,
        **check_strategy(strategy, num_ranks, problem, differs_by_head),
    }
    check_num_tasks(problem)
    if values["is_captured"] and (values["verify"] or problem.is_reproducible):
        raise ValueError(
            f"{'verify' if values['verify'] else 'reproducible'} must be False while a CUDA graph "
            "is captured, got True: leave it out"
        )
    if problem.is_reproducible and not strategy.plan is strategy.max_bytes is None:
        raise ValueError(
            f"strategy must have neither plan nor max_bytes with reproducible=True, got {strategy}"
        )
    return problem, values


def _joined_group(group: Any, query: Any) -> Any:
    """Return a group that this process has joined, or raise TypeError or ValueError.

    Args:
        group: The process group or mesh; ``None`` means that of a DTensor, or the default group.
        query: The query of the call.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call init_process_group first")
    if hasattr(query, "placements") or not isinstance(group, dist.ProcessGroup | None):
        group = group_of(group, query)
    if group is None:
        return dist.group.WORLD
    rule = f"group must be one that rank {dist.get_rank()}, this process, has joined"
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        advice = "call this on the ranks of the group only"
        raise TypeError(f"{rule}, got GroupMember.NON_GROUP_MEMBER: {advice}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {group!r}")
    try:
        dist.get_rank(group)
    except ValueError as unknown:
        raise ValueError(f"{rule} and not destroyed, got {group!r}: {unknown}") from unknown
    return group


define_sharded_attention(uncompiled(_attend))
