"""The work of every rank of a group, and the rows of each shard that it requires."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from cqs.executors.distributed.route import Route, cut_shards
from cqs.patterns import BoundPattern
from cqs.patterns.bound_documents import BoundDocuments
from cqs.ranges import contains, overlap
from cqs.scheduler import AttentionShape, Documents, Kind, Plan, Step, make_plan
from cqs.scheduler.cost_model import Prediction, predict
from cqs.scheduler.document_cost import join_shards, predict_documents
from cqs.scheduler.kinds import fit_kind, is_final
from cqs.scheduler.machines import FETCHED, MACHINES, ChunkRule, Machine
from cqs.scheduler.placement import Placement
from cqs.scheduler.rounds import Round
from cqs.scheduler.task import join_ranges, keys_of
from cqs.scheduler.workload import Workload

Lengths = tuple[int, ...]
"""Number of tokens in every rank's shard."""

Wanted = list[tuple[range, ...]]
"""For every rank, ascending token ranges."""

Separate = Sequence[tuple[int, int]]
"""For every rank two numbers of queries, see :class:`Layout`."""
_SLACK = 0.02
"""Relative predicted time by which the chosen plan may exceed the fastest. The cost model is not
more accurate than this."""


class SplitSteps(NamedTuple):
    """The steps of a task in three parts; their ``live_pairs`` ignore a pattern."""

    own: tuple[Step, ...]
    """Steps whose queries and keys are both in the rank's shard."""
    home: tuple[Step, ...]
    """Steps with queries of the rank's shard and keys that it does not hold in full."""
    away: tuple[Step, ...]
    """Steps with queries of other ranks."""


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


class Layout:
    """The work and the routing tables of one rank, computed without communication.

    Rank r computes task ``r // head_parallel`` of the plan for head group ``r % head_parallel``,
    one of ``head_parallel`` equal groups of heads.
    """

    def __init__(
        self,
        plan: Plan,
        split: SplitSteps,
        routes: tuple[Route, Route, Route],
        chunks: tuple[HeadChunk, ...],
        separate: Separate,
        rounds: tuple[Round[Route], ...],
        *,
        is_bounded: bool = False,
    ) -> None:
        """Take what all steps and rounds of the rank follow from.

        Args:
            plan: The plan of ``ranks / head_parallel`` tasks.
            split: The steps of this rank. If results are final, there are no own steps, and if
                gradients are required, the whole task is in the away steps, because the backward
                pass reads its results.
            routes: Routes of queries, of keys and values, and of the queries of away steps.
            chunks: Head chunks, which together cover all heads.
            separate: For every rank, the numbers of queries of which it merges results of own
                steps, and of home steps.
            rounds: The rounds of every head chunk: one, unless memory is limited.
            is_bounded: Whether memory is limited. Then all steps are away steps and belong to a
                round.
        """
        self.plan, self.split, self.chunks = plan, split, chunks
        self.separate, self.rounds, self.is_bounded = separate, rounds, is_bounded
        self.query_route, self.key_route, self.result_route = routes
        """The first includes this rank's own queries if gradients are required, and the second its
        own keys if steps also read keys of other ranks. They are the same object either on every
        rank or on none. Results are sent along the last one in reverse."""
        self.routes = self.query_route, self.key_route, self.key_route
        """Routes of query, key and value."""
        self.rank = self.query_route.rank
        self.queries, self.keys = (route.shards[self.rank] for route in routes[:2])
        """Positions of the queries and keys of this rank's shard."""
        self.steps = sum(split, ())
        """All steps of this rank, which are its whole task."""
        self.home_queries = span_of(split.home)
        """Queries of the shard from the first home step to the last."""
        self.home_sees_own, self.away_sees_own = (see_only(self.keys, part) for part in split[1:])
        """Whether the home steps, and the away steps, read keys of this rank's shard alone."""
        self.num_keys = sum(map(len, keys_of(self.steps)))
        """Number of distinct keys that the steps read."""
        self.is_final = is_final(plan.kind) and not is_bounded
        """Whether results cover all keys of their queries and need no merge."""


@dataclass(frozen=True)
class ShardedWork:
    """Attention over the shards of a group, and the choices that determine its layout."""

    seqlens_q: Lengths
    """Number of queries in every rank's shard."""
    seqlens_kv: Lengths
    """Number of keys in every rank's shard."""
    shape: AttentionShape
    """Numbers of heads, head dimensions and element size."""
    is_causal: bool = False
    """Whether attention is causal over the whole sequence."""
    pattern: Any = None
    """Sparse pattern, the same for all heads, or ``None``; see :func:`cqs.make_plan`."""
    plan: Kind | str | None = None
    """Kinds of the plan of ``ranks / head_parallel`` tasks to choose from, see
    :func:`cqs.scheduler.cost_model.predict`; the choice depends on these fields alone, so it is the
    same on all ranks."""
    head_parallel: int | str = "auto"
    """Head-parallel degree, see :func:`cqs.scheduler.head_groups.why_not_head_parallel`; ``"auto"``
    chooses it."""
    num_chunks: int | None = None
    """Maximum number of head chunks; ``None`` chooses it by work and links."""
    tile: int = 1
    """Number of tokens at whose multiples tasks are cut; see :func:`cqs.make_plan`."""
    chunk_rule: ChunkRule = FETCHED
    """Thresholds of :meth:`cqs.scheduler.workload.Workload.num_chunks`."""
    machine: Machine = MACHINES["H200"]
    """Throughput and links of the ranks' devices."""
    with_gradients: bool = False
    """Whether a backward pass will follow."""

    @cached_property
    def bound(self) -> BoundPattern | None:
        """The pattern of the whole sequence."""
        lengths = sum(self.seqlens_q), sum(self.seqlens_kv)
        return None if self.pattern is None else self.pattern.bind(*lengths)

    @cached_property
    def workload(self) -> Workload:
        """The attention problem of the cost model."""
        lengths = sum(self.seqlens_q), sum(self.seqlens_kv)
        num_pairs = None if self.bound is None else self.bound.num_pairs
        return Workload(lengths[0], self.shape, self.is_causal, lengths[1], num_pairs)

    @property
    def passes(self) -> str:
        """The passes that are predicted."""
        return "both" if self.with_gradients else "forward"

    def planned(self, head_parallel: int, kind: Kind) -> "ShardedWork":
        """Return this work with gradients, by a plan of this kind and degree."""
        return replace(self, head_parallel=head_parallel, plan=kind, with_gradients=True)


@lru_cache(maxsize=32)
def lay_out(work: ShardedWork, rank: int) -> Layout:
    """Lay out attention over the shards of a group for one rank.

    Raises:
        ValueError: ``work.plan`` does not fit the number of ranks.
    """
    seqlens_q, seqlens_kv, num_ranks = work.seqlens_q, work.seqlens_kv, len(work.seqlens_q)
    chosen = _choose_plan(work)
    kind, head_parallel = chosen.kind, chosen.head_parallel
    assert kind is not None
    if isinstance(kind, Documents) and not kind.shards:
        shards, key_shards = (join_shards(lens, head_parallel) for lens in (seqlens_q, seqlens_kv))
        kind = Documents(shards, key_shards, kind.tolerance)
    options: Any = {"is_causal": work.is_causal, "tile": work.tile, "pattern": work.pattern}
    num_tasks = num_ranks // head_parallel
    task_plan = make_plan(
        sum(seqlens_q), sum(seqlens_kv), num_tasks=num_tasks, kind=kind, **options
    )
    shards_q, shards_kv = cut_shards(seqlens_q), cut_shards(seqlens_kv)
    splits, wanted_results, wanted_queries, wanted_keys = _find_needs(
        task_plan, shards_q, shards_kv, head_parallel, work.with_gradients
    )
    query_route = result_route = Route(shards_q, wanted_results, rank)
    if wanted_queries != wanted_results:
        query_route = Route(shards_q, wanted_queries, rank)
    key_route = Route(shards_kv, wanted_keys, rank)
    if seqlens_q == seqlens_kv and wanted_queries == wanted_keys:
        key_route = query_route
    number = replace(work.workload, num_pairs=task_plan.live_pairs).num_chunks(
        *(num_ranks, head_parallel, work.num_chunks),
        is_backward=work.with_gradients,
        kind=kind,
        rule=work.chunk_rule,
        machine=work.machine,
    )
    chunks = make_chunks(number, num_ranks, head_parallel, work.shape)
    whole = Round((query_route, key_route), steps=sum(splits[rank], ()))
    separate = [
        (0, 0) if is_final(kind) else (len(queries) * bool(split.own), len(span_of(split.home)))
        for split, queries in zip(splits, shards_q, strict=True)
    ]
    routes = query_route, key_route, result_route
    return Layout(task_plan, splits[rank], routes, chunks, separate, (whole,))


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


def _choose_plan(work: ShardedWork) -> Prediction:
    """Choose the kind of the plan and the head-parallel degree; see :class:`ShardedWork`."""
    num_ranks, workload, machine, documents = len(work.seqlens_q), work.workload, work.machine, None
    plan, head_parallel, passes = work.plan, work.head_parallel, work.passes
    if isinstance(work.bound, BoundDocuments) and plan in (None, "any", "documents"):
        documents = predict_documents(
            *(workload, work.bound, work.seqlens_q, work.seqlens_kv, machine, passes),
            head_parallel=head_parallel,
            tile=work.tile,
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


def split_steps(
    steps: Iterable[Step], queries: range, keys: range, pattern: BoundPattern | None = None
) -> SplitSteps:
    """Split steps by the tokens of a rank's shard, given as positions of its queries and keys.

    A causal square is not split along its keys: it is ``own`` only if the shard has all of them.
    Parts without a live pair of ``pattern`` are dropped.

    Example:
        >>> step = Step(0, range(4, 8), (range(0, 4),), range(4, 8), 26)
        >>> split = split_steps([step], range(6, 9), range(5, 9))
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.own]
        [(range(6, 8), (range(5, 6),), range(6, 8))]
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.home]
        [(range(6, 8), (range(0, 5),), None)]
        >>> [(step.queries, step.keys, step.causal_keys) for step in split.away]
        [(range(4, 6), (range(0, 4),), range(4, 6))]
    """
    own: list[Step] = []
    home: list[Step] = []
    away: list[Step] = []
    for step in steps:
        for rows in _split(step.queries, queries):
            seen, square = _keys_of_rows(step, rows)
            parts = [(away, seen, square)]
            if contains(queries, rows):
                here = [overlap(span, keys) for span in seen]
                there = [e for span in seen for e in _split(span, keys) if not contains(keys, e)]
                is_own = square is not None and contains(keys, square)
                parts = [(own, here, square if is_own else None)]
                parts += [(home, there, None if is_own else square)]
            for chosen, spans, diagonal in parts:
                part = Step.of(step.query_group, rows, spans, diagonal)
                live = pattern is None or any(pattern.count(rows, span) for span in part.keys)
                if part.live_pairs and live:
                    chosen.append(part)
    return SplitSteps(tuple(own), tuple(home), tuple(away))


def split_documents(
    placement: Placement, owned: Sequence[range], head_parallel: int
) -> list[SplitSteps]:
    """Return the steps of every rank for packed documents; their query group is the rank.

    Args:
        placement: The queries of all tasks, of which each has all keys.
        owned: For every rank, the positions of the queries that count as its own.
        head_parallel: Number of ranks of a task.
    """
    parts = [
        (rank, part)
        for rank, own in enumerate(owned)
        for queries in placement.queries.task_ranges(rank // head_parallel)
        for part in (_split(queries, own) if own else [queries])
    ]
    home, away = ([list[Step]() for _ in owned] for _ in range(2))
    for step in placement.steps(parts):
        is_own = contains(owned[step.query_group], step.queries)
        (home if is_own else away)[step.query_group].append(step)
    return [SplitSteps((), *map(tuple, parts)) for parts in zip(home, away, strict=True)]


def span_of(steps: Sequence[Step]) -> range:
    """Return the queries from the first step to the last."""
    return range(steps[0].queries.start, steps[-1].queries.stop) if steps else range(0)


def _keys_of_rows(step: Step, rows: range) -> tuple[list[range], range | None]:
    """Return the keys that every one of the rows sees, and the causal square of the rows."""
    if step.causal_keys is None:
        return list(step.keys), None
    first, last = (
        step.causal_keys.start + end - step.queries.start for end in (rows.start, rows.stop)
    )
    return [*step.keys, range(step.causal_keys.start, first)], range(first, last)


def see_only(keys: range, steps: Iterable[Step]) -> bool:
    """Return whether steps read no keys outside ``keys``."""
    return all(contains(keys, block.keys) for step in steps for block in step.blocks())


def _split(tokens: range, at: range) -> list[range]:
    """Split a range at both ends of ``at``."""
    marks = sorted({tokens.start, tokens.stop, *(e for e in (at.start, at.stop) if e in tokens)})
    return [range(a, b) for a, b in zip(marks, marks[1:], strict=False)]
