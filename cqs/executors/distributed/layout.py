"""The work of every rank of a group, and the rows of each shard that it requires."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from cqs.executors.distributed.route import Route, cut_shards
from cqs.executors.distributed.split_steps import (
    SplitSteps,
    keys_of,
    see_only,
    span_of,
    split_documents,
    split_steps,
)
from cqs.patterns import BoundPattern
from cqs.patterns.bound_documents import BoundDocuments
from cqs.scheduler import AttentionShape, Documents, Kind, Plan, Step, make_plan
from cqs.scheduler.cost_model import Prediction, predict
from cqs.scheduler.document_cost import join_shards, predict_documents
from cqs.scheduler.kinds import fit_kind, is_final
from cqs.scheduler.machines import MACHINES, ChunkRule, Machine
from cqs.scheduler.rounds import Round
from cqs.scheduler.task import join_ranges
from cqs.scheduler.workload import Workload

Lengths = tuple[int, ...]
"""Number of tokens in every rank's shard."""

Wanted = list[tuple[range, ...]]
"""For every rank, ascending token ranges."""

Separate = Sequence[tuple[int, int]]
"""For every rank two numbers of queries, see :attr:`Layout.separate`."""
_SLACK = 0.02
"""Relative predicted time by which the chosen plan may exceed the fastest. The cost model is not
more accurate than this."""


@dataclass(frozen=True)
class HeadChunk:
    """Heads that every rank computes while the tensors of other head chunks are sent."""

    index: int
    """Index among the chunks of a pass."""
    query_heads: tuple[range, ...]
    """For every rank, a range of query heads of its head group; all have one length."""
    kv_heads: tuple[range, ...]
    """For every rank, the KV heads of these query heads. Ranks share a KV head if there are
    fewer KV heads than head groups."""

    @cached_property
    def heads(self) -> tuple[tuple[range, ...], ...]:
        """Heads of every rank for query, key and value."""
        return self.query_heads, self.kv_heads, self.kv_heads

    def part(self, shape: AttentionShape) -> AttentionShape:
        """Return the shape of these heads of a rank, given that of all heads."""
        num_heads, kv_heads, _ = (len(heads[0]) for heads in self.heads)
        return replace(shape, num_heads=num_heads, num_kv_heads=kv_heads)


@dataclass(frozen=True)
class Layout:
    """The work and the routing tables of one rank, computed without communication.

    Rank r computes task ``r // head_parallel`` of the plan for head group ``r % head_parallel``,
    one of ``head_parallel`` equal groups of heads.
    """

    plan: Plan
    own_steps: tuple[Step, ...]
    """Steps that read this rank's shard alone; empty if :attr:`is_final`."""
    home_steps: tuple[Step, ...]
    """Other steps for queries of this rank's shard; empty if final and gradients are required."""
    away_steps: tuple[Step, ...]
    """Steps for queries of other ranks; the whole task if final and gradients are required, because
    the backward pass reads its results."""
    queries: range
    """Positions of the queries of this rank's shard."""
    keys: range
    """Positions of the keys of this rank's shard."""
    query_route: Route
    """Route of the queries; includes this rank's own queries if gradients are required."""
    key_route: Route
    """Route of keys and values; includes this rank's own if steps also read keys of other ranks. It
    is the same object as ``query_route`` either on every rank or on none."""
    result_route: Route
    """Route of the queries of ``away_steps``; their results are sent along it in reverse."""
    chunks: tuple[HeadChunk, ...]
    """Head chunks, which together cover all heads."""
    separate: Separate
    """For every rank, the numbers of queries of which it merges results of ``own_steps``, and of
    ``home_steps``."""
    rounds: tuple[Round[Route], ...]
    """The rounds of every head chunk: one, unless memory is limited."""
    is_bounded: bool = False
    """Whether memory is limited. Then all steps are in ``away_steps`` and belong to a round."""

    @cached_property
    def rank(self) -> int:
        """The rank whose work this is."""
        return self.query_route.rank

    @property
    def routes(self) -> tuple[Route, Route, Route]:
        """Routes of query, key and value."""
        return self.query_route, self.key_route, self.key_route

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps of this rank, which are its whole task."""
        return self.own_steps + self.home_steps + self.away_steps

    @cached_property
    def home_queries(self) -> range:
        """Queries of the shard from the first home step to the last."""
        return span_of(self.home_steps)

    @cached_property
    def home_sees_own(self) -> bool:
        """Whether the home steps read keys of this rank's shard alone."""
        return see_only(self.keys, self.home_steps)

    @cached_property
    def away_sees_own(self) -> bool:
        """Whether the away steps read keys of this rank's shard alone."""
        return see_only(self.keys, self.away_steps)

    @cached_property
    def num_keys(self) -> int:
        """Number of distinct keys that the steps read."""
        return sum(map(len, keys_of(self.steps)))

    def moved_bytes(self, shape: AttentionShape) -> int:
        """Return the bytes that all ranks send to others in a forward pass, without LSEs.

        Args:
            shape: Heads, head dimensions, batch and element size of the shards.
        """
        part = self.chunks[0].part(shape)
        output = part.batch * part.num_heads * part.value_columns * part.itemsize
        sent = output * self.result_route.num_moved + part.query_bytes(self.query_route.num_moved)
        return len(self.chunks) * (sent + part.key_bytes(self.key_route.num_moved))

    @cached_property
    def is_final(self) -> bool:
        """Whether results cover all keys of their queries and need no merge."""
        return is_final(self.plan.kind) and not self.is_bounded


@lru_cache(maxsize=32)
def lay_out(
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    rank: int,
    shape: AttentionShape,
    *,
    head_parallel: int | str,
    num_chunks: int | None,
    is_causal: bool,
    pattern: Any,
    plan: Kind | str | None,
    tile: int,
    chunk_rule: ChunkRule,
    with_gradients: bool,
    machine: Machine = MACHINES["H200"],
) -> Layout:
    """Lay out attention over the shards of a group for one rank.

    Args:
        seqlens_q: Number of queries in every rank's shard.
        seqlens_kv: Number of keys in every rank's shard.
        rank: The rank to lay out.
        shape: Numbers of heads, head dimensions and element size.
        head_parallel: Head-parallel degree, see
            :func:`cqs.scheduler.head_groups.why_not_head_parallel`; ``"auto"`` chooses it.
        num_chunks: Maximum number of head chunks; ``None`` chooses it by work and links.
        is_causal: Whether attention is causal over the whole sequence.
        pattern: Sparse pattern, the same for all heads, or ``None``; see :func:`cqs.make_plan`.
        plan: Kinds of the plan of ``ranks / head_parallel`` tasks to choose from, see
            :func:`cqs.scheduler.cost_model.predict`; the choice depends on the arguments alone, so
            it is the same on all ranks.
        tile: Number of tokens at whose multiples tasks are cut; see :func:`cqs.make_plan`.
        chunk_rule: Thresholds of :meth:`cqs.scheduler.workload.Workload.num_chunks`.
        with_gradients: Whether a backward pass will follow.
        machine: Throughput and links of the ranks' devices.

    Raises:
        ValueError: ``plan`` does not fit the number of ranks.
    """
    num_ranks, lengths = len(seqlens_q), (sum(seqlens_q), sum(seqlens_kv))
    workload, bound = make_workload(seqlens_q, seqlens_kv, shape, is_causal, pattern)
    passes = "both" if with_gradients else "forward"
    chosen = _choose_plan(
        workload, bound, seqlens_q, seqlens_kv, machine, passes, plan, head_parallel, tile
    )
    kind, head_parallel = chosen.kind, chosen.head_parallel
    assert kind is not None
    if isinstance(kind, Documents) and not kind.shards:
        shards, key_shards = (join_shards(lens, head_parallel) for lens in (seqlens_q, seqlens_kv))
        kind = Documents(shards, key_shards, kind.tolerance)
    num_tasks = num_ranks // head_parallel
    task_plan = make_plan(
        *lengths, num_tasks=num_tasks, is_causal=is_causal, kind=kind, tile=tile, pattern=pattern
    )
    shards_q, shards_kv = cut_shards(seqlens_q), cut_shards(seqlens_kv)
    splits, wanted_results, wanted_queries, wanted_keys = _find_needs(
        task_plan, shards_q, shards_kv, head_parallel, with_gradients
    )
    query_route = result_route = Route(shards_q, wanted_results, rank)
    if wanted_queries != wanted_results:
        query_route = Route(shards_q, wanted_queries, rank)
    key_route = Route(shards_kv, wanted_keys, rank)
    if seqlens_q == seqlens_kv and wanted_queries == wanted_keys:
        key_route = query_route
    number = replace(workload, num_pairs=task_plan.live_pairs).num_chunks(
        num_ranks,
        head_parallel,
        num_chunks,
        is_backward=with_gradients,
        kind=kind,
        rule=chunk_rule,
        machine=machine,
    )
    chunks = make_chunks(number, num_ranks, head_parallel, shape)
    own = shards_q[rank], shards_kv[rank]
    whole = Round((query_route, key_route), steps=sum(splits[rank], ()))
    separate = [
        (0, 0) if is_final(kind) else (len(queries) * bool(split.own), len(span_of(split.home)))
        for split, queries in zip(splits, shards_q, strict=True)
    ]
    routes = query_route, key_route, result_route
    return Layout(task_plan, *splits[rank], *own, *routes, chunks, separate, (whole,))


def make_workload(
    seqlens_q: Lengths, seqlens_kv: Lengths, shape: AttentionShape, is_causal: bool, pattern: Any
) -> tuple[Workload, BoundPattern | None]:
    """Return the workload of :func:`lay_out`, and the pattern of the whole sequence."""
    lengths = sum(seqlens_q), sum(seqlens_kv)
    bound = None if pattern is None else pattern.bind(*lengths)
    num_pairs = None if bound is None else bound.num_pairs
    return Workload(lengths[0], shape, is_causal, lengths[1], num_pairs), bound


def _find_needs(
    plan: Plan,
    shards_q: Sequence[range],
    shards_kv: Sequence[range],
    head_parallel: int,
    with_gradients: bool,
) -> tuple[list[SplitSteps], Wanted, Wanted, Wanted]:
    """Return the steps of every rank, and the tokens that it requires for its task.

    Args:
        plan: The plan of ``ranks / head_parallel`` tasks.
        shards_q: For every rank, the positions of its queries.
        shards_kv: For every rank, the positions of its keys.
        head_parallel: Number of ranks of a task.
        with_gradients: Whether a backward pass will follow.

    Returns:
        The steps of all ranks; the queries of which every rank returns results, those that it
        receives, and the keys that it receives.
    """
    needs_merge, num_ranks = not is_final(plan.kind), len(shards_q)
    if isinstance(plan.kind, Documents):
        own_queries = [range(0)] * num_ranks if with_gradients else shards_q
        splits = split_documents(plan.placement, own_queries, head_parallel)
        task_queries = [[step.queries for step in split.away] for split in splits]
        task_keys = [keys_of(split.away) for split in splits]
    else:
        bound = None if plan.pattern is None else plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
        tasks = [plan.task(rank // head_parallel) for rank in range(num_ranks)]
        splits = [
            SplitSteps((), (), task.steps)
            if with_gradients and not needs_merge
            else split_steps(task.steps, queries, keys if needs_merge else range(0), bound)
            for task, queries, keys in zip(tasks, shards_q, shards_kv, strict=True)
        ]
        task_queries = [[step.queries for step in task.steps] for task in tasks]
        task_keys = [task.held_keys for task in tasks]
    wanted_results = [join_ranges(step.queries for step in split.away) for split in splits]
    if with_gradients:
        wanted_queries = list(map(join_ranges, task_queries))
        return splits, wanted_results, wanted_queries, list(map(join_ranges, task_keys))
    wanted_keys = [
        keys_of(step for part in split[1:] if not see_only(keys, part) for step in part)
        for split, keys in zip(splits, shards_kv, strict=True)
    ]
    return splits, wanted_results, wanted_results, wanted_keys


def _choose_plan(
    workload: Workload,
    bound: BoundPattern | None,
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    machine: Machine,
    passes: str,
    plan: Kind | str | None,
    head_parallel: int | str,
    tile: int,
) -> Prediction:
    """Choose the kind of the plan and the head-parallel degree; see :func:`lay_out`."""
    num_ranks, documents = len(seqlens_q), None
    if isinstance(bound, BoundDocuments) and plan in (None, "any", "documents"):
        documents = predict_documents(
            workload,
            bound,
            seqlens_q,
            seqlens_kv,
            machine,
            passes,
            head_parallel=head_parallel,
            tile=tile,
        )
        least = workload.one_device_seconds(machine, passes) / num_ranks
        is_one_host = plan is None and machine.devices_per_node >= num_ranks
        if plan == "documents" or is_one_host or documents.seconds <= (1 + _SLACK) * least:
            return documents
    chosen = predict(
        "cqs", workload, num_ranks, machine, passes, _SLACK, plan=plan, head_parallel=head_parallel
    )
    if chosen is None:  # the kind fits no number of tasks: raise its error
        degree = 1 if isinstance(head_parallel, str) else head_parallel
        fit_kind(plan or "quorums", num_ranks // degree)
    assert chosen is not None, "other plans fit a degree of 1"
    return chosen if documents is None or chosen.seconds < documents.seconds else documents


def make_chunks(
    number: int, num_ranks: int, head_parallel: int, shape: AttentionShape
) -> tuple[HeadChunk, ...]:
    """Divide the head group of every rank into ``number`` equal head chunks."""

    def cut_heads(num_heads: int, i: int) -> tuple[range, ...]:
        size = max(num_heads // head_parallel, 1) // number
        # With fewer heads than head groups, several groups share a head.
        firsts = (r % head_parallel * num_heads // head_parallel for r in range(num_ranks))
        return tuple(range(first + i * size, first + (i + 1) * size) for first in firsts)

    return tuple(
        HeadChunk(i, cut_heads(shape.num_heads, i), cut_heads(shape.kv_heads, i))
        for i in range(number)
    )
