"""Choice of the order in which ranks receive tokens, so that they hold few of them at a time."""

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cqs.executors.distributed.batches import CutPlan, flows_of
from cqs.executors.distributed.layout import Layout, Lengths, lay_out
from cqs.patterns.bound_documents import BoundDocuments
from cqs.scheduler import AttentionShape, Documents, Kind
from cqs.scheduler.held_bytes import DeviceRows, most_bytes
from cqs.scheduler.rounds import QUERIES, Round
from cqs.scheduler.token_order import TokenOrder, predict_orders
from cqs.scheduler.workload import PASSES, Workload

_TURNS = 2, 4
"""Number of head chunks in transit without a send buffer, and with one."""
_FEW_RANKS = 16
"""Number of ranks up to which the bytes of every order are counted."""
_MOST_DEVIATION, _MOST_TRIED = 1.5, 8
"""For more ranks, the orders whose predicted bytes are at most so many times the limit are counted,
and so many of those with the fewest. The smallest limit is then that of these."""


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
    with_lse: bool = False
    """Whether LSEs of final results are sent too."""


def lay_out_within(
    limit: Limit,
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    rank: int,
    shape: AttentionShape,
    **options: Any,
) -> Layout:
    """Lay out attention for one rank in the fastest order that fits a limit.

    Args:
        limit: The limit.
        seqlens_q: Number of queries in every rank's shard.
        seqlens_kv: Number of keys in every rank's shard.
        rank: The rank to lay out.
        shape: Numbers of heads and head_dim.
        options: Other arguments of :func:`lay_out`.

    Raises:
        ValueError: No order fits the limit; the message gives the smallest that one fits.
    """
    usual = lay_out(seqlens_q, seqlens_kv, rank, shape, **options)
    if limit.max_bytes is None:
        return usual
    most = limit.max_bytes
    if not limit.is_given:
        most -= _result_bytes(limit.shape, seqlens_q, seqlens_kv, **options)
    needed = _count_whole(limit, usual, **options)
    if needed <= most:
        return usual
    chosen = _choose(limit, most, needed, seqlens_q, seqlens_kv, shape, **options)
    if chosen is None:
        return usual
    degree, kind, order = chosen
    options |= {"plan": kind, "head_parallel": degree, "num_chunks": order.num_chunks}
    layout = lay_out(seqlens_q, seqlens_kv, rank, shape, **{**options, "with_gradients": True})
    rounds = _cut(layout, degree).rounds(order, rank)
    separate: dict[str, Any] = {"own_steps": (), "home_steps": (), "away_steps": layout.steps}
    return replace(layout, rounds=tuple(rounds), is_bounded=True, **separate)


@lru_cache(maxsize=64)
def _choose(
    limit: Limit,
    most_allowed: int,
    whole_bytes: float,
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    shape: AttentionShape,
    **options: Any,
) -> tuple[int, Kind, TokenOrder] | None:
    """Return head-parallel degree, kind and order of the fastest order within a limit.

    If none fits free memory, and none holds fewer bytes than head chunks as a whole, return None.
    """
    with_gradients, pattern = options["with_gradients"], options["pattern"]
    lengths = sum(seqlens_q), sum(seqlens_kv)
    bound = None if pattern is None else pattern.bind(*lengths)

    @cache
    def cut(degree: int, kind: Kind) -> CutPlan:
        chosen = {**options, "plan": kind, "head_parallel": degree, "with_gradients": True}
        return _cut(lay_out(seqlens_q, seqlens_kv, 0, shape, **chosen), degree)

    least: tuple[float, tuple[int, Kind, TokenOrder] | None] = whole_bytes, None
    num_pairs = None if bound is None else bound.num_pairs
    workload = Workload(lengths[0], limit.shape, options["is_causal"], lengths[1], num_pairs)
    plan, passes = options["plan"], "both" if with_gradients else "forward"
    plans = [plan]
    if plan in (None, "any"):
        plans = ["any", *(["documents"] if isinstance(bound, BoundDocuments) else [])]
    is_small = len(seqlens_q) <= _FEW_RANKS

    def num_units(degree: int, kind: Kind) -> tuple[int, int]:
        if is_small or isinstance(kind, Documents):
            return cut(degree, kind).num_units
        return kind.num_groups

    predicted = predict_orders(
        workload,
        len(seqlens_q),
        options["machine"],
        passes,
        plans=plans,
        head_parallel=options["head_parallel"],
        most_chunks=options["num_chunks"],
        num_units=num_units,
    )
    if not is_small and bound is None:
        results = _result_bytes(limit.shape, seqlens_q, seqlens_kv, **options)
        highest = results + _MOST_DEVIATION * most_allowed
        smallest = sorted(predicted, key=lambda each: each.prediction.peak_bytes)[:_MOST_TRIED]
        predicted = [each for each in predicted if each.prediction.peak_bytes <= highest]
        predicted += smallest
    for (_, _, _, degree, kind), order in predicted:
        assert kind is not None
        part = workload.part(degree)
        heads, kv_heads = (n // order.num_chunks for n in (part.num_heads, part.kv_heads))
        groups = degree, min(degree, limit.shape.kv_heads)
        held = most_bytes(
            replace(part, num_heads=heads, num_kv_heads=kv_heads),
            cut(degree, kind).rows(order, groups),
            1,
            PASSES[passes],
            has_buffer=limit.has_buffer,
        )
        if held < least[0]:
            least = held, (degree, kind, order)
        if held <= most_allowed:
            return degree, kind, order
    if not limit.is_given:
        return least[1]
    raise ValueError(
        f"max_bytes must be at least {least[0]:.0f} for these tensors and options, got "
        f"{limit.max_bytes}"
    )


def _result_bytes(
    shape: AttentionShape,
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    *,
    with_gradients: bool,
    **options: Any,
) -> int:
    """Return the most bytes of a rank's output and LSE, and of its gradients if required."""
    queries, keys = max(seqlens_q), max(seqlens_kv)
    gradients = shape.query_bytes(queries) + shape.key_bytes(keys)
    return shape.result_bytes(queries) + with_gradients * gradients


def _cut(layout: Layout, head_parallel: int) -> CutPlan:
    shards = layout.of_queries.shards, layout.of_keys.shards
    return CutPlan(layout.plan, shards, head_parallel)


def _count_whole(limit: Limit, layout: Layout, *, with_gradients: bool, **options: Any) -> float:
    """Return the most bytes that any rank holds if it receives head chunks as a whole.

    Args:
        limit: The limit.
        layout: The layout of any rank.
        with_gradients: Whether a backward pass will follow.
        options: Other arguments of :func:`lay_out`.
    """
    shards, num_chunks = (layout.of_queries.shards, layout.of_keys.shards), len(layout.chunks)
    head_parallel = len(shards[QUERIES]) // layout.plan.num_tasks
    part = Workload(0, limit.shape).part(head_parallel)
    heads, kv_heads = part.num_heads // num_chunks, part.kv_heads // num_chunks
    routes = layout.of_queries, layout.of_keys, layout.of_results
    devices = [
        DeviceRows(
            [Round((queries, keys))],
            (len(of_queries), len(of_keys)),
            (head_parallel, min(head_parallel, limit.shape.kv_heads)),
            _TURNS[limit.has_buffer],
            results,
            separate,
            is_final=layout.is_final,
            with_lse=limit.with_lse,
        )
        for queries, keys, results, of_queries, of_keys, separate in zip(
            *map(flows_of, routes), *shards, layout.separate, strict=True
        )
    ]
    return most_bytes(
        replace(part, num_heads=heads, num_kv_heads=kv_heads),
        devices,
        num_chunks,
        PASSES["both" if with_gradients else "forward"],
        has_buffer=limit.has_buffer,
    )
