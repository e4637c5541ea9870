"""Choice of the order in which ranks receive tokens, so that they hold few of them at a time."""

from dataclasses import replace
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

from cqs.executors.distributed.batches import Cells, count_units, cut_tasks, order_tokens
from cqs.executors.distributed.layout import (
    Layout,
    Lengths,
    lay_out,
    make_chunks,
    make_workload,
)
from cqs.executors.distributed.token_order import TokenOrder, predict_orders
from cqs.executors.distributed.transport.exchange import BOUNDED_TURNS
from cqs.patterns.bound_documents import BoundDocuments
from cqs.scheduler import AttentionShape, Documents, Kind
from cqs.scheduler.held_bytes import DeviceRows, HeldBytes, most_bytes
from cqs.scheduler.rounds import QUERIES, Round
from cqs.scheduler.workload import PASSES

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
    num_turns: int
    """Number of head chunks in transit at a time."""
    with_lse: bool
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
    lengths = seqlens_q, seqlens_kv
    chosen = None if limit.max_bytes is None else _choose_order(limit, *lengths, shape, **options)
    if chosen is None:
        return lay_out(*lengths, rank, shape, **options)
    degree, kind, order = chosen
    options |= {"plan": kind, "head_parallel": degree, "with_gradients": True}
    layout = lay_out(*lengths, rank, shape, **options)
    chunks = make_chunks(order.num_chunks, len(seqlens_q), degree, shape)
    return replace(order_tokens(layout, cut_tasks(layout), *order[1:]), chunks=chunks)


@lru_cache(maxsize=64)
def _choose_order(
    limit: Limit, seqlens_q: Lengths, seqlens_kv: Lengths, shape: AttentionShape, **options: Any
) -> tuple[int, Kind, TokenOrder] | None:
    """Return head-parallel degree, kind and order of the fastest order within a limit.

    Return ``None`` if head chunks as a whole fit, or if nothing fits free memory and they hold the
    fewest bytes. All ranks choose alike, so the layouts of rank 0 are counted.
    """
    with_gradients, is_small = options["with_gradients"], len(seqlens_q) <= _FEW_RANKS
    count = partial(_count_bytes, limit, with_gradients=with_gradients)
    held = count(lay_out(seqlens_q, seqlens_kv, 0, shape, **options))
    assert limit.max_bytes is not None
    if held <= limit.max_bytes:
        return None
    least: tuple[float, tuple[int, Kind, TokenOrder] | None] = held, None

    @cache
    def cut(degree: int, kind: Kind) -> tuple[Layout, Cells]:
        chosen = {**options, "plan": kind, "head_parallel": degree, "with_gradients": True}
        layout = lay_out(seqlens_q, seqlens_kv, 0, shape, **chosen)
        return layout, cut_tasks(layout)

    @cache
    def reorder(degree: int, kind: Kind, *order: Any) -> Layout:
        return order_tokens(*cut(degree, kind), *order)

    def num_units(degree: int, kind: Kind) -> tuple[int, int]:
        if is_small or isinstance(kind, Documents):
            return count_units(cut(degree, kind)[1])
        return kind.num_groups

    workload, bound = make_workload(
        seqlens_q, seqlens_kv, limit.shape, options["is_causal"], options["pattern"]
    )
    plan, passes = options["plan"], "both" if with_gradients else "forward"
    plans = ["any"] if plan in (None, "any") else [plan]
    if plan in (None, "any") and isinstance(bound, BoundDocuments):
        plans.append("documents")
    predicted = predict_orders(
        *(workload, len(seqlens_q), options["machine"], passes),
        plans=plans,
        head_parallel=options["head_parallel"],
        most_chunks=options["num_chunks"],
        num_units=num_units,
    )
    if not is_small and bound is None:
        *tensors, answer = workload.shard_bytes(len(seqlens_q))
        highest = answer + with_gradients * sum(tensors) + _MOST_DEVIATION * limit.max_bytes
        smallest = sorted(predicted, key=lambda costs: costs.prediction.peak_bytes)[:_MOST_TRIED]
        predicted = [costs for costs in predicted if costs.prediction.peak_bytes <= highest]
        predicted += smallest
    for (_, _, _, degree, kind), order in predicted:
        assert kind is not None
        chunks = make_chunks(order.num_chunks, len(seqlens_q), degree, shape)
        held = count(replace(reorder(degree, kind, *order[1:]), chunks=chunks))
        if held <= limit.max_bytes:
            return degree, kind, order
        least = min(least, (held, (degree, kind, order)), key=itemgetter(0))
    if not limit.is_given:
        return least[1]
    raise ValueError(
        f"max_bytes must be at least {least[0]:.0f} for these tensors and options, got "
        f"{limit.max_bytes}"
    )


def _count_bytes(limit: Limit, layout: Layout, *, with_gradients: bool) -> float:
    """Return the most bytes that any rank holds, given the layout of one.

    If the limit is free memory, results and gradients are included.
    """
    shards = layout.query_route.shards, layout.key_route.shards
    head_parallel = len(shards[QUERIES]) // layout.plan.num_tasks
    devices = [
        DeviceRows(
            [
                Round((queries.flows[rank], keys.flows[rank]), receives, returns)
                for (queries, keys), receives, returns, _ in layout.rounds
            ],
            (len(shard), len(key_shard)),
            (head_parallel, min(head_parallel, limit.shape.kv_heads)),
            None if layout.is_bounded else limit.num_turns,
            layout.result_route.flows[rank],
            layout.separate[rank],
            is_final=layout.is_final,
            with_lse=limit.with_lse,
        )
        for rank, (shard, key_shard) in enumerate(zip(*shards, strict=True))
    ]
    chunk_shape, num_chunks = layout.chunks[0].part(limit.shape), len(layout.chunks)
    counts = [
        [
            HeldBytes(
                *(chunk_shape, rows, num_chunks),
                is_backward=is_backward,
                keeps=with_gradients,
                has_buffer=limit.has_buffer,
                with_results=not limit.is_given,
                rounds_sums=False,
            )
            for rows in devices
        ]
        for is_backward in PASSES["both" if with_gradients else "forward"]
    ]
    num_turns = BOUNDED_TURNS if layout.is_bounded else min(limit.num_turns, num_chunks)
    return most_bytes(counts, num_turns * limit.has_buffer)
