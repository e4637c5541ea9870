"""The checked arguments of calls of :func:`cqs.distributed.attention`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cqs.arguments import as_bool, as_integer
from cqs.executors.distributed.agreement import errors_shared
from cqs.executors.distributed.dtensors import group_of, to_local
from cqs.executors.distributed.joint import JointTokens
from cqs.executors.distributed.operator import DrawnSeed
from cqs.executors.distributed.probe import Links
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem
from cqs.problem.masks import check_is_pattern
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import Scores
from cqs.problem.tensors import autocast
from cqs.scheduler.head_groups import why_not_head_parallel
from cqs.scheduler.kinds import Kind, check_kind
from cqs.worker.backends import check_backend_name
from cqs.worker.cuda_graphs import is_captured

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class CheckedCall(NamedTuple):
    """A call whose arguments are valid on this rank."""

    group: Any
    """The process group."""
    problem: Problem
    """This rank's shards, with the joint tokens."""
    values: dict[str, Any]
    """The arguments that must be equal on all ranks, by name."""
    joint: JointTokens
    """The joint tokens."""
    mesh: "DeviceMesh | None"
    """The mesh of the arguments, if they are DTensors."""


FIXED = (
    *("batch", "num_heads", "num_kv_heads", "head_dim", "value_dim"),
    *("dtype", "device", "has_sinks", "softcap", "score_terms", "bias"),
)
"""Values of a call's tensors that all calls after one :func:`cqs.distributed.prepare` have."""


def values_of(query: Tensor, problem: Problem) -> dict[str, Any]:
    """Return the values of a call's tensors that must be equal on all ranks.

    Args:
        query: The query that was passed, before a head_dim of 0 is padded with zeros.
        problem: The checked problem.
    """
    shape, key, value = problem.query.shape, problem.key, problem.value
    terms = problem.terms or ScoreTerms()
    return {
        "batch": shape[0],
        "num_heads": shape[1],
        "num_kv_heads": key.shape[1],
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "dtype": query.dtype,
        "device": query.device.type,
        "has_sinks": problem.sinks is not None,
        "softcap": terms.softcap,
        "score_terms": tuple(sorted(terms.names)),
        "bias": None if terms.bias is None else (*terms.bias.shape[:2], terms.bias.shape[3]),
        "requires_grad": problem.requires_grad,
        "is_captured": is_captured(query.device),
    }


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None",
    joint_query: Tensor | None,
    joint_key: Tensor | None,
    joint_value: Tensor | None,
    joint_position: str,
    is_causal: bool,
    pattern: Pattern | None,
    scale: float | None,
    dropout_p: float,
    seed: int | None,
    scores: Scores | None,
    head_parallel: int | str,
    num_chunks: int | None,
    plan: Kind | str | None,
    links: Iterable[float] | None,
    max_bytes: int | None,
    backend: str | None,
    return_lse: bool,
    verify: bool,
) -> CheckedCall:
    """Validate the arguments of :func:`cqs.distributed.attention`; send an error to all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized, or a rank has failed.
        TypeError: An argument has the wrong type.
        ValueError: An argument does not fit.
        NotImplementedError: The tensors are not supported.
    """
    joined = joined_group(group_of(group, query))
    with errors_shared(joined):
        shards, mesh = to_local(*autocast(query, key, value))
        joint = JointTokens(joint_query, joint_key, joint_value, joint_position, joined)
        shards, scores = joint.join(shards, scores, is_causal, pattern, dropout_p, verify)
        problem = check_problem(
            *shards, scale=scale, is_shard=True, dropout_p=dropout_p, seed=seed, scores=scores
        )
        check_backend_name(backend)
        if f"{problem.query.device.type}:" not in (config := dist.get_backend_config(joined)):
            raise ValueError(
                f"query must be on a device of the group ({config}), got {problem.query.device}"
            )
        if pattern is not None:
            check_is_pattern(pattern)
        default_plan = None if links is None else "any"
        values: dict[str, Any] = {
            "call": "attention",
            **values_of(shards[0], problem),
            "is_causal": as_bool("is_causal", is_causal),
            "pattern": pattern,
            "scale": problem.scale + 0.0,  # -0.0 equals 0.0, but not its text
            "dropout_p": float(dropout_p),
            "seed": None
            if seed is None or isinstance(seed, DrawnSeed)
            else as_integer("seed", seed, 0),
            "num_chunks": None if num_chunks is None else as_integer("num_chunks", num_chunks, 1),
            "head_parallel": _check_head_parallel(head_parallel, joined.size(), problem, pattern),
            "links": None if links is None else Links.check(links),
            "max_bytes": None if max_bytes is None else as_integer("max_bytes", max_bytes, 1),
            "plan": default_plan if plan is None else check_kind(plan, "plan"),
            "joint tokens": joint.rows,
            "backend": backend,
            "return_lse": as_bool("return_lse", return_lse),
            "verify": as_bool("verify", verify),
        }
        check_capture(values)
    return CheckedCall(joined, problem, values, joint, mesh)


def check_capture(values: dict[str, Any]) -> None:
    """Raise ValueError if a call would be verified while a CUDA graph is captured."""
    if values["verify"] and values["is_captured"]:
        raise ValueError(
            "verify must be False while a CUDA graph is captured, got True: verify a call "
            "before the capture"
        )


def joined_group(group: Any) -> Any:
    """Return a group that this process has joined, or raise TypeError or ValueError.

    Args:
        group: The process group; ``None`` means the default group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call init_process_group first")
    if group is None:
        return dist.group.WORLD
    rule = f"group must be one that rank {dist.get_rank()}, this process, has joined"
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        advice = "call this on the ranks of the group only"
        raise TypeError(f"{rule}, got GroupMember.NON_GROUP_MEMBER: {advice}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {group!r}")
    try:
        dist.get_rank(group)
    except ValueError as unknown:
        raise ValueError(f"{rule} and not destroyed, got {group!r}: {unknown}") from unknown
    return group


def _check_head_parallel(
    head_parallel: int | str, num_ranks: int, problem: Problem, pattern: Pattern | None
) -> int | str:
    """Return the head-parallel degree or ``"auto"``, or raise TypeError or ValueError."""
    differ = pattern is not None and pattern.heads[1] > 1
    if head_parallel == "auto":
        return 1 if differ else "auto"
    if isinstance(head_parallel, str):
        raise ValueError(f"head_parallel must be an integer or 'auto', got {head_parallel!r}")
    number = as_integer("head_parallel", head_parallel, 1)
    reason = why_not_head_parallel(number, num_ranks, problem.query.shape[1], problem.key.shape[1])
    if differ and number > 1:
        reason = "heads with different patterns are computed one by one"
    if reason is not None:
        raise ValueError(f"head_parallel must be a supported degree, got {number}: {reason}")
    return number
