"""Orders in which a device receives the tokens of its task, and the time and memory of each.

A task pairs groups of queries with groups of keys. One side is *resident*: it is received in
batches, each once for every head chunk. The other side is *streamed* past each batch: one group is
received while the device computes with the group before, and is then dropped. With a single batch
nothing is received twice, and the memory is that of the resident side. With a batch for each group
the traffic and the memory are those of a ring.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Generic, NamedTuple, TypeVar

from cqs.scheduler import AttentionShape, Step
from cqs.scheduler.cost_model import Prediction, near_shares
from cqs.scheduler.head_groups import possible_head_parallel
from cqs.scheduler.kinds import Kind, list_kinds
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import PASSES, Workload

QUERIES, KEYS = 0, 1
_Rows = TypeVar("_Rows")
_BUFFER_TURNS, _MOST_PACKETS, _ALIGNMENT = 2, 3, 512
"""Sends in transit in a shared send buffer, the packets of each, and the bytes at which they are
aligned."""


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


class Flow(NamedTuple):
    """Numbers of rows of a device in one exchange; results are sent in reverse."""

    received: float
    """Rows that the device computes with, its own included."""
    sent: float
    """Rows that it sends to other devices."""
    own: float
    """Rows of its own that it computes with."""
    is_local: bool = False
    """Whether no device sends rows to another, so that none is copied."""

    @property
    def copied(self) -> float:
        """Rows that the device holds besides its shard."""
        return 0.0 if self.is_local else self.received

    @property
    def stays(self) -> bool:
        """Whether the device exchanges no rows with others."""
        return not self.sent and self.received == self.own


Batch = tuple[Flow, Sequence[Flow]]
"""Rows of the resident side of a batch, and of each part of the other side."""


class Round(NamedTuple, Generic[_Rows]):
    """What a device receives, computes and returns at a time."""

    routes: tuple[_Rows, _Rows]
    """The rows that it exchanges of queries, and of keys."""
    receives: tuple[tuple[int, ...], ...]
    """For every exchange before the computation, the sides of which tokens are received."""
    returns: tuple[tuple[int, ...], ...]
    """For every exchange after it, the sides of which results are returned and tokens freed."""
    steps: tuple[Step, ...] = ()
    """The steps to compute."""


def make_rounds(
    resident: int, batches: Iterable[tuple[_Rows, Sequence[tuple[_Rows, tuple[Step, ...]]]]]
) -> list[Round[_Rows]]:
    """Return the rounds of batches: the resident side stays while the other is streamed past it.

    Args:
        resident: The resident side.
        batches: For every batch the rows of its resident side, and rows and steps of its parts.
    """
    rounds, both = [], ((resident,), (1 - resident,))
    for route, parts in batches:
        for i, (part, steps) in enumerate(parts):
            routes = (route, part) if resident == QUERIES else (part, route)
            receives = both[int(i > 0) :]
            returns = both[::-1][: 1 + (i == len(parts) - 1)]
            rounds.append(Round(routes, receives, returns, steps))
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
    found = [TokenOrder(n, KEYS, 1, False) for n in chunks]
    for n, resident in product(chunks, (QUERIES, KEYS)):
        most = max(num_units[resident], 1)
        numbers = {most, *(2**i for i in range(most.bit_length()))}
        found += [TokenOrder(n, resident, number, True) for number in sorted(numbers)]
    return found


def held_bytes(
    shape: AttentionShape,
    resident: int,
    batches: Sequence[Batch],
    shard: tuple[float, float],
    head_groups: tuple[int, int],
    *,
    is_backward: bool,
    has_buffer: bool = False,
) -> float:
    """Return the most bytes that a device holds at once for the exchanges of a pass.

    These are received rows, send buffers, results and gradients until they are sent, and the sums
    of results of this device's shard. The passes of :class:`~cqs.executors.distributed
    .streamed_task.StreamedTask` allocate and free them in this order.

    Args:
        shape: Heads of a head chunk of a device.
        resident: The resident side.
        batches: The batches of a head chunk.
        shard: Numbers of queries and keys of the device's shard.
        head_groups: Number of head groups of queries, and of keys, that the shard is divided into.
        is_backward: Whether the pass is a backward pass.
        has_buffer: Whether packed rows are in a send buffer of a fixed size, see
            :func:`buffer_bytes`, and so are not counted.
    """
    inputs, results, sums = row_bytes(shape, is_backward=is_backward)
    streamed, apart = 1 - resident, shape.sums_apart
    lse = shape.batch * shape.num_heads * shape.sum_itemsize
    if is_backward:
        base = apart * sum(
            n * g * each for n, g, each in zip(shard, head_groups, sums, strict=True)
        )
    else:
        base = shard[QUERIES] * head_groups[QUERIES] * (apart * sums[QUERIES] + lse)
    of_part, of_batch = results[streamed], results[resident]

    def fetched(side: int, flow: Flow) -> float:
        return inputs[side] * (flow.copied + (0 if has_buffer else flow.sent))

    def returned(each: float, flow: Flow) -> float:
        if flow.stays:
            return 0.0
        return each * (flow.sent + (flow.own if has_buffer else flow.received))

    peaks = [base]
    for flow, parts in batches:
        coming = [*(fetched(streamed, part) for part in parts), 0.0]
        held = base + inputs[resident] * flow.copied
        peaks.append(base + fetched(resident, flow))
        added = 0.0  # sums of the batch
        if not is_backward and resident == QUERIES:
            added = flow.received * (of_batch + apart * sums[QUERIES] + lse)
        peaks.append(held + added + coming[0])
        returning = 0.0
        for part, after in zip(parts, coming[1:], strict=True):
            rows = (flow.received if part.received else 0.0), part.received
            now = held + added + inputs[streamed] * part.copied + after + returning
            if is_backward:
                of_sums = [sums[resident] * rows[0], sums[streamed] * rows[1]]
                peaks.append(now + sum(of_sums))
                added = max(added, of_sums[0])
                now = held + added + after
                peaks.append(now + of_sums[1] + apart * of_part * part.received)
            elif resident == QUERIES:
                peaks.append(now + of_batch * rows[0])
                continue
            else:
                peaks.append(now + of_part * part.received)
                now = held + after
            back = returned(of_part, part)
            peaks.append(now + of_part * part.received + back)
            returning = back or of_part * part.received
        if is_backward:
            peaks.append(base + flow.received * (sums[resident] + apart * of_batch))
        if is_backward or resident == QUERIES:
            peaks.append(base + of_batch * flow.received + returned(of_batch, flow))
    return max(peaks)


def buffer_bytes(
    shape: AttentionShape, resident: int, batches: Sequence[Batch], *, is_backward: bool
) -> float:
    """Return the bytes of a device's rows in a send buffer, if that is as large as its largest."""
    inputs, results, _ = row_bytes(shape, is_backward=is_backward)
    sides = [(resident, flow) for flow, _ in batches]
    sides += [(1 - resident, part) for _, parts in batches for part in parts]
    most = max(
        max(inputs[side] * flow.sent, results[side] * (flow.received - flow.own))
        for side, flow in sides
    )
    return _BUFFER_TURNS * (most + _MOST_PACKETS * _ALIGNMENT)


def row_bytes(
    shape: AttentionShape, *, is_backward: bool
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the bytes of a row of queries, and of keys: of inputs, of results and of their sums.

    Results of a forward pass are partial outputs, which only queries have.
    """
    wider = shape.sum_itemsize // shape.itemsize
    query, key, result = shape.query_bytes(1), shape.key_bytes(1), shape.result_bytes(1)
    output = result - shape.batch * shape.num_heads * shape.sum_itemsize
    if is_backward:
        return (query + output + result, key), (query, key), (query * wider, key * wider)
    return (query, key), (result, 0), (output * wider, 0)


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
        .predict_plan`: the bytes of :func:`held_bytes`, results and gradients of the shard.
    """
    num_tasks, resident = num_devices // head_parallel, order.resident
    needs = kind.needs(num_tasks, is_causal=workload.is_causal)
    counts = (
        max(max(each.queries, each.query_results) for each in needs),
        max(max(each.keys, each.key_results) for each in needs),
    )
    pairs = min(float(num_tasks), counts[0] * counts[1])
    part, chunks = workload.part(head_parallel), order.num_chunks
    shape = replace(part, num_heads=part.num_heads // chunks, num_kv_heads=part.kv_heads // chunks)
    shard = workload.shard_rows(num_devices)
    per_batch = counts[resident] / order.num_batches
    # Each group is paired with the same number of groups of the other side.
    seen = min(counts[1 - resident], per_batch * pairs / counts[resident])
    number = max(round(seen), 1) if order.is_streamed else 1

    def flow(side: int, groups: float) -> Flow:
        rows = shard[side] * head_parallel * groups
        is_local = head_parallel * counts[side] == 1
        return Flow(rows, rows * (not is_local), rows * is_local, is_local)

    of_batch, of_part = flow(resident, per_batch), flow(1 - resident, seen / number)
    batches = [(of_batch, [of_part] * min(number, 3))]  # later parts hold the same
    groups = head_parallel, min(head_parallel, workload.shape.kv_heads)
    held = held_bytes(shape, resident, batches, shard, groups, is_backward=is_backward)

    near = near_shares(kind, num_tasks, head_parallel, machine.devices_per_node)
    inputs, results, _ = row_bytes(shape, is_backward=is_backward)

    def exchange(side: int, num_bytes: float) -> float:
        return machine.exchange(*(shares[side] * num_bytes for shares in near))

    there = exchange(1 - resident, of_part.sent * inputs[1 - resident])
    back = exchange(1 - resident, of_part.sent * results[1 - resident])
    exposed = exchange(resident, of_batch.sent * inputs[resident]) + there
    exposed += exchange(resident, of_batch.sent * results[resident]) or back
    calls = counts[0] * (number if resident == QUERIES else order.num_batches)
    compute = workload.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    compute *= kind.busiest if workload.is_causal else 1.0
    rounds = chunks * order.num_batches
    seconds = max(compute, rounds * (number - 1) * (there + back)) + rounds * exposed

    moved = of_batch.sent * (inputs[resident] + results[resident])
    moved += number * of_part.sent * (inputs[1 - resident] + results[1 - resident])
    own = sum(n * (i + r) for n, i, r in zip(shard, inputs, results, strict=True)) * chunks
    queries, keys, answer = workload.shard_bytes(num_devices)
    peak = held + answer + (queries + keys if is_backward else 0)
    return Prediction(seconds, max(rounds * moved - own, 0.0), peak, head_parallel, kind)


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
    num_units: Callable[[int, Kind], tuple[int, int]] | None = None,
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
            the head-parallel degree and the kind; ``None`` means the numbers of the kind.

    Example:
        >>> workload = Workload(2**20, AttentionShape(32, 128, num_kv_heads=8))
        >>> found = predict_orders(workload, 64, Machine(), plans=["quorums"], head_parallel=1)
        >>> [each.prediction.peak_bytes // 2**20 for each in (found[0], found[-1])]
        [1738.0, 268.0]
    """
    shape, found = workload.shape, []
    per_node = machine.devices_per_node if machine.devices_per_node < num_devices else 1
    degrees = possible_head_parallel(num_devices, shape.num_heads, shape.kv_heads)
    for degree in degrees if isinstance(head_parallel, str) else [head_parallel]:
        kinds = [
            kind
            for plan in plans
            for kind in list_kinds(plan, num_devices // degree, per_node / degree)
        ]
        for kind in kinds:
            counts = kind.num_groups if num_units is None else num_units(degree, kind)
            for order in list_orders(workload.part(degree), counts, most_chunks):
                arguments = workload, num_devices, machine, degree, kind, order
                seconds, received, peaks, *_ = zip(
                    *(
                        predict_order(*arguments, is_backward=is_backward)
                        for is_backward in PASSES[passes]
                    ),
                    strict=True,
                )
                prediction = Prediction(sum(seconds), sum(received), max(peaks), degree, kind)
                found.append(OrderPrediction(prediction, order))
    return sorted(found, key=lambda each: each.prediction.seconds)
