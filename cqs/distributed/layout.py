"""Who computes what in a group of ranks, and which rows of whose shard that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from cqs.distributed.locality import SplitSteps, keys_of, see_only, split_steps
from cqs.patterns import BoundPattern
from cqs.scheduler import AttentionShape, Plan, Step, make_plan
from cqs.scheduler.heads import ChunkRule, choose_num_chunks
from cqs.scheduler.task import join_ranges
from cqs.simulation import Case, Machine, forecast

Lengths = tuple[int, ...]

_SLACK = 0.02
"""By how much longer than the fastest a split may take that is chosen: the model is no better."""
_MACHINE = Machine(bandwidth=160e9, latency=160e-6, between=50e9)
"""For which forecasts are nearest to what four H200s of one host were measured to take. Between
hosts, which were not measured, 400 Gb/s of InfiniBand for each GPU."""


class PackOffsets(NamedTuple):
    """Where ranks that pack rows for all others, one after another, put them."""

    firsts: tuple[int, ...]
    """For every rank, the first of the rows that it packs for this one."""
    most: int
    """The rows that a rank packs, at most."""


@dataclass(frozen=True)
class Route:
    """Where the rows of one side of the problem go, as one rank sees it, and come back from."""

    sends: tuple[tuple[range, ...], ...]
    """For every rank, the rows of this rank's shard that it needs: ascending ranges."""
    receives: tuple[int, ...]
    """Number of rows that come from every rank. Together, in the order of ranks, they are..."""
    held: tuple[range, ...]
    """... these tokens, ascending."""
    rank: int = field(repr=False)
    """Whose route it is."""
    shards: Sequence[range] = field(compare=False, repr=False)
    """The tokens that every rank has."""
    wanted: Sequence[tuple[range, ...]] = field(compare=False, repr=False)
    """Those that every rank needs."""

    @cached_property
    def places_out(self) -> PackOffsets:
        """Where rows are that go to who needs them."""
        return _places(self._numbers, self.rank)

    @cached_property
    def places_home(self) -> PackOffsets:
        """Where results for them are that go back."""
        return _places(list(zip(*self._numbers, strict=True)), self.rank)

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """For every rank, how many of its rows every other needs."""
        return [
            [
                0 if owner == other else sum(map(len, _common(shard, ranges)))
                for other, ranges in enumerate(self.wanted)
            ]
            for owner, shard in enumerate(self.shards)
        ]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows that go to every rank."""
        return tuple(sum(map(len, ranges)) for ranges in self.sends)

    @cached_property
    def stays(self) -> bool:
        """Whether nothing goes to or comes from other ranks."""
        return not any(
            sent or received
            for other, (sent, received) in enumerate(zip(self.lengths, self.receives, strict=True))
            if other != self.rank
        )


@dataclass(frozen=True)
class HeadChunk:
    """Heads that every rank computes at one time, while those of other head chunks travel."""

    query_heads: tuple[range, ...]
    """For every rank, some of the heads of its slice; equally many for each."""
    kv_heads: tuple[range, ...]
    """For every rank, the key heads that those need; fewer than slices are needed by several."""

    @property
    def heads(self) -> tuple[tuple[range, ...], ...]:
        """Of query, key and value."""
        return self.query_heads, self.kv_heads, self.kv_heads


@dataclass(frozen=True)
class Layout:
    """What follows from numbers that all ranks know.

    Rank r computes task ``r // head_parallel`` of the plan for the ``r % head_parallel``-th of
    ``head_parallel`` equal slices of the heads.
    """

    plan: Plan
    own_steps: tuple[Step, ...]
    """What this rank computes with its own shard alone; none if :attr:`is_final`."""
    home_steps: tuple[Step, ...]
    """What else it computes for queries of its shard; none if final and gradients follow."""
    away_steps: tuple[Step, ...]
    """What it computes for queries of other ranks; then the whole task, of which results are
    kept."""
    queries: range
    """Tokens of its shard."""
    keys: range
    of_queries: Route
    """By which queries come, and with gradients those of its own too."""
    of_keys: Route
    """Likewise; those of its own too where keys of others are seen beside them. On every rank the
    same object as ``of_queries``, or on none."""
    of_results: Route
    """By which the queries of ``away_steps`` come, and results for them go back."""
    chunks: tuple[HeadChunk, ...]
    """Together, all heads."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The whole task."""
        return self.own_steps + self.home_steps + self.away_steps

    @cached_property
    def num_keys(self) -> int:
        """How many keys they see."""
        return sum(map(len, keys_of(self.steps)))

    @property
    def is_final(self) -> bool:
        """Whether ranks compute with all keys of a query, so that nothing is to be merged."""
        return self.plan.num_tasks == 1


@lru_cache(maxsize=32)
def lay_out(
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    rank: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_parallel: int | str,
    num_chunks: int | None,
    is_causal: bool,
    pattern: Any,
    interest_set: tuple[int, ...] | None,
    tile: int,
    chunk_rule: ChunkRule,
    with_gradients: bool,
    ranks_per_host: float = inf,
) -> Layout:
    """Lay out attention over shards of these lengths.

    Args:
        seqlens_q: Queries of every rank's shard.
        seqlens_kv: Its keys.
        rank: Whose part to describe.
        num_heads: Heads of the queries.
        num_kv_heads: Of the keys.
        head_dim: Of the queries.
        head_parallel: See :func:`cqs.scheduler.heads.why_not_head_parallel`; ``"auto"`` is the
            number of :func:`choose_head_parallel`.
        num_stages: At most so many head chunks; ``None`` chooses by the work.
        is_causal: See :func:`cqs.make_plan`, as for the rest.
        pattern: Likewise.
        interest_set: Likewise.
        tile: Likewise.
        stage_rule: See :func:`cqs.scheduler.heads.choose_num_stages`.
        with_gradients: Whether they will be asked for.
        ranks_per_host: As for :func:`choose_head_parallel`.
    """
    num_ranks = len(seqlens_q)
    bound = None if pattern is None else pattern.bind(sum(seqlens_q), sum(seqlens_kv))
    if isinstance(head_parallel, str):
        case = Case(
            sum(seqlens_q),
            AttentionShape(num_heads, head_dim, num_kv_heads=num_kv_heads),
            is_causal,
            num_keys=sum(seqlens_kv),
            num_pairs=None if bound is None else bound.num_pairs,
        )
        head_parallel = choose_head_parallel(
            case, num_ranks, with_gradients=with_gradients, ranks_per_host=ranks_per_host
        )
    plan = make_plan(
        sum(seqlens_q),
        sum(seqlens_kv),
        num_tasks=num_ranks // head_parallel,
        is_causal=is_causal,
        interest_set=interest_set,
        tile=tile,
        pattern=pattern,
    )
    tasks = [plan.task(r // head_parallel) for r in range(num_ranks)]
    shards_q, shards_kv = cut_shards(seqlens_q), cut_shards(seqlens_kv)
    is_final = plan.num_tasks == 1
    splits = [
        split_steps(task.steps, own_queries, range(0) if is_final else own_keys)
        for task, own_queries, own_keys in zip(tasks, shards_q, shards_kv, strict=True)
    ]
    if bound is not None:
        splits = [
            SplitSteps(*(tuple(step for step in part if _sees_any(step, bound)) for part in split))
            for split in splits
        ]
    wanted_queries = [join_ranges(step.queries for step in split.away) for split in splits]
    of_results = make_route(shards_q, wanted_queries, rank)
    of_queries = of_results
    if with_gradients:
        wanted_queries = [join_ranges(step.queries for step in task.steps) for task in tasks]
        wanted_keys = [join_ranges(task.held_keys) for task in tasks]
        of_queries = make_route(shards_q, wanted_queries, rank)
        if is_final:
            splits = [SplitSteps((), (), task.steps) for task in tasks]
            of_results = of_queries
    else:
        wanted_keys = [
            keys_of(step for part in split[1:] if not see_only(own_keys, part) for step in part)
            for split, own_keys in zip(splits, shards_kv, strict=True)
        ]
    of_keys = make_route(shards_kv, wanted_keys, rank)
    if seqlens_q == seqlens_kv and wanted_queries == wanted_keys:
        of_keys = of_queries
    number = choose_num_chunks(
        num_chunks,
        flops=4.0 * plan.live_pairs * num_heads * head_dim / num_ranks,
        num_ranks=num_ranks,
        num_kv_heads=max(num_kv_heads // head_parallel, 1),
        num_keys=sum(seqlens_kv) * len(plan.interest_set) // plan.num_tasks,
        with_gradients=with_gradients,
        rule=chunk_rule,
    )
    chunks = _make_chunks(number, num_ranks, head_parallel, num_heads, num_kv_heads)
    return Layout(
        plan,
        *splits[rank],
        shards_q[rank],
        shards_kv[rank],
        of_queries,
        of_keys,
        of_results,
        chunks,
    )


def _make_chunks(
    number: int, num_ranks: int, head_parallel: int, num_heads: int, num_kv_heads: int
) -> tuple[HeadChunk, ...]:
    """Cut the slice of every rank into so many equal head chunks."""

    def of_ranks(num_heads: int, i: int) -> tuple[range, ...]:
        slices = (_slice(num_heads, head_parallel, r % head_parallel) for r in range(num_ranks))
        return tuple(_part(heads, number, i) for heads in slices)

    return tuple(
        HeadChunk(of_ranks(num_heads, i), of_ranks(num_kv_heads, i)) for i in range(number)
    )


def _sees_any(step: Step, pattern: BoundPattern) -> bool:
    return any(pattern.count(step.queries, keys) for keys in step.keys)


def cut_shards(lengths: Sequence[int]) -> list[range]:
    """Return the tokens of every shard.

    Example:
        >>> cut_shards([2, 0, 3])
        [range(0, 2), range(2, 2), range(2, 5)]
    """
    return [range(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def make_route(shards: Sequence[range], wanted: Sequence[tuple[range, ...]], rank: int) -> Route:
    """Return where the rows of a rank's shard go, and whose come to it.

    Args:
        shards: The tokens that every rank has.
        wanted: Those that every rank needs, in ascending ranges.
        rank: Whose route.

    Example:
        >>> shards = [range(0, 4), range(4, 8)]
        >>> make_route(shards, [(range(0, 2), range(6, 8)), (range(2, 8),)], 1)
        Route(sends=((range(2, 4),), (range(0, 4),)), receives=(2, 4), held=(range(2, 8),))
    """
    own = shards[rank]
    return Route(
        sends=tuple(
            tuple(range(r.start - own.start, r.stop - own.start) for r in _common(own, ranges))
            for ranges in wanted
        ),
        receives=tuple(sum(map(len, _common(shard, wanted[rank]))) for shard in shards),
        held=wanted[rank],
        rank=rank,
        shards=shards,
        wanted=wanted,
    )


def _places(numbers: Sequence[Sequence[int]], rank: int) -> PackOffsets:
    """Return the places for a rank; ``numbers`` are of rows, from every rank to every rank."""
    return PackOffsets(tuple(sum(to_ranks[:rank]) for to_ranks in numbers), max(map(sum, numbers)))


def choose_head_parallel(
    case: Case, num_ranks: int, *, with_gradients: bool, ranks_per_host: float = inf
) -> int:
    """Return the number of slices of the heads to take.

    Only numbers count that are predicted to take at most 2 % longer than the fastest, in as many
    head chunks as the work pays, on H200s. Of these it is the one for which a rank holds the
    fewest bytes, and without gradients, up to 512K keys, the least: see ``slack`` of
    :func:`cqs.simulation.forecast`. All ranks know what the choice depends on.

    Args:
        case: What is computed.
        num_ranks: By how many.
        with_gradients: Whether the time is that of both passes.
        ranks_per_host: So many ranks in a row are on one host.

    Example:
        >>> case = Case(2**16, AttentionShape(16, 128), is_causal=True)
        >>> [choose_head_parallel(case, 4, with_gradients=both) for both in (False, True)]
        [1, 4]
        >>> case = Case(2**17, AttentionShape(32, 128), is_causal=True)
        >>> [choose_head_parallel(case, 64, with_gradients=True, ranks_per_host=n) for n in (64, 8)]
        [32, 16]
    """
    passes = "both" if with_gradients else "forward"
    machine = replace(_MACHINE, devices_per_node=ranks_per_host)
    found = forecast("cqs", case, num_ranks, machine, passes, slack=_SLACK)
    assert found is not None, "one slice is always possible"
    return found.num_slices


def _slice(num_heads: int, head_parallel: int, i: int) -> range:
    """Return the heads of slice i; where heads are fewer than slices, the one it needs."""
    first = i * num_heads // head_parallel
    return range(first, first + max(num_heads // head_parallel, 1))


def _part(heads: range, number: int, i: int) -> range:
    """Return the i-th of so many equal parts."""
    length = len(heads) // number
    return heads[i * length : (i + 1) * length]


def _common(tokens: range, ranges: Sequence[range]) -> list[range]:
    """Return what of the ranges lies in ``tokens``."""
    found = (range(max(tokens.start, r.start), min(tokens.stop, r.stop)) for r in ranges)
    return [each for each in found if each]
