"""The cost model: predicted time, traffic and memory of methods of context parallelism.

All devices compute, send and receive at constant rates. A kernel takes a fixed time per query row
besides its matrix products. The model has no launch overhead and no merges, which favours the ring
with its many steps. It also has no copies around a collective, no latency that grows with the
number of devices, and no shared switch, which favours methods that exchange with many devices.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import NamedTuple

from cqs.scheduler.group_needs import GroupNeeds, group_needs
from cqs.scheduler.held_bytes import DeviceRows, Flow, HeldBytes, most_bytes
from cqs.scheduler.kinds import Kind, fit_kind, is_final, list_kinds
from cqs.scheduler.machines import Machine
from cqs.scheduler.rounds import Round
from cqs.scheduler.workload import PASSES, Workload

_SUM_ITEMSIZE = 4
"""Bytes of an element of a gradient sum, which is float32."""

_MOST_TURNS = 4
"""Number of head chunks in transit at a time."""
_FEW_KEYS = 2**19
"""Number of keys up to which the lowest degree was measured to be fastest in a forward pass."""


class Prediction(NamedTuple):
    """Predicted costs of the slowest device."""

    seconds: float
    """Time in seconds."""
    bytes_received: float
    """Bytes that the device receives; with causal attention some devices send more."""
    peak_bytes: float
    """Peak memory in bytes, besides the shard and the scratch of kernels: buffers, results, and in
    a backward pass also the tensors that the forward pass saved and all gradients. Scratch includes
    float32 sums of gradients, which kernels of large dense or causal blocks use."""
    head_parallel: int = 1
    """Head-parallel degree; the devices of one head group share the tokens."""
    kind: Kind | None = None
    """Kind of the plan by which they share them, for methods of this package."""


def predict_passes(predict_pass: Callable[..., Prediction], passes: str) -> Prediction:
    """Predict the costs of all passes together.

    Args:
        predict_pass: Predicts one pass, given ``is_backward``.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
    """
    costs = [predict_pass(is_backward=is_backward) for is_backward in PASSES[passes]]
    seconds, received, peaks, (degree, *_), (kind, *_) = zip(*costs, strict=True)
    return Prediction(sum(seconds), sum(received), max(peaks), degree, kind)


def predict_plan(
    workload: Workload,
    num_devices: int,
    machine: Machine,
    head_parallel: int,
    *,
    is_backward: bool,
    num_chunks: int | None = None,
    kind: Kind | str = "quorums",
) -> Prediction:
    """Predict the costs of :func:`cqs.distributed.attention`.

    Traffic: every shard is sent to the ``head_parallel`` devices of each task that reads it, and
    results are sent back. Let a task read the queries of a groups and the keys of b groups, with
    a = b = m for quorums. With a degree of 1, each of W devices then receives ``[2 (a - 1) + 2g (b
    - 1)] / W`` of N x d per head, with g KV heads per query head. With a degree of W the traffic
    is that of Ulysses. Some tasks read only queries or only keys of a group (even W, causal); the
    prediction is for the device with the most traffic.

    Time: an exchange takes as long as the device that sends or receives the most. The sends of the
    first of S head chunks and the results of the last are exposed; all other communication overlaps
    with computation. In a forward pass a device also computes the pairs of
    its own shard, 1 / W^2 of all, during the exposed communication: those of the first head chunk
    before the others, the rest after them. If tasks have all keys of their queries, it computes its
    own queries last: with a degree of W, 1 / W of a head chunk, or 1 / W^2 on the first device if
    causal. With gradients it does not, which the prediction ignores.

    Memory: with a degree between 1 and W, the peak of a causal forward pass is an upper bound, up
    to 10 % too high.

    Args:
        workload: The attention problem.
        num_devices: W, a multiple of ``head_parallel``.
        machine: Throughput and links of the devices.
        head_parallel: Head-parallel degree.
        is_backward: Whether to predict the backward pass instead of the forward pass.
        num_chunks: Maximum number S of head chunks; ``None`` chooses it by the work.
        kind: Kind of the plan of ``num_devices / head_parallel`` tasks.
    """
    num_tasks = num_devices // head_parallel
    kind = fit_kind(kind, num_tasks)
    merges = not is_final(kind)
    near = near_shares(kind, num_tasks, head_parallel, machine.devices_per_node)
    chunks = workload.num_chunks(
        num_devices, head_parallel, num_chunks, is_backward=is_backward, kind=kind, machine=machine
    )

    # For each task, token groups: of queries and of keys that it reads, that send results for its
    # own queries and its own keys, and the parts of its own that it pairs with other groups.
    needs = group_needs(kind, num_tasks, is_causal=workload.is_causal)
    if head_parallel > 1:
        # A device owns a part of its token group; half of the group may be all of its queries.
        by_task = [(*there, math.ceil(back), returned) for *there, back, returned, _, _ in needs]
        by_device = ([head_parallel * number for number in counts] for counts in by_task)
        needs = tuple(GroupNeeds(*[*counts, float(merges), 1.0]) for counts in by_device)

    queries, keys = workload.shard_rows(num_devices)
    groups = head_parallel, min(head_parallel, workload.shape.kv_heads)

    def rows_of(needed: GroupNeeds) -> DeviceRows:
        # A forward pass without gradients receives none of a device's own queries.
        own, own_keys = (queries, keys) if is_backward else (0, keys * needed.own_keys)
        away = Flow((needed.queries - 1) * queries, (needed.query_results - 1) * queries, 0)
        there = away._replace(received=away.received + own, own=own)
        received = (needed.keys - 1) * keys + own_keys
        with_keys = Flow(received, (needed.key_results - 1) * keys, own_keys)
        return DeviceRows(
            *([Round((there, with_keys))], (queries, keys), groups, _MOST_TURNS),
            results=away if merges or not is_backward else there,
            separate=(queries, needed.home * queries) if merges else (0, 0),
            is_final=not merges,
        )

    chunk = workload.part(head_parallel, chunks)
    devices = [HeldBytes(chunk, rows_of(need), chunks, is_backward=is_backward) for need in needs]
    # The first results are sent after the tokens of so many head chunks.
    pairs = [(held.exchanges[0], held.exchanges[min(_MOST_TURNS, chunks)]) for held in devices]
    there, back = zip(*pairs, strict=True)
    received = max((packets for _, packets in there), key=sum)
    inputs, outputs = (max((max(side, key=sum) for side in way), key=sum) for way in (there, back))
    send, send_back = (
        machine.exchange(*(sum(map(mul, shares, sides)) for shares in near))  # own node, others
        for sides in (inputs, outputs)
    )
    calls = max(need.queries + (0 if is_backward else need.home) for need in needs) / head_parallel
    compute = workload.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    compute *= kind.busiest if workload.is_causal else 1.0
    before, after = 0.0, 0.0  # computation that overlaps the first sends, and the last results
    if not is_backward and merges:
        before = compute * num_tasks / num_devices**2 / chunks
        after = (chunks - 1) * before
    elif not is_backward:
        after = compute * num_tasks / num_devices ** (2 if workload.is_causal else 1) / chunks
    seconds = max(compute, (chunks - 1) * (send + send_back))
    seconds += max(send - before, 0.0) + max(send_back - after, 0.0)
    moved = chunks * (sum(received) + sum(outputs))
    peak = most_bytes([devices], min(_MOST_TURNS, chunks))
    return Prediction(seconds, moved, peak, head_parallel, kind)


def predict_ring(
    workload: Workload, num_devices: int, machine: Machine, head_parallel: int, *, is_backward: bool
) -> Prediction:
    """Predict the costs of Ulysses within groups of devices and a ring across the groups.

    A degree of 1 is ring attention (Liu et al., arXiv 2310.01889); every step takes the longer of
    its computation and its hop. A degree of W is Ulysses (Jacobs et al., arXiv 2309.14509), whose
    communication is exposed. Degrees between them are 2-D, or USP (Fang and Zhao, arXiv
    2405.07719). Causal rings are zig-zag. Partial outputs are merged in float32 as they arrive, as
    in github.com/zhuzilin/ring-flash-attention. In the backward pass, key gradients follow the keys
    around the ring.

    The traffic of a device in units of N x d per head, with g KV heads per query head, degree U and
    R steps, is ``(2 + 2g)(U - 1) / (U W) + 2g (R - 1) / R / U``.

    Args:
        workload: The attention problem.
        num_devices: W = U R.
        machine: Throughput and links of the devices.
        head_parallel: Head-parallel degree U. The devices of a group are neighbours, in one node as
            far as it has enough.
        is_backward: Whether to predict the backward pass instead of the forward pass.
    """
    num_steps = num_devices // head_parallel
    queries, keys, answer = (
        head_parallel * num_bytes for num_bytes in workload.shard_bytes(num_devices, head_parallel)
    )
    sums = keys * _SUM_ITEMSIZE / workload.shape.itemsize
    query_sums = queries * _SUM_ITEMSIZE / workload.shape.itemsize

    near = min(head_parallel, machine.devices_per_node)
    swaps = [(queries + keys) / head_parallel, queries / head_parallel]
    seconds = sum(
        machine.exchange((near - 1) * swap, (head_parallel - near) * swap) for swap in swaps
    )

    # Bytes that are sent during a step, and the number of such steps.
    hops = [(float(keys), num_steps - 1), (0.0, 1)]
    home = 0.0
    if is_backward and num_steps > 1:
        hops = [(float(keys), 1), (keys + sums, num_steps - 2), (sums, 1)]
        home = float(keys)
    # Zig-zag: a step has half of the rows, or half of the keys.
    calls = 1 + (num_steps - 1) * (0.5 if workload.is_causal else 1)
    step = workload.seconds(machine, is_backward=is_backward, calls=calls) / num_devices / num_steps
    seconds += sum(n * max(step, machine.hop(num_bytes, num_devices)) for num_bytes, n in hops)
    seconds += machine.hop(home, num_devices)

    ring = 2 * keys + queries + query_sums if num_steps > 1 else queries
    packed = queries + keys if head_parallel > 1 else 0
    if is_backward:
        ring = 2 * keys + 3 * sums + 2 * query_sums if num_steps > 1 else queries + keys
        peak = answer + packed + max(ring, queries + keys) + 2 * packed + queries + keys
    elif head_parallel > 1:
        peak = 2 * packed + max(ring, 3 * queries) + answer
    else:
        peak = ring + (answer - queries)
    moved = (head_parallel - 1) * sum(swaps) + sum(n * num_bytes for num_bytes, n in hops) + home
    return Prediction(seconds, moved, peak, head_parallel)


def predict_all_gather(
    workload: Workload, num_devices: int, machine: Machine, head_parallel: int, *, is_backward: bool
) -> Prediction:
    """Predict the costs of all-gathering keys and values, as in Llama 3 (arXiv 2407.21783).

    A device receives ``2g (W - 1) / W`` of N x d per head. The gather overlaps with the device's
    own block. In the backward pass the keys are gathered again during one half of the own block,
    and gradients are reduce-scattered in float32 during the other half. Between nodes every byte
    enters a node once, over all its links, as in NCCL's rings.

    Args:
        workload: The attention problem.
        num_devices: W.
        machine: Throughput and links of the devices.
        head_parallel: Head-parallel degree, which must be 1.
        is_backward: Whether to predict the backward pass instead of the forward pass.
    """
    queries, keys, answer = workload.shard_bytes(num_devices)
    wider = _SUM_ITEMSIZE / workload.shape.itemsize

    moved = (num_devices - 1) * keys
    entering = max(num_devices / machine.devices_per_node - 1, 0) * keys
    calls = min(num_devices, 2)
    compute = workload.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    own = compute / num_devices
    gather = machine.exchange(moved, entering)
    if not is_backward:
        beside = 2 * queries + num_devices * keys if num_devices > 1 else 0
        return Prediction(max(own, gather) + compute - own, moved, answer + beside)
    scatter = machine.exchange(wider * moved, wider * entering)
    seconds = max(own / 2, gather) + compute - own + max(own / 2, scatter)
    buffers = (1 + 2 * wider) * num_devices * keys + 2 * wider * keys + 3 * wider * queries
    return Prediction(seconds, (1 + wider) * moved, answer + buffers)


METHODS: dict[str, tuple[Callable[..., Prediction], Callable[[int, int], bool]]] = {
    "cqs quorums": (predict_plan, lambda n, devices: n == 1),
    "cqs": (predict_plan, lambda n, devices: True),
    "ring": (predict_ring, lambda n, devices: n == 1),
    "all-gather": (predict_all_gather, lambda n, devices: n == 1),
    "ulysses": (predict_ring, lambda n, devices: n == devices),
    "ulysses in two": (partial(predict_plan, num_chunks=2), lambda n, devices: n == devices),
    "2-D": (predict_ring, lambda n, devices: 1 < n < devices),
}
"""Cost models by the names of methods in ``python -m benchmarks peers``: a function that predicts
one pass, and one that returns whether a head-parallel degree belongs to the method, for a number of
devices."""


def predict(
    method: str,
    workload: Workload,
    num_devices: int,
    machine: Machine,
    passes: str = "forward",
    slack: float = 0.0,
    *,
    plan: Kind | str | None = None,
    head_parallel: int | str = "auto",
) -> Prediction | None:
    """Predict the costs of a method, with the best head-parallel degree and kind of plan.

    Args:
        method: One of :data:`METHODS`.
        workload: The attention problem.
        num_devices: Number of devices, W.
        machine: Throughput and links of the devices.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        slack: Relative time by which the choice may exceed the fastest. Among the choices within it
            the one with the lowest peak memory is taken. For ``"cqs"``, forward and up to 512K
            keys, it is the lowest degree: kernels then read fewer keys, more of them from cache.
        plan: Kinds to choose from for ``"cqs"``, see
            ``cqs.scheduler.kinds.list_kinds``; ``None`` means quorums in one node, and any
            kind in several.
        head_parallel: Head-parallel degree, or ``"auto"`` for all that the method supports.

    Returns:
        The prediction, or ``None`` if the method supports no degree for these heads, or ``plan``
        fits none.

    Example:
        >>> from cqs.scheduler import AttentionShape
        >>> workload = Workload(2**20, AttentionShape(32, 128, num_kv_heads=8))
        >>> predict("cqs", workload, 256, Machine()).head_parallel
        2
        >>> predict("ulysses", workload, 256, Machine()) is None
        True
    """
    predict_pass, supports = METHODS[method]
    if plan is None:
        plan = "any" if machine.devices_per_node < num_devices else "quorums"
    predictions = []
    for degree in workload.list_degrees(num_devices, head_parallel):
        if not supports(degree, num_devices):
            continue
        choices = [partial(predict_pass, workload, num_devices, machine, degree)]
        if method == "cqs":
            kinds = list_kinds(plan, num_devices // degree, machine.devices_per_node / degree)
            choices = [partial(choices[0], kind=kind) for kind in kinds]
        predictions += [predict_passes(choice, passes) for choice in choices]
    if not predictions:
        return None
    fastest = min(predictions, key=lambda one: one.seconds)
    if not slack:
        return fastest
    nearly = [one for one in predictions if one.seconds <= (1 + slack) * fastest.seconds]
    if (method, passes) == ("cqs", "forward") and workload._keys <= _FEW_KEYS:
        return min(nearly, key=lambda one: (one.head_parallel, one.seconds))
    return min(nearly, key=lambda one: one.peak_bytes)


def near_shares(
    kind: Kind, num_tasks: int, head_parallel: int, per_node: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the parts of queries and of keys that are received from the own node, and the rest.

    Ranks of a node are consecutive, and so are the head groups of a task. A task reads
    ``kind.num_groups`` groups of queries and of keys with its own, ``kind.near`` of them on its
    node. Each group is on ``head_parallel`` devices, and a device receives no rows of its own.

    Args:
        kind: Kind of the plan.
        num_tasks: Number of tasks.
        head_parallel: Number of devices that share a task.
        per_node: Devices of a node; infinite for one node.

    Returns:
        Parts of queries and of keys from the own node, and from other nodes; they add up to 1.
    """
    if head_parallel * num_tasks <= per_node:
        return (1.0, 1.0), (0.0, 0.0)
    near = [per_node, per_node]
    if head_parallel <= per_node:
        near = [n * head_parallel for n in kind.near(num_tasks, per_node // head_parallel)]
    near_queries, near_keys = (
        min((number - 1) / (head_parallel * groups - 1), 1.0) if head_parallel * groups > 1 else 0.0
        for number, groups in zip(near, kind.num_groups, strict=True)
    )
    return (near_queries, near_keys), (1 - near_queries, 1 - near_keys)
