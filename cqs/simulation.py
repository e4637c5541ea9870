"""How long ways to spread one attention over devices should take, by arithmetic alone.

A device computes, sends and receives at constant rates, and all devices do the same; beside its
products a kernel takes a time for each row that it begins with. Left out are launches and merges,
which flatters the ring with its many steps; and copies around a collective, its growing latency and
links that share a switch, which flatters whatever exchanges with many devices at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

from cqs.scheduler import AttentionShape
from cqs.scheduler.group_needs import GroupNeeds, group_needs
from cqs.scheduler.heads import choose_num_chunks, possible_head_parallel
from cqs.scheduler.interest_sets import load_interest_set

_SUM_ITEMSIZE = 4
"""Gradients are summed in float32."""

_PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}
"""Whether each is backward."""
_BACKWARD_ROWS = 6
"""How many times as long as forward a kernel takes for a row backward, beside its products."""

_FEW_KEYS = 2**19
"""Up to which number it was measured to pay forward that kernels go through fewer of them."""


@dataclass(frozen=True)
class Machine:
    """What devices and their links can do."""

    rate: float = 600e12
    """Operations per second of one device, forward; the default is of an H200 and our kernels."""
    backward_rate: float = 420e12
    """The same of the backward pass."""
    per_row: float = 0.7e-9
    """Seconds that a kernel takes, forward, for each row of queries and head beside its products:
    to begin and to end it. A row that several kernels work on is paid several times."""
    bandwidth: float = 300e9
    """Bytes per second that a device sends within its node, while it receives as many."""
    latency: float = 20e-6
    """Seconds that a collective, or a hop of the ring, takes beside its bytes."""
    devices_per_node: float = math.inf
    between: float = math.inf
    """Bytes per second and device, each way, between nodes."""

    def __post_init__(self) -> None:
        """Raise ValueError unless all numbers are positive; times are finite, and may be 0."""
        for field in fields(self):
            number, is_time = getattr(self, field.name), field.name in ("latency", "per_row")
            if not (0 <= number < math.inf if is_time else number > 0):
                wanted = "at least 0 and finite" if is_time else "positive"
                raise ValueError(f"{field.name} must be {wanted}, got {number:g}")

    def exchange(self, inside: float, outside: float = 0) -> float:
        """Return the seconds in which a device moves bytes within its node and beyond it."""
        if not (inside or outside):
            return 0.0
        return self.latency + max(inside / self.bandwidth, outside / self.between)

    def hop(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds of one step of a ring: of its slowest hop."""
        crosses = num_devices > self.devices_per_node
        return self.exchange(0, num_bytes) if crosses else self.exchange(num_bytes)


@dataclass(frozen=True)
class Case:
    """One attention, by default of a sequence to itself."""

    tokens: int
    """Of the queries."""
    shape: AttentionShape
    is_causal: bool = False
    num_keys: int | None = None
    """``None``: as many as queries."""
    num_pairs: float | None = None
    """How many pairs attend; ``None``: all, or half of them if causal."""

    def flops(self, *, is_backward: bool) -> float:
        """Return the operations: 4 d for each pair and head, 10 backward.

        The two products of matrices of the forward pass, and the five of the backward pass of
        FlashAttention-2 (Dao, arXiv 2307.08691).
        """
        shape, pairs = self.shape, self.num_pairs
        if pairs is None:
            pairs = self.tokens * self._keys / (2 if self.is_causal else 1)
        return (10 if is_backward else 4) * pairs * shape.head_dim * shape.num_heads * shape.batch

    def seconds(self, machine: Machine, *, is_backward: bool, calls: float = 1) -> float:
        """Return the time of one device.

        Args:
            machine: On what.
            is_backward: Which pass.
            calls: Of kernels that each query takes part in.
        """
        rate = machine.backward_rate if is_backward else machine.rate
        row = machine.per_row * (_BACKWARD_ROWS if is_backward else 1)
        rows = calls * self.tokens * self.shape.num_heads * self.shape.batch
        return self.flops(is_backward=is_backward) / rate + rows * row

    def seconds_of_one(self, machine: Machine, passes: str) -> float:
        """Return the time of one device; see :func:`forecast`."""
        return sum(self.seconds(machine, is_backward=each) for each in _PASSES[passes])

    def shard_bytes(self, num_devices: int, num_slices: int = 1) -> tuple[int, int, int]:
        """Return the bytes of a shard's queries, of its keys and values, and of its results.

        Args:
            num_devices: W.
            num_slices: Of the heads; the bytes are those of one.
        """
        part = self.part(num_slices)
        rows, keys = (-(-number // num_devices) for number in (self.tokens, self._keys))
        return part.query_bytes(rows), part.key_bytes(keys), part.result_bytes(rows)

    def part(self, num_slices: int) -> AttentionShape:
        """Return a slice of the heads; key heads fewer than slices go to several."""
        kv_heads = max(self.shape.kv_heads // num_slices, 1)
        return replace(
            self.shape, num_heads=self.shape.num_heads // num_slices, num_kv_heads=kv_heads
        )

    def num_chunks(
        self, num_devices: int, num_slices: int, most: int | None = None, *, is_backward: bool
    ) -> int:
        """Return into how many head chunks a device cuts its heads; ``most`` as in the layout."""
        num_tasks = num_devices // num_slices
        return choose_num_chunks(
            most,
            flops=self.flops(is_backward=False) / self.shape.batch / num_devices,
            num_ranks=num_devices,
            num_kv_heads=self.part(num_slices).kv_heads,
            num_keys=self._keys * len(load_interest_set(num_tasks)) // num_tasks,
            with_gradients=is_backward,
        )

    @property
    def _keys(self) -> int:
        return self.tokens if self.num_keys is None else self.num_keys


@dataclass(frozen=True)
class Forecast:
    """Of one device, the slowest."""

    seconds: float
    bytes_each_way: float
    """What it receives, and as much that it sends."""
    peak_bytes: float
    """The most that it holds at once beside its shard, without a kernel's scratch: buffers,
    results, and in a backward pass what the forward pass has kept and all gradients."""
    num_slices: int = 1
    """Of the heads; devices of one slice share the tokens."""


def by_quorums(
    case: Case,
    num_devices: int,
    machine: Machine,
    num_slices: int,
    *,
    is_backward: bool,
    num_chunks: int | None = None,
) -> Forecast:
    """Forecast :func:`cqs.distributed.attention`.

    A shard goes to ``num_slices`` devices for each of the m quorums that hold it, one of them its
    own, and results come back from there: in all ``(2 + 2g)(m - 1) / W`` of N x d per head without
    slices, with g key heads per head and W devices; with as many slices as devices, what Ulysses
    moves. For even W a group or two of a quorum may be queries or keys alone, and if attention is
    causal those at its ends are: then the device that moves most counts. Of S head chunks the first
    one's way in and the last one's way out are exposed, the rest travels beside the computation.
    Forward, pairs of the device's own shard, 1 / W^2 of all, are computed beside these: of the
    first head chunk before the others, of the rest after them. With as many slices as devices, what
    is computed for a device's own queries is last: 1 / W of a head chunk, and 1 / W^2 on the first
    device if causal; if gradients follow it is not, which is left out. With slices, but fewer than
    devices, the bytes held in a causal forward pass are a bound, up to a tenth too high.

    Args:
        case: What is computed.
        num_devices: W, a multiple of the slices.
        machine: On what.
        num_slices: Of the heads.
        is_backward: Which pass.
        num_chunks: S at most; ``None`` chooses by the work.
    """
    num_tasks = num_devices // num_slices
    interest_set = load_interest_set(num_tasks)
    holders = len(interest_set) * num_slices
    near = _near(interest_set, num_tasks, num_slices, machine.devices_per_node)
    is_near = (near - 1) / (holders - 1) if holders > 1 else 1.0
    chunks = case.num_chunks(num_devices, num_slices, num_chunks, is_backward=is_backward)

    queries, keys, results = case.shard_bytes(num_devices, num_slices)
    merged = results if num_tasks > 1 else queries  # whole rows need no lse
    needs = [
        GroupNeeds(
            each.queries * num_slices,
            each.keys * num_slices,
            # a device is in one half of its group, and half of the queries may be all of its own
            (each.query_results if num_slices == 1 else math.ceil(each.query_results)) * num_slices,
            each.key_results * num_slices,
            each.home if num_slices == 1 else float(num_tasks > 1),
            each.own_keys if num_slices == 1 else 1,
        )
        for each in group_needs(interest_set, num_tasks, case.is_causal)
    ]

    def moved(needed: GroupNeeds) -> tuple[float, float]:
        """Return the bytes that come to a worker, and those of results, on either way."""
        there = (needed.queries - 1) * queries + (needed.keys - 1) * keys
        if not is_backward:
            return there, (max(needed.queries, needed.query_results) - 1) * merged
        back = (needed.query_results - 1) * queries + (needed.key_results - 1) * keys
        with_gradients = queries + (merged if num_tasks > 1 else 0)
        return (needed.queries - 1) * with_gradients, max(there, back)

    def packed() -> float:
        """Return the bytes that are packed for others, of which all have the room of the most."""
        most = GroupNeeds(*map(max, zip(*needs, strict=True)))
        for_queries = queries + (merged if num_tasks > 1 else 0) if is_backward else queries
        there = (most.query_results - 1) * for_queries
        back = (most.queries - 1) * (queries if is_backward else merged)
        of_keys = ((most.key_results - 1) * keys, (most.keys - 1) * keys)
        return max(there, back + of_keys[1]) if is_backward else max(there + of_keys[0], back)

    def peak_of(needed: GroupNeeds) -> float:
        if is_backward:
            copied = _copied(needed.queries, needed.query_results) * queries
            copied += _copied(needed.keys, needed.key_results) * keys
            held = needed.queries * queries + needed.keys * keys
            held += answer if num_tasks == 1 else 0  # kept as computed, and had by the caller
            received = needed.query_results * queries + needed.key_results * keys
            sums = queries * _SUM_ITEMSIZE / case.shape.itemsize if num_tasks > 1 else 0.0
            return held + answer + received + (copied + sums) / chunks + sum(tensors)
        if num_devices == 1:
            return answer
        came = (needed.queries - 1) * queries + (needed.keys - 1 + needed.own_keys) * keys
        returned = (needed.query_results - 1) * merged
        own, home = (results, needed.home * results) if num_tasks > 1 else (0, 0)
        first = came + (own + home + returned) / chunks
        last = (came + own) / chunks + home + returned
        return answer + max(first, last, own + home + returned)

    going, coming = map(max, zip(*map(moved, needs), strict=True))
    way_in, way_out = (
        machine.exchange(is_near * each / chunks, (1 - is_near) * each / chunks)
        for each in (going, coming)
    )
    calls = max(each.queries + (0 if is_backward else each.home) for each in needs) / num_slices
    compute = case.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    before, after = 0.0, 0.0  # what is computed while all that travels is a way
    if not is_backward and num_tasks > 1:
        before = compute * num_tasks / num_devices**2 / chunks
        after = (chunks - 1) * before
    elif not is_backward:
        after = compute / num_devices ** (2 if case.is_causal else 1) / chunks
    seconds = max(compute, (chunks - 1) * (way_in + way_out))
    seconds += max(way_in - before, 0.0) + max(way_out - after, 0.0)
    *tensors, answer = case.shard_bytes(num_devices)
    return Forecast(seconds, going + coming, max(map(peak_of, needs)) + packed(), num_slices)


def by_ring(
    case: Case, num_devices: int, machine: Machine, num_slices: int, *, is_backward: bool
) -> Forecast:
    """Forecast heads for rows within groups, and a ring across them, zig-zag if causal.

    One slice is a ring (Liu et al., arXiv 2310.01889), in which every step waits for the slower of
    block and hop; as many slices as devices is Ulysses (Jacobs et al., arXiv 2309.14509), whose
    ways are exposed; between them 2-D, or USP (Fang and Zhao, arXiv 2405.07719). Traffic in units
    of N x d per head, with g key heads per head, U slices and R steps: ``(2 + 2g)(U - 1) / (U W)
    + 2g (R - 1) / R / U``. Partial results are merged as they come, into float32, as in
    github.com/zhuzilin/ring-flash-attention. Backward, sums for the keys travel behind them.

    Args:
        case: What is computed.
        num_devices: W = U R.
        machine: On what.
        num_slices: U; devices of a group are neighbours, and those of a node as far as they go.
        is_backward: Which pass.
    """
    num_steps = num_devices // num_slices
    queries, keys, answer = (
        num_slices * each for each in case.shard_bytes(num_devices, num_slices)
    )
    sums = keys * _SUM_ITEMSIZE / case.shape.itemsize
    of_sums = queries * _SUM_ITEMSIZE / case.shape.itemsize

    near = min(num_slices, machine.devices_per_node)
    swaps = [(queries + keys) / num_slices, queries / num_slices]
    seconds = sum(machine.exchange((near - 1) * each, (num_slices - near) * each) for each in swaps)

    hops = [
        (float(keys), num_steps - 1),
        (0.0, 1),
    ]  # bytes that travel beside a step, and how often
    home = 0.0
    if is_backward and num_steps > 1:
        hops = [(float(keys), 1), (keys + sums, num_steps - 2), (sums, 1)]
        home = float(keys)
    each_call = (
        0.5 if case.is_causal else 1
    )  # zig-zag: of half of the rows, or with half of the keys
    calls = 1 + (num_steps - 1) * each_call
    step = case.seconds(machine, is_backward=is_backward, calls=calls) / num_devices / num_steps
    seconds += sum(n * max(step, machine.hop(each, num_devices)) for each, n in hops)
    seconds += machine.hop(home, num_devices)

    ring = 2 * keys + queries + of_sums if num_steps > 1 else queries
    packed = queries + keys if num_slices > 1 else 0
    if is_backward:
        ring = 2 * keys + 3 * sums + 2 * of_sums if num_steps > 1 else queries + keys
        peak = answer + packed + max(ring, queries + keys) + 2 * packed + queries + keys
    elif num_slices > 1:
        peak = 2 * packed + max(ring, 3 * queries) + answer
    else:
        peak = ring + (answer - queries)
    moved = (num_slices - 1) * sum(swaps) + sum(n * each for each, n in hops) + home
    return Forecast(seconds, moved, peak, num_slices)


def by_all_gather(
    case: Case, num_devices: int, machine: Machine, num_slices: int, *, is_backward: bool
) -> Forecast:
    """Forecast all keys gathered beside a device's own block, as in Llama 3 (arXiv 2407.21783).

    Traffic ``2g (W - 1) / W``. Backward the keys come again beside one half of the own block, and
    gradients are reduced and scattered in float32 beside the other. Between nodes every byte
    enters a node once, over all its links, as in NCCL's rings.

    Args:
        case: What is computed.
        num_devices: W.
        machine: On what.
        num_slices: 1.
        is_backward: Which pass.
    """
    queries, keys, answer = case.shard_bytes(num_devices)
    wider = _SUM_ITEMSIZE / case.shape.itemsize

    moved = (num_devices - 1) * keys
    entering = max(num_devices / machine.devices_per_node - 1, 0) * keys
    calls = min(num_devices, 2)
    compute = case.seconds(machine, is_backward=is_backward, calls=calls) / num_devices
    own = compute / num_devices
    gather = machine.exchange(moved, entering)
    if not is_backward:
        beside = 2 * queries + num_devices * keys if num_devices > 1 else 0
        return Forecast(max(own, gather) + compute - own, moved, answer + beside)
    scatter = machine.exchange(wider * moved, wider * entering)
    seconds = max(own / 2, gather) + compute - own + max(own / 2, scatter)
    buffers = (1 + 2 * wider) * num_devices * keys + 2 * wider * keys + 3 * wider * queries
    return Forecast(seconds, (1 + wider) * moved, answer + buffers)


class Method(NamedTuple):
    """A way to spread attention."""

    forecast: Callable[..., Forecast]
    takes: Callable[[int, int], bool]
    """Whether so many slices of the heads, on so many devices, are this method."""


METHODS = {
    "cqs quorums": Method(by_quorums, lambda n, devices: n == 1),
    "cqs": Method(by_quorums, lambda n, devices: True),
    "ring": Method(by_ring, lambda n, devices: n == 1),
    "all-gather": Method(by_all_gather, lambda n, devices: n == 1),
    "ulysses": Method(by_ring, lambda n, devices: n == devices),
    "ulysses in two": Method(partial(by_quorums, num_chunks=2), lambda n, devices: n == devices),
    "2-D": Method(by_ring, lambda n, devices: 1 < n < devices),
}
"""By name, as in ``python -m benchmarks peers``."""


def forecast(
    method: str,
    case: Case,
    num_devices: int,
    machine: Machine,
    passes: str = "forward",
    slack: float = 0.0,
) -> Forecast | None:
    """Forecast a method with as many slices of the heads as take the least time.

    Args:
        method: One of :data:`METHODS`.
        case: What is computed.
        num_devices: W.
        machine: On what.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        slack: Of the numbers of slices that take at most by this part longer, take the one of which
            a device holds the fewest bytes. Of ``cqs`` forward, up to 512K keys, take the least of
            them: kernels then go through fewer keys, and find more of them in the cache.

    Returns:
        ``None`` if the heads do not allow it.

    Example:
        >>> case = Case(2**20, AttentionShape(32, 128, num_kv_heads=8))
        >>> forecast("cqs", case, 256, Machine()).num_slices
        2
        >>> forecast("ulysses", case, 256, Machine()) is None
        True
    """
    chosen, shape = METHODS[method], case.shape
    found = []
    for num_slices in possible_head_parallel(num_devices, shape.num_heads, shape.kv_heads):
        if chosen.takes(num_slices, num_devices):
            each = [
                chosen.forecast(case, num_devices, machine, num_slices, is_backward=is_backward)
                for is_backward in _PASSES[passes]
            ]
            found.append(
                Forecast(
                    sum(one.seconds for one in each),
                    sum(one.bytes_each_way for one in each),
                    max(one.peak_bytes for one in each),
                    num_slices,
                )
            )
    if not found:
        return None
    fastest = min(found, key=lambda one: one.seconds)
    if not slack:
        return fastest
    nearly = [one for one in found if one.seconds <= (1 + slack) * fastest.seconds]
    if (method, passes) == ("cqs", "forward") and case._keys <= _FEW_KEYS:
        return min(nearly, key=lambda one: one.num_slices)
    return min(nearly, key=lambda one: one.peak_bytes)


def _copied(needed: float, results: float) -> float:
    """Return of how many groups a worker has a copy; of its own none if nothing of it travels."""
    return needed if max(needed, results) > 1 else 0.0


def _near(
    interest_set: tuple[int, ...], num_tasks: int, num_slices: int, devices_per_node: float
) -> float:
    """Return how many of the devices that hold a shard are in its node, itself among them.

    The mean over nodes in which neighbours are workers, and the slices of each.
    """
    if num_slices * num_tasks <= devices_per_node:
        return len(interest_set) * num_slices
    if num_slices > devices_per_node:
        return devices_per_node
    workers = devices_per_node // num_slices
    distances = (min(offset, num_tasks - offset) for offset in interest_set)
    return num_slices * sum(max(workers - each, 0) for each in distances) / workers
