"""Orders in which a device receives the tokens of its task, and the time and memory of each.

A task pairs groups of queries with groups of keys. One side is *resident*: it is received in
batches, each once for every head chunk. The other side is *streamed* past each batch: one group is
received while the device computes with the group before, and is then dropped. With a single batch
nothing is received twice, and the memory is that of the resident side. With a batch for each group
the traffic and the memory are those of a ring.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

from cqs.scheduler import AttentionShape, Step
from cqs.scheduler.cost_model import Prediction, near_shares, predict_passes
from cqs.scheduler.group_needs import group_needs
from cqs.scheduler.held_bytes import DeviceRows, Flow, HeldBytes
from cqs.scheduler.kinds import Kind, list_kinds
from cqs.scheduler.machines import Machine
from cqs.scheduler.rounds import KEYS, QUERIES, Round
from cqs.scheduler.workload import Workload

Rows = TypeVar("Rows")


class TokenOrder(NamedTuple):
    """The order in which a device receives the tokens of its task."""

    num_chunks: int
    """Number of head chunks, which follow one another."""
    resident: int
    """Side that is received in batches: ``QUERIES`` or ``KEYS``."""
    num_batches: int
    """Maximum number of batches of the resident side in each head chunk."""
    is_streamed: bool
    """Whether the groups of the other side are received one by one, or else all at once."""


def make_rounds(
    resident: int, batches: Iterable[tuple[Rows, Sequence[tuple[Rows, tuple[Step, ...]]]]]
) -> list[Round[Rows]]:
    """Return the rounds of batches: the resident side stays while the other is streamed past it.

    Args:
        resident: The resident side.
        batches: For every batch the rows of its resident side, and its parts: the rows of the
            streamed side and the steps of each. Rows are routes, or stand for them.
    """
    rounds, sides = [], ((resident,), (1 - resident,))
    for stays, parts in batches:
        for i, (passes, steps) in enumerate(parts):
            routes = (stays, passes) if resident == QUERIES else (passes, stays)
            # The first round also receives the resident side, and the last returns its results.
            is_last = i == len(parts) - 1
            rounds.append(Round(routes, sides[i > 0 :], sides[::-1][: 1 + is_last], steps))
    return rounds


def list_orders(
    shape: AttentionShape, num_units: tuple[int, int], most_chunks: int | None = None
) -> list[TokenOrder]:
    """List the orders to choose from.

    Args:
        shape: Heads of a device.
        num_units: Largest number of groups of queries, and of keys, of a task.
        most_chunks: Maximum number of head chunks.

    Example:
        >>> list_orders(AttentionShape(1, 64), (1, 2))[-1]
        TokenOrder(num_chunks=1, resident=1, num_batches=2, is_streamed=True)
    """
    most = min(shape.kv_heads, most_chunks or shape.kv_heads)
    chunks = [n for n in range(1, most + 1) if shape.kv_heads % n == 0]
    orders = [TokenOrder(n, KEYS, 1, False) for n in chunks]
    for n, resident in product(chunks, (QUERIES, KEYS)):
        most = max(num_units[resident], 1)
        numbers = {most, *(2**i for i in range(most.bit_length()))}
        orders += [TokenOrder(n, resident, number, True) for number in sorted(numbers)]
    return orders


def predict_order(
    workload: Workload,
    num_devices: int,
    machine: Machine,
    head_parallel: int,
    kind: Kind,
    order: TokenOrder,
    *,
    is_backward: bool,
) -> Prediction:
    """Predict the costs of an order for groups of equal size.

    Every batch waits for its resident side, for its first part and for its last results. Other
    communication overlaps with computation.

    Args:
        workload: The attention problem.
        num_devices: W, a multiple of ``head_parallel``.
        machine: Throughput and links of the devices.
        head_parallel: Head-parallel degree.
        kind: Kind of the plan of ``num_devices / head_parallel`` tasks.
        order: The order.
        is_backward: Whether to predict the backward pass instead of the forward pass.

    Returns:
        The prediction. Its peak memory has the parts of :func:`~cqs.scheduler.cost_model
        .predict_plan`: the bytes held for exchanges, results and gradients of the shard.
    """
    num_tasks, resident = num_devices // head_parallel, order.resident
    needs = group_needs(kind, num_tasks, is_causal=workload.is_causal)
    counts = (
        max(max(need.queries, need.query_results) for need in needs),
        max(max(need.keys, need.key_results) for need in needs),
    )
    pairs = min(float(num_tasks), counts[0] * counts[1])
    chunks = order.num_chunks
    shape, shard = workload.part(head_parallel, chunks), workload.shard_rows(num_devices)
    per_batch = counts[resident] / order.num_batches
    # Each group is paired with the same number of groups of the other side.
    seen = min(counts[1 - resident], per_batch * pairs / counts[resident])
    number = max(round(seen), 1) if order.is_streamed else 1

    def flow(side: int, groups: float) -> Flow:
        rows = shard[side] * head_parallel * groups
        is_local = head_parallel * counts[side] == 1
        return Flow(rows, rows * (not is_local), rows * is_local, is_local)

    batch_flow, part_flow = flow(resident, per_batch), flow(1 - resident, seen / number)
    parts = [(part_flow, ())] * min(number, 3)  # later parts hold the same
    groups = head_parallel, min(head_parallel, workload.shape.kv_heads)
    batches = [(batch_flow, parts)]
    rows = DeviceRows(make_rounds(resident, batches), shard, groups, has_buffer=False)

    near = near_shares(kind, num_tasks, head_parallel, machine.devices_per_node)
    query, key, result = shape.query_bytes(1), shape.key_bytes(1), shape.result_bytes(1)
    inputs, results = (query, key), (result, 0)
    if is_backward:
        output = result - shape.batch * shape.num_heads * shape.sum_itemsize
        inputs, results = (query + output + result, key), (query, key)

    def exchange(side: int, num_bytes: float) -> float:
        return machine.exchange(*(shares[side] * num_bytes for shares in near))

    there = exchange(1 - resident, part_flow.sent * inputs[1 - resident])
    back = exchange(1 - resident, part_flow.sent * results[1 - resident])
    exposed = exchange(resident, batch_flow.sent * inputs[resident]) + there
    exposed += exchange(resident, batch_flow.sent * results[resident]) or back
    calls = counts[0] * (number if resident == QUERIES else order.num_batches)
    compute = workload.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    compute *= kind.busiest if workload.is_causal else 1.0
    rounds = chunks * order.num_batches
    seconds = max(compute, rounds * (number - 1) * (there + back)) + rounds * exposed

    moved = batch_flow.sent * (inputs[resident] + results[resident])
    moved += number * part_flow.sent * (inputs[1 - resident] + results[1 - resident])
    own = sum(n * (i + r) for n, i, r in zip(shard, inputs, results, strict=True)) * chunks
    held = HeldBytes(shape, rows, chunks, is_backward=is_backward)
    return Prediction(seconds, max(rounds * moved - own, 0.0), held.most, head_parallel, kind)


class OrderPrediction(NamedTuple):
    """Predicted costs of an order."""

    prediction: Prediction
    """Costs of the passes."""
    order: TokenOrder
    """The order."""


def predict_orders(
    workload: Workload,
    num_devices: int,
    machine: Machine,
    passes: str = "forward",
    *,
    plans: Sequence[Kind | str] = ("any",),
    head_parallel: int | str = "auto",
    most_chunks: int | None = None,
    num_units: Callable[[int, Kind], tuple[int, int]] = lambda degree, kind: kind.num_groups,
) -> list[OrderPrediction]:
    """Predict the costs of all orders of all plans, the fastest first.

    Args:
        workload: The attention problem.
        num_devices: Number of devices, W.
        machine: Throughput and links of the devices.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        plans: Kinds to choose from, see :func:`cqs.scheduler.kinds.list_kinds`.
        head_parallel: Head-parallel degree, or ``"auto"`` for all that the heads support.
        most_chunks: Maximum number of head chunks.
        num_units: Returns the largest number of groups of queries, and of keys, of a task, given
            the head-parallel degree and the kind; by default the numbers of the kind.

    Example:
        >>> workload = Workload(2**20, AttentionShape(32, 128, num_kv_heads=8))
        >>> costs = predict_orders(workload, 64, Machine(), plans=["quorums"], head_parallel=1)
        >>> [order.prediction.peak_bytes // 2**20 for order in (costs[0], costs[-1])]
        [1738.0, 268.0]
    """
    per_node = machine.devices_per_node if machine.devices_per_node < num_devices else 1
    predict_with = partial(predict_order, workload, num_devices, machine)
    predictions = [
        OrderPrediction(predict_passes(partial(predict_with, degree, kind, order), passes), order)
        for degree in workload.list_degrees(num_devices, head_parallel)
        for plan in plans
        for kind in list_kinds(plan, num_devices // degree, per_node / degree)
        for order in list_orders(workload.part(degree), num_units(degree, kind), most_chunks)
    ]
    return sorted(predictions, key=lambda costs: costs.prediction.seconds)
