"""The bytes that a device holds in a pass, counted in the order in which it is executed."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.rounds import KEYS, QUERIES, ChunkRounds, Round, run_chunks

_BOUNDED_TURNS, _MOST_PACKETS, _ALIGNMENT = 2, 3, 512
"""Sends in transit in a shared send buffer if memory is limited, the most packets of each, and the
bytes at which they are aligned."""


class Flow(NamedTuple):
    """Numbers of rows of a device in one exchange; results are sent in reverse."""

    received: float
    """Rows that the device computes with, its own included."""
    sent: float
    """Rows that it sends to other devices."""
    own: float
    """Rows of its own that it computes with."""
    is_local: bool = False
    """Whether no device sends rows to another, so that none is copied if memory is limited."""


class DeviceRows(NamedTuple):
    """Numbers of rows of a device in a pass."""

    rounds: Sequence[Round[Flow]]
    """The rounds of a head chunk."""
    shard: tuple[float, float]
    """Queries and keys of its shard."""
    head_groups: tuple[int, int]
    """Number of head groups of queries, and of keys, into which the shard is divided."""
    num_turns: int | None = None
    """Number of head chunks in transit at a time; ``None`` if memory is limited."""
    results: Flow = Flow(0, 0, 0)
    """Queries of which results are sent back, if memory is not limited."""
    separate: tuple[float, float] = (0, 0)
    """Own queries whose results it merges: those computed with its own keys, and with others."""
    is_final: bool = False
    """Whether results cover all keys of their queries."""
    with_lse: bool = False
    """Whether the LSE of final results is sent too."""


def most_bytes(
    shape: AttentionShape,
    devices: Iterable[DeviceRows],
    num_chunks: int,
    passes: Sequence[bool],
    *,
    has_buffer: bool,
    with_results: bool = False,
) -> float:
    """Return the most bytes that a device holds besides its shard.

    A forward pass keeps tensors if there is a backward pass. Scratch of merges is not counted.

    Args:
        shape: Heads of a head chunk of a device.
        devices: The rows of every device.
        num_chunks: Number of head chunks.
        passes: For every pass, whether it is a backward pass.
        has_buffer: Whether packed rows are in a send buffer, which is as large on all devices.
        with_results: Whether to count output, LSE and gradients of the shard, and on GPUs the
            float32 sums in which a kernel adds up gradients of queries.
    """
    most, largest_send = 0.0, 0.0
    for is_backward in passes:
        sends = []
        for rows in devices:
            memory = _Memory(has_buffer=has_buffer, has_scratch=with_results)
            if with_results:
                queries, keys = (
                    n * groups * num_chunks
                    for n, groups in zip(rows.shard, rows.head_groups, strict=True)
                )
                memory.hold(shape.result_bytes(1) * queries)
                memory.gradients = shape.query_bytes(1) * queries + shape.key_bytes(1) * keys
            make = _Backward if is_backward else partial(_Forward, keeps=any(passes))
            run_chunks((make(memory, shape, rows) for _ in range(num_chunks)), rows.num_turns)
            most = max(most, memory.most)
            sends.append(memory.sends)
        # Packets of a send have places that are large enough for those of every device.
        for packets in zip(*sends, strict=True):
            largest_send = max(largest_send, sum(map(max, zip(*packets, strict=True))))
    if not has_buffer or not largest_send:
        return most
    num_turns = _BOUNDED_TURNS if rows.num_turns is None else min(rows.num_turns, num_chunks)
    return most + num_turns * (largest_send + _MOST_PACKETS * _ALIGNMENT)


class _Memory:
    """The bytes that a device holds."""

    def __init__(self, *, has_buffer: bool, has_scratch: bool) -> None:
        self.has_buffer, self.has_scratch = has_buffer, has_scratch
        self.sends: list[tuple[float, ...]] = []
        """Bytes of the packets of every send."""
        self.most = self._now = self.gradients = 0.0

    def hold(self, number: float) -> None:
        """Hold more bytes, or fewer."""
        self._now += number
        self.most = max(self.most, self._now)

    def hold_gradients(self) -> None:
        """Hold the gradients of the shard, unless they are held."""
        self.hold(self.gradients)
        self.gradients = 0.0

    def send(self, packets: Sequence[float], received: float) -> float:
        """Hold packed rows, whose bytes are returned, and rows that are received."""
        self.sends.append(tuple(packets))
        packed = 0.0 if self.has_buffer else sum(packets)
        self.hold(packed + received)
        return packed


class _Chunk(ChunkRounds[Flow]):
    """Counts the bytes of a head chunk; attributes are bytes of one row, or of all."""

    def __init__(self, memory: _Memory, shape: AttentionShape, rows: DeviceRows) -> None:
        super().__init__(rows.rounds)
        self.memory, self.rows, self.is_bounded = memory, rows, rows.num_turns is None
        self.inputs = [float(shape.query_bytes(1)), float(shape.key_bytes(1))]
        self.wider = shape.sum_itemsize / shape.itemsize
        self.lse = shape.batch * shape.num_heads * shape.sum_itemsize
        self.result = shape.result_bytes(1)
        self._tokens = [0.0, 0.0]

    def fetch(self, current: Round[Flow], sides: tuple[int, ...]) -> tuple[float, list[float]]:
        received, packets = [], []
        for side in sides:
            flow, number = current.routes[side], self.inputs[side]
            received.append(0.0 if self.is_bounded and flow.is_local else number * flow.received)
            packets.append(number * flow.sent)
        return self.memory.send(packets, sum(received)), received

    def hold(self, sides: tuple[int, ...], transfer: tuple[float, list[float]]) -> None:
        packed, received = transfer
        self.memory.hold(-packed)
        for side, number in zip(sides, received, strict=True):
            self._tokens[side] = number

    def free(self, sides: tuple[int, ...]) -> None:
        for side in sides:
            self.memory.hold(-self._tokens[side])

    def merge(self, transfer: tuple[float, float], *_: Any) -> None:
        self.memory.hold(-sum(transfer))

    def return_rows(
        self, results: Sequence[tuple[float, Flow]], *, are_freed: bool
    ) -> tuple[float, float]:
        """Send results, given the bytes of a row, and free those that were computed."""
        packets, returned, freed, stays = [], 0.0, 0.0, 0.0
        for row, flow in results:
            packets.append(row * (flow.received - flow.own))
            if flow.sent or flow.received != flow.own:
                returned += row * (flow.sent + flow.own)
                freed += row * flow.received
            else:  # this device receives what it has computed
                stays += row * flow.received
        packed = self.memory.send(packets, returned)
        if not are_freed:
            return packed, returned
        self.memory.hold(-freed)
        return packed, returned + stays


class _Forward(_Chunk):
    """The bytes of :class:`cqs.executors.distributed.chunk_pass.ForwardPass`."""

    def __init__(
        self, memory: _Memory, shape: AttentionShape, rows: DeviceRows, *, keeps: bool
    ) -> None:
        super().__init__(memory, shape, rows)
        self._keeps, self._running, self._separate = keeps, 0.0, 0.0
        # A merge has weights, and sums unless the output has their dtype.
        self._merge = self.lse + (self.result - self.lse) * self.wider * (self.wider > 1)
        if self.is_bounded:
            self._add_separate(rows.shard[QUERIES] * rows.head_groups[QUERIES] * self._merge)

    def compute_own(self) -> None:
        self._add_separate(self.result * self.rows.separate[0])

    def compute(self, current: Round[Flow]) -> None:
        queries, keys = (flow.received for flow in current.routes)
        if not self.is_bounded:
            self._compute_apart(self.rows)
        elif queries and keys:
            self.memory.hold(self.result * queries)
            if current.returns[0] != (QUERIES,):  # merged with those of the next keys
                if not self._running:
                    self._running = (self.result + self._merge) * queries
                    self.memory.hold(self._running)
                self.memory.hold(-self.result * queries)

    def free(self, sides: tuple[int, ...]) -> None:
        if not self._keeps or self.is_bounded:
            super().free(sides)

    def send_back(self, current: Round[Flow], sides: tuple[int, ...]) -> tuple[float, float] | None:
        if not self.is_bounded:
            return self._returning_rows
        if QUERIES not in sides:
            return None
        flow, running, self._running = current.routes[QUERIES], self._running, 0.0
        if running:
            self.memory.hold(self.result * flow.received - running)
        return self.return_rows([(self.result, flow)], are_freed=True)

    def write(self) -> None:
        self.memory.hold(-self._separate)

    def _compute_apart(self, rows: DeviceRows) -> None:
        row = self.result - self.lse * (rows.is_final and not rows.with_lse)
        is_kept = self._keeps and rows.is_final
        if is_kept:
            self.memory.hold(self.result * rows.results.received)
        self._returning_rows = self.return_rows([(row, rows.results)], are_freed=False)
        if not is_kept:  # an LSE that is not sent
            self.memory.hold((self.result - row) * rows.results.received)
            self.memory.hold((row - self.result) * rows.results.received)
        self._add_separate(self.result * rows.separate[1])

    def _add_separate(self, number: float) -> None:
        self._separate += number
        self.memory.hold(number)


class _Backward(_Chunk):
    """The bytes of :class:`cqs.executors.distributed.chunk_pass.BackwardPass`."""

    def __init__(self, memory: _Memory, shape: AttentionShape, rows: DeviceRows) -> None:
        super().__init__(memory, shape, rows)
        self._gradients, self._sums = self.inputs, [0.0, 0.0]
        self._shard_sums = self._scratch = 0.0
        # Gradients of the output are received; output and LSE unless they were kept.
        answer = self.result - self.lse + self.result * (not rows.is_final)
        self.inputs = [answer, 0.0]
        if self.is_bounded:
            self.inputs = [answer + self._gradients[QUERIES], self._gradients[KEYS]]
            groups = zip(rows.shard, rows.head_groups, self._gradients, strict=True)
            sums = sum(n * number * row for n, number, row in groups)
            self._shard_sums = sums * self.wider * (self.wider > 1)
            memory.hold_gradients()
            memory.hold(self._shard_sums)
        else:
            queries, keys = (flow.received for flow in rows.rounds[0].routes)
            kept = self._gradients[QUERIES] * queries + self._gradients[KEYS] * keys
            memory.hold(kept + self.result * rows.results.received * rows.is_final)
            if (
                memory.has_buffer
            ):  # kernels of GPUs round sums, and have those of queries as scratch
                self._scratch = self._gradients[QUERIES] * self.wider * memory.has_scratch
                self.wider = 1.0

    def compute_own(self) -> None:
        pass

    def merge(self, transfer: tuple[float, float], *rest: Any) -> None:
        self.memory.hold_gradients()
        super().merge(transfer, *rest)

    def compute(self, current: Round[Flow]) -> None:
        numbers = [flow.received for flow in current.routes]
        if all(numbers):
            made = [n * row * self.wider for n, row in zip(numbers, self._gradients, strict=True)]
            scratch = self._scratch * numbers[QUERIES]
            self.memory.hold(sum(made) + scratch)
            self.memory.hold(-scratch)
            for side, number in enumerate(made):
                if self._sums[side]:  # added to those of an earlier round
                    self.memory.hold(-number)
                self._sums[side] = number

    def send_back(self, current: Round[Flow], sides: tuple[int, ...]) -> tuple[float, float]:
        sums = sum(self._sums[side] for side in sides)
        if self.wider > 1:
            self.memory.hold(sums / self.wider)
            self.memory.hold(-sums)
        for side in sides:
            self._sums[side] = 0.0
        results = [(self._gradients[side], current.routes[side]) for side in sides]
        return self.return_rows(results, are_freed=True)

    def write(self) -> None:
        self.memory.hold(-self._shard_sums)
