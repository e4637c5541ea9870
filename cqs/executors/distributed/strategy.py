"""The options that choose how the ranks of a group divide a call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cqs.arguments import as_integer
from cqs.executors.distributed.transport.connections import Links
from cqs.problem import Problem
from cqs.scheduler.head_groups import why_not_head_parallel
from cqs.scheduler.kinds import Kind, check_kind


@dataclass(frozen=True)
class Strategy:
    """How the ranks of a group divide a call; the defaults choose by predicted time and memory."""

    head_parallel: int | str = "auto"
    """Head-parallel (Ulysses) degree. The heads are divided into so many groups, each computed by
    ``ranks / head_parallel`` ranks with ``plan``. A degree of 1 uses the plan alone; the number of
    ranks is Ulysses (Jacobs et al., arXiv 2309.14509). ``"auto"`` picks, among the degrees and
    plans predicted within 2 % of the fastest, those with the lowest peak memory; without gradients
    and up to 512K keys, the smallest degree. The ranks of a host should be consecutive."""
    num_chunks: int | None = None
    """Maximum number of head chunks of a rank: one chunk is sent while another is computed.
    ``None`` chooses it by the work and the links. The number used divides the KV heads of a rank.
    """
    plan: Kind | str | None = None
    """Kind of the plan of ``ranks / head_parallel`` tasks: ``"quorums"``, ``"rows"`` (the traffic
    of ring attention and all-gather), ``"grid"``, ``"documents"``, or a kind of
    :func:`cqs.make_plan`. ``None`` means quorums on one host, and on several hosts or with
    ``links`` the kind that is predicted to be the fastest, also within ``"grid"``. With a pattern
    of :func:`cqs.patterns.documents` it means ``"documents"`` on one host, and otherwise includes
    it."""
    links: Iterable[float] | None = None
    """``(bandwidth, latency)`` of the links between hosts or, on one host, within it, for the
    choice of ``plan`` and ``head_parallel``: bytes per second of a rank and direction, and seconds.
    ``None`` means, on one host, those of rank 0's device in
    :data:`cqs.scheduler.machines.MACHINES`; on several, what rank 0 measures in the first call on
    the group. Another run may measure other links and choose another plan, which rounds
    differently: pass them for results that are bitwise reproducible."""
    max_bytes: int | None = None
    """Most bytes that a rank holds at once for its exchanges with others, at least 1: received
    queries, keys and values, with its own rows among them; packed rows until they are sent; partial
    outputs and gradients that it computes for other ranks or receives from them; the float32 sums
    of its own; and what it keeps for the backward pass beside its own shard. Not counted are the
    shard, its results and gradients, blocks of a bias, joint outputs, and the scratch of a kernel
    or a merge while it runs. The cost model chooses the fastest order of receiving tokens that
    fits; the backward pass receives them again. ``None`` means no limit on CPUs, and on GPUs 90 %
    of the memory that is free on every rank in the first call with these shards."""

    def __post_init__(self) -> None:
        """Read links that are an iterator once."""
        if isinstance(self.links, Iterable):
            object.__setattr__(self, "links", tuple(self.links))


def check_strategy(
    strategy: Strategy, num_ranks: int, problem: Problem, differs_by_head: bool
) -> dict[str, Any]:
    """Return the checked options of a strategy by name, or raise TypeError or ValueError.

    Args:
        strategy: How the ranks divide a call.
        num_ranks: Number of ranks of the group.
        problem: The checked shards of this rank.
        differs_by_head: Whether the heads have different patterns.
    """
    links, plan = strategy.links, strategy.plan
    degree = _check_degree(strategy.head_parallel, num_ranks, problem, differs_by_head)
    default_plan = None if links is None else "any"
    return {
        "num_chunks": _positive_or_none("num_chunks", strategy.num_chunks),
        "max_bytes": _positive_or_none("max_bytes", strategy.max_bytes),
        "head_parallel": degree,
        "links": None if links is None else Links.check(links),
        "plan": default_plan if plan is None else check_kind(plan, "plan"),
    }


def _check_degree(
    head_parallel: int | str, num_ranks: int, problem: Problem, differs_by_head: bool
) -> int | str:
    """Return the head-parallel degree or ``"auto"``."""
    if head_parallel == "auto":
        return 1 if differs_by_head else "auto"
    if isinstance(head_parallel, str):
        raise ValueError(f"head_parallel must be an integer or 'auto', got {head_parallel!r}")
    degree = as_integer("head_parallel", head_parallel, 1)
    num_heads, num_kv_heads = problem.query.shape[1], problem.key.shape[1]
    reason = why_not_head_parallel(degree, num_ranks, num_heads, num_kv_heads)
    if differs_by_head and degree > 1:
        reason = "heads with different patterns are computed one by one"
    if reason is not None:
        raise ValueError(f"head_parallel must be a supported degree, got {degree}: {reason}")
    return degree


def _positive_or_none(name: str, number: int | None) -> int | None:
    return None if number is None else as_integer(name, number, 1)
