"""Choice of the order in which ranks receive tokens, so that they hold few of them at a time.

Tasks are cut into batches and parts, which follow one another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, pairwise, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from cqs.executors.distributed.layout import Layout, ShardedWork, SplitSteps, lay_out, make_chunks
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.token_order import TokenOrder, make_rounds, predict_orders
from cqs.executors.distributed.transport.exchange import BOUNDED_TURNS
from cqs.patterns import BoundPattern
from cqs.patterns.bound_documents import BoundDocuments
from cqs.ranges import overlap
from cqs.scheduler import AttentionShape, Documents, Kind, Step
from cqs.scheduler.held_bytes import DeviceRows, HeldBytes, most_bytes
from cqs.scheduler.rounds import KEYS, QUERIES, Round
from cqs.scheduler.task import join_ranges
from cqs.scheduler.workload import PASSES

_FEW_RANKS = 16
"""Number of ranks up to which the bytes of every order are counted."""
_MOST_DEVIATION, _MOST_TRIED = 1.5, 8
"""For more ranks, the orders whose predicted bytes are at most so many times the limit are counted,
and so many of those with the fewest. The smallest limit is then that of these."""


class Cell(NamedTuple):
    """The pairs that a task computes of one query group and one range of key groups."""

    units: tuple[int, int]
    """Index of the query group, and of the range among those of the plan."""
    step: Step
    """Queries and keys."""


Cells = Sequence[Sequence[Cell]]
"""For every rank, cells of its task."""


class Limit(NamedTuple):
    """The most bytes that a rank may hold for exchanges with others."""

    max_bytes: int | None
    """The limit; ``None`` means none."""
    is_given: bool
    """Whether the caller has set it. Otherwise it is the free memory, which the results of the
    shard share, and the order with the fewest bytes is taken if none fits."""
    shape: AttentionShape
    """Batch, heads, head dimensions and itemsize of the shards."""
    has_buffer: bool
    """Whether packed rows are in a send buffer of a fixed size."""
    num_turns: int
    """Number of head chunks in transit at a time."""
    with_lse: bool
    """Whether LSEs of final results are sent too."""


def lay_out_within(limit: Limit, work: ShardedWork, rank: int) -> Layout:
    """Lay out attention for one rank in the fastest order that fits a limit.

    Args:
        limit: The limit.
        work: The work of all ranks.
        rank: The rank to lay out.

    Raises:
        ValueError: No order fits the limit; the message gives the smallest that one fits.
    """
    chosen = None if limit.max_bytes is None else _choose_order(limit, work)
    if chosen is None:
        return lay_out(work, rank)
    degree, kind, order = chosen
    layout = lay_out(work.planned(degree, kind), rank)
    return order_tokens(layout, cut_tasks(layout), order, work.shape)


@lru_cache(maxsize=64)
def _choose_order(limit: Limit, work: ShardedWork) -> tuple[int, Kind, TokenOrder] | None:
    """Return head-parallel degree, kind and order of the fastest order within a limit.

    Return ``None`` if head chunks as a whole fit, or if nothing fits free memory and they hold the
    fewest bytes. All ranks choose alike, so the layouts of rank 0 are counted.
    """
    num_ranks, is_small = len(work.seqlens_q), len(work.seqlens_q) <= _FEW_RANKS
    count = partial(_count_bytes, limit, with_gradients=work.with_gradients)
    whole = lay_out(work, 0)
    held = count(whole, len(whole.chunks))
    assert limit.max_bytes is not None
    if held <= limit.max_bytes:
        return None
    least: tuple[float, tuple[int, Kind, TokenOrder] | None] = held, None

    @cache
    def cut(degree: int, kind: Kind) -> tuple[Layout, Cells]:
        layout = lay_out(work.planned(degree, kind), 0)
        return layout, cut_tasks(layout)

    @cache
    def reorder(degree: int, kind: Kind, *order: Any) -> Layout:
        return order_tokens(*cut(degree, kind), TokenOrder(1, *order), work.shape)

    def num_units(degree: int, kind: Kind) -> tuple[int, int]:
        if is_small or isinstance(kind, Documents):
            return count_units(cut(degree, kind)[1])
        return kind.num_groups

    workload, plan = replace(work, shape=limit.shape).workload, work.plan
    plans: list[Kind | str] = ["any"] if plan in (None, "any") else [plan]
    if plan in (None, "any") and isinstance(work.bound, BoundDocuments):
        plans.append("documents")
    predicted = predict_orders(
        *(workload, num_ranks, work.machine, work.passes),
        plans=plans,
        head_parallel=work.head_parallel,
        most_chunks=work.num_chunks,
        num_units=num_units,
    )
    if not is_small and work.bound is None:
        *tensors, answer = workload.shard_bytes(num_ranks)
        highest = answer + work.with_gradients * sum(tensors) + _MOST_DEVIATION * limit.max_bytes
        smallest = sorted(predicted, key=lambda costs: costs.prediction.peak_bytes)[:_MOST_TRIED]
        predicted = [costs for costs in predicted if costs.prediction.peak_bytes <= highest]
        predicted += smallest
    for (_, _, _, degree, kind), order in predicted:
        assert kind is not None
        held = count(reorder(degree, kind, *order[1:]), order.num_chunks)
        if held <= limit.max_bytes:
            return degree, kind, order
        least = min(least, (held, (degree, kind, order)), key=itemgetter(0))
    if not limit.is_given:
        return least[1]
    raise ValueError(
        f"max_bytes must be at least {least[0]:.0f} for these tensors and options, got "
        f"{limit.max_bytes}"
    )


def _count_bytes(limit: Limit, layout: Layout, num_chunks: int, *, with_gradients: bool) -> float:
    """Return the most bytes that any rank holds at a time, with its send buffer.

    If the limit is free memory, results and gradients are included.

    Args:
        limit: Shape and options of the call.
        layout: The layout of any rank: its routes have the flows of all.
        num_chunks: Number of head chunks.
        with_gradients: Whether to count a backward pass too.
    """
    shards = layout.query_route.shards, layout.key_route.shards
    head_parallel = len(shards[QUERIES]) // layout.plan.num_tasks  # ranks that share a task
    devices = [
        DeviceRows(
            rounds=[
                Round((queries.flows[rank], keys.flows[rank]), receives, returns)
                for (queries, keys), receives, returns, _ in layout.rounds
            ],
            shard=(len(shard), len(key_shard)),
            head_groups=(head_parallel, min(head_parallel, limit.shape.kv_heads)),
            num_turns=None if layout.is_bounded else limit.num_turns,
            results=layout.result_route.flows[rank],
            separate=layout.separate[rank],
            is_final=layout.is_final,
            with_lse=limit.with_lse,
            keeps=with_gradients,
            has_buffer=limit.has_buffer,
            with_results=not limit.is_given,
            rounds_sums=False,
        )
        for rank, (shard, key_shard) in enumerate(zip(*shards, strict=True))
    ]
    chunk, *_ = make_chunks(num_chunks, len(devices), head_parallel, limit.shape)
    chunk_shape = chunk.part(limit.shape)
    counts = [
        [HeldBytes(chunk_shape, rows, num_chunks, is_backward=is_backward) for rows in devices]
        for is_backward in PASSES["both" if with_gradients else "forward"]
    ]
    num_turns = BOUNDED_TURNS if layout.is_bounded else min(limit.num_turns, num_chunks)
    return most_bytes(counts, num_turns * limit.has_buffer)


def cut_tasks(layout: Layout) -> Cells:
    """Cut the tasks of all ranks by token groups on both sides, given the layout of one rank."""
    plan = layout.plan
    bound = None if plan.pattern is None else plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    tasks = [
        [cell for step in task.steps for cell in _cut_step(step, plan.key_groups, bound)]
        for task in map(plan.task, range(plan.num_tasks))
    ]
    num_ranks = len(layout.query_route.shards)
    return [tasks[rank * plan.num_tasks // num_ranks] for rank in range(num_ranks)]


def count_units(cells: Cells) -> tuple[int, int]:
    """Return the largest number of groups of queries, and of ranges of keys, of a task."""
    queries, keys = (
        max(len({cell.units[side] for cell in task}) for task in cells) for side in (QUERIES, KEYS)
    )
    return queries, keys


def order_tokens(layout: Layout, cells: Cells, order: TokenOrder, shape: AttentionShape) -> Layout:
    """Return the layout of a rank that receives tokens in an order.

    Args:
        layout: The layout of the rank, with gradients.
        cells: The cells of all ranks.
        order: The order.
        shape: Heads of the problem.
    """
    num_chunks, resident, num_batches, is_streamed = order
    plan, streamed = layout.plan, 1 - resident
    number = len(plan.key_groups) if is_streamed else 1

    def route(side: int, part: Cells) -> Route:
        shards = (layout.query_route, layout.key_route)[side].shards
        return Route(shards, [_tokens(task, side) for task in part], layout.rank)

    def divide(side: int, whole: Cells, number: int) -> Iterator[Cells]:
        """Yield the first cells of every rank, the second, and so on; some ranks have fewer.

        A task begins with the groups of its own index on both sides, so that at any time the tasks
        receive tokens of different ranks.
        """
        tasks = list[list[list[Cell]]]()
        for rank, cells in enumerate(whole):
            units = dict[tuple[int, int], list[Cell]]()
            for cell in cells:
                unit, own = cell.units[side], rank * plan.num_tasks // len(whole)
                units.setdefault(((unit - own) % plan.num_tasks, unit), []).append(cell)
            tasks.append(_divide([units[place] for place in sorted(units)], number))
        return zip_longest(*tasks, fillvalue=())

    batches = (
        (
            route(resident, batch),
            [
                (route(streamed, part), _to_steps(part[layout.rank]))
                for part in divide(streamed, batch, number)
            ],
        )
        for batch in divide(resident, cells, num_batches)
    )
    rounds = tuple(make_rounds(resident, batches))
    routes = layout.query_route, layout.key_route, layout.result_route
    num_ranks = len(layout.query_route.shards)
    chunks = make_chunks(num_chunks, num_ranks, num_ranks // plan.num_tasks, shape)
    fields = routes, chunks, layout.separate, rounds
    return Layout(plan, SplitSteps((), (), layout.steps), *fields, is_bounded=True)


def _cut_step(step: Step, units: Sequence[range], bound: BoundPattern | None) -> Iterator[Cell]:
    """Cut the keys of a step at the ends of ``units``; parts without a live pair are dropped."""
    group, queries, square = step.query_group, step.queries, step.causal_keys
    for i, unit in enumerate(units):
        parts = (overlap(keys, unit) for keys in step.keys)
        live = [part for part in parts if part and (bound is None or bound.count(queries, part))]
        diagonal = square if square is not None and square.start in unit else None
        if live or diagonal is not None:
            yield Cell((group, i), Step.of(group, queries, live, diagonal))


def _divide(units: Sequence[Iterable[Cell]], number: int) -> list[list[Cell]]:
    """Divide units into at most ``number`` lists of their cells."""
    number = min(number, len(units))
    marks = [i * len(units) // number for i in range(number + 1)] if number else [0]
    return [[*chain(*units[a:b])] for a, b in pairwise(marks)]


def _to_steps(cells: Iterable[Cell]) -> tuple[Step, ...]:
    """Join the cells of the same rows into one step each."""
    rows: dict[tuple[int, range], list[Step]] = {}
    for _, step in sorted(cells, key=lambda cell: cell.step.queries.start):
        rows.setdefault((step.query_group, step.queries), []).append(step)
    return tuple(
        Step.of(
            *queries,
            chain(*(step.keys for step in steps)),
            next(filter(None, (step.causal_keys for step in steps)), None),
        )
        for queries, steps in rows.items()
    )


def _tokens(cells: Iterable[Cell], side: int) -> tuple[range, ...]:
    """Return the queries, or the keys, of cells in ascending ranges."""
    blocks = (block for cell in cells for block in cell.step.blocks())
    return join_ranges(block.queries if side == QUERIES else block.keys for block in blocks)
