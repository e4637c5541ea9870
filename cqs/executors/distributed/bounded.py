"""Choice of the order in which ranks receive tokens, so that they hold few of them at a time."""

from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from cqs.executors.distributed.batches import CutPlan
from cqs.executors.distributed.layout import Layout, Lengths, lay_out
from cqs.patterns.bound_documents import BoundDocuments
from cqs.scheduler import AttentionShape, Documents, Kind
from cqs.scheduler.cost_model import predict_plan
from cqs.scheduler.machines import Machine
from cqs.scheduler.token_order import (
    QUERIES,
    TokenOrder,
    make_rounds,
    predict_orders,
    row_bytes,
)
from cqs.scheduler.workload import PASSES, Workload

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
    fits = _usual_bytes(limit, usual, **options) <= most
    if fits or not limit.is_given and _predict_peak(limit, usual, **options) <= limit.max_bytes:
        return usual
    degree, kind, order = _choose(limit, most, seqlens_q, seqlens_kv, shape, **options)
    options |= {"plan": kind, "head_parallel": degree, "num_chunks": order.num_chunks}
    layout = lay_out(seqlens_q, seqlens_kv, rank, shape, **{**options, "with_gradients": True})
    rounds = make_rounds(order.resident, _cut(layout, degree).batches(order, rank))
    separate: dict[str, Any] = {"own_steps": (), "home_steps": (), "away_steps": layout.steps}
    return replace(layout, rounds=tuple(rounds), is_bounded=True, **separate)


@lru_cache(maxsize=64)
def _choose(
    limit: Limit,
    most_allowed: int,
    seqlens_q: Lengths,
    seqlens_kv: Lengths,
    shape: AttentionShape,
    **options: Any,
) -> tuple[int, Kind, TokenOrder]:
    """Return head-parallel degree, kind and order of the fastest order within a limit."""
    with_gradients, pattern = options["with_gradients"], options["pattern"]
    lengths = sum(seqlens_q), sum(seqlens_kv)
    bound = None if pattern is None else pattern.bind(*lengths)

    @cache
    def cut(degree: int, kind: Kind) -> CutPlan:
        chosen = {**options, "plan": kind, "head_parallel": degree, "with_gradients": True}
        return _cut(lay_out(seqlens_q, seqlens_kv, 0, shape, **chosen), degree)

    least = None
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
        most = cut(degree, kind).most_bytes(
            order,
            replace(part, num_heads=heads, num_kv_heads=kv_heads),
            (degree, min(degree, limit.shape.kv_heads)),
            with_gradients=with_gradients,
            has_buffer=limit.has_buffer,
        )
        if least is None or most < least[0]:
            least = most, (degree, kind, order)
        if most <= most_allowed:
            return degree, kind, order
    assert least is not None, "there is an order for every plan"
    if not limit.is_given:
        return least[1]
    raise ValueError(
        f"max_bytes must be at least {least[0]} for these tensors and options, got "
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


def _predict_peak(
    limit: Limit, layout: Layout, *, with_gradients: bool, machine: Machine, **options: Any
) -> float:
    """Predict the peak memory of a rank with its results, for groups of equal size.

    It is closer than :func:`_usual_bytes`, but no bound: for a limit that may be exceeded.
    """
    plan, num_ranks = layout.plan, len(layout.of_queries.shards)
    workload = Workload(plan.seqlen_q, limit.shape, plan.is_causal, plan.seqlen_kv)
    degree, chunks = num_ranks // plan.num_tasks, len(layout.chunks)
    predict = partial(predict_plan, workload, num_ranks, machine, degree, num_chunks=chunks)
    passes = PASSES["both" if with_gradients else "forward"]
    return max(predict(is_backward=each, kind=plan.kind).peak_bytes for each in passes)


def _usual_bytes(limit: Limit, layout: Layout, *, with_gradients: bool, **options: Any) -> float:
    """Return a bound of the bytes that any rank holds if it receives head chunks as a whole.

    It counts all results at once, and the inputs of as many head chunks as are in transit.

    Args:
        limit: The limit.
        layout: The layout of any rank, which all give the same bound.
        with_gradients: Whether a backward pass will follow.
        options: Other arguments of :func:`lay_out`.
    """
    num_chunks = len(layout.chunks)
    head_parallel = len(layout.of_queries.shards) // layout.plan.num_tasks
    part = Workload(0, limit.shape).part(head_parallel)
    turns = min(4 if limit.has_buffer else 2, num_chunks) / num_chunks
    flows = [
        (numbers.sum(axis=0), numbers.sum(axis=1))
        for numbers in (
            each.numbers for each in (layout.of_queries, layout.of_keys, layout.of_results)
        )
    ]
    if limit.has_buffer:  # the buffers of all ranks are as large as the largest
        flows = [(there.max(keepdims=True), back.max(keepdims=True)) for there, back in flows]
    of_results = flows[2]
    inputs, (result, _), _ = row_bytes(part, is_backward=False)
    pairs = list(zip(inputs, flows[:2], strict=True))
    received = sum(each * flow[0] for each, flow in pairs)
    sent = sum(each * flow[1] for each, flow in pairs)
    shards = layout.of_queries.shards, layout.of_keys.shards
    own = result * max(map(len, shards[QUERIES])) * (0 if layout.is_final else 2)
    results = result * (of_results[0] + of_results[1])
    if not with_gradients:
        return float(max(turns * (received + sent) + results) + own)
    kept = received + result * of_results[0] * layout.is_final
    forward = kept + turns * sent + results + own
    (of_queries, _), gradients, sums = row_bytes(part, is_backward=True)
    backward = kept + turns * (of_queries - inputs[0]) * sum(flows[0])
    for side in (0, 1):
        there, back = flows[side]
        backward = backward + (sums[side] + gradients[side]) / num_chunks * there
        backward = backward + gradients[side] * (there + back)
        backward = backward + head_parallel * sums[side] / num_chunks * max(map(len, shards[side]))
    return float(max(max(forward), max(backward)))
