"""The bytes that a device holds in a pass, counted in the order in which it is executed."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.rounds import KEYS, QUERIES, ChunkRounds, Round, run_chunks

_MOST_PACKETS, _ALIGNMENT = 3, 512
"""Most packets of a send in a send buffer, and the bytes at which they are aligned."""


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
    """Numbers of rows of a device in a pass, and the tensors of them that are counted."""

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
    keeps: bool = False
    """Whether a forward pass keeps tensors for a backward pass."""
    has_buffer: bool = True
    """Whether packed rows are in a send buffer, and not counted."""
    with_results: bool = True
    """Whether to count output, LSE and gradients of the shard."""
    rounds_sums: bool = True
    """Whether a kernel rounds gradients, and has the float32 sums of those of queries as scratch;
    otherwise it returns sums. Only without a limit of memory."""


class HeldBytes:
    """The bytes that a device holds in a pass, besides its shard.

    The last merges free no bytes here, because nothing is allocated after them.
    """

    def __init__(
        self, shape: AttentionShape, rows: DeviceRows, num_chunks: int, *, is_backward: bool
    ) -> None:
        """Count them. Scratch of merges is not counted.

        Args:
            shape: Heads of a head chunk of the device.
            rows: Its rows.
            num_chunks: Number of head chunks.
            is_backward: Whether the pass is a backward pass.
        """
        self._has_buffer = rows.has_buffer
        self.exchanges: list[tuple[list[float], list[float]]] = []
        """For every exchange the bytes of each packet that is sent, and received from others."""
        self.most = self._now = self._gradients = 0.0
        if rows.with_results:
            sizes = zip(rows.shard, rows.head_groups, strict=True)
            queries, keys = (number * groups * num_chunks for number, groups in sizes)
            self.hold(shape.result_bytes(1) * queries)
            gradients = shape.query_bytes(1) * queries + shape.key_bytes(1) * keys
            self._gradients = gradients * is_backward
        make = _Backward if is_backward else _Forward
        number = num_chunks if rows.num_turns else 1  # otherwise one after another, all alike
        chunks = (make(self, shape, rows) for _ in range(number))
        # Calls ``allocate`` before the first merge; with limited memory, _Backward does so first.
        run_chunks(chunks, rows.num_turns, allocate=self.hold_gradients)

    def hold(self, number: float) -> None:
        """Hold more bytes, or fewer."""
        self._now += number
        self.most = max(self.most, self._now)

    def hold_briefly(self, number: float) -> None:
        """Hold more bytes, and free them at once."""
        self.most = max(self.most, self._now + number)

    def hold_gradients(self) -> None:
        """Hold the gradients of the shard."""
        self.hold(self._gradients)

    def exchange(self, sent: list[float], received: list[float], own: float) -> float:
        """Hold packed rows, whose bytes are returned, and those received, with own rows."""
        self.exchanges.append((sent, received))
        packed = 0.0 if self._has_buffer else sum(sent)
        self.hold(packed + sum(received) + own)
        return packed


def most_bytes(passes: Iterable[Sequence[HeldBytes]], num_turns: int) -> float:
    """Return the most bytes that a device holds, with its send buffer.

    Args:
        passes: For every pass the bytes of all devices.
        num_turns: Number of sends in the buffer at a time; 0 without a buffer.
    """
    most, largest = 0.0, 0.0
    for devices in passes:
        most = max(most, *(device.most for device in devices))
        # A packet has a place that is large enough for that of any device.
        for exchanges in zip(*(device.exchanges for device in devices), strict=True):
            packets = zip(*(sent for sent, _ in exchanges), strict=True)
            largest = max(largest, sum(map(max, packets)))
    return most + num_turns * (largest + _MOST_PACKETS * _ALIGNMENT * (largest > 0))


Transfer = tuple[float, float]
"""Bytes of rows that are packed, and that are received."""


class _Chunk(ChunkRounds[Flow]):
    """Counts the bytes of a head chunk; attributes are bytes of one row, or of all.

    :func:`run_chunks` calls the methods in the order of a pass. ``sides`` are ``QUERIES``, ``KEYS``
    or both: those that are received, or that no later round needs.
    """

    def __init__(self, memory: HeldBytes, shape: AttentionShape, rows: DeviceRows) -> None:
        super().__init__(rows.rounds)
        self.memory, self.rows, self.is_bounded = memory, rows, rows.num_turns is None
        self.inputs = [float(shape.query_bytes(1)), float(shape.key_bytes(1))]
        self.wider = shape.sum_itemsize / shape.itemsize
        self.lse = shape.batch * shape.num_heads * shape.sum_itemsize
        self.result = shape.result_bytes(1)
        self._tokens = [0.0, 0.0]

    def fetch(self, current: Round[Flow], sides: tuple[int, ...]) -> tuple[float, list[float]]:
        flows = [(self.inputs[side], current.routes[side]) for side in sides]
        own = [row * flow.own * (not (self.is_bounded and flow.is_local)) for row, flow in flows]
        received = [row * (flow.received - flow.own) for row, flow in flows]
        sent = [row * flow.sent for row, flow in flows]
        packed = self.memory.exchange(sent, received, sum(own))
        return packed, [*map(sum, zip(received, own, strict=True))]

    def hold(self, sides: tuple[int, ...], transfer: tuple[float, list[float]]) -> None:
        packed, received = transfer
        self.memory.hold(-packed)
        for side, number in zip(sides, received, strict=True):
            self._tokens[side] = number

    def merge(self, transfer: Transfer, *_: Any) -> None:
        self.memory.hold(-sum(transfer))

    def return_rows(self, results: list[tuple[float, Flow]], *, are_freed: bool) -> Transfer:
        """Send results, given the bytes of a row, and free those that were computed."""
        sent = [row * (flow.received - flow.own) for row, flow in results]
        received = [row * flow.sent for row, flow in results]
        # A device that exchanges no rows receives what it has computed.
        own = [row * flow.own for row, flow in results]
        copied = [row * flow.own for row, flow in results if flow.sent or flow.received > flow.own]
        packed = self.memory.exchange(sent, received, sum(copied))
        if not are_freed:
            return packed, sum(received) + sum(copied)
        self.memory.hold(-sum(sent) - sum(copied))
        return packed, sum(received) + sum(own)


class _Forward(_Chunk):
    """The bytes of :class:`cqs.executors.distributed.chunk_pass.ForwardPass`."""

    def __init__(self, memory: HeldBytes, shape: AttentionShape, rows: DeviceRows) -> None:
        super().__init__(memory, shape, rows)
        self._running = 0.0
        # A merge has weights, and sums unless the output has their dtype.
        self._merge = self.lse + (self.result - self.lse) * self.wider * (self.wider > 1)
        if self.is_bounded:
            self.memory.hold(rows.shard[QUERIES] * rows.head_groups[QUERIES] * self._merge)

    def compute_own(self) -> None:
        self.memory.hold(self.result * self.rows.separate[0])

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

    def free(self, current: Round[Flow], sides: tuple[int, ...]) -> Transfer | None:
        if not self.rows.keeps or self.is_bounded:
            self.memory.hold(-sum(self._tokens[side] for side in sides))
        if not self.is_bounded:
            return self._returning_rows
        if QUERIES not in sides:
            return None
        flow, running, self._running = current.routes[QUERIES], self._running, 0.0
        if running:
            self.memory.hold(self.result * flow.received - running)
        return self.return_rows([(self.result, flow)], are_freed=True)

    def _compute_apart(self, rows: DeviceRows) -> None:
        row = self.result - self.lse * (rows.is_final and not rows.with_lse)
        is_kept = rows.keeps and rows.is_final
        if is_kept:
            self.memory.hold(self.result * rows.results.received)
        self._returning_rows = self.return_rows([(row, rows.results)], are_freed=False)
        if not is_kept:  # an LSE that is not sent
            self.memory.hold_briefly((self.result - row) * rows.results.received)
        self.memory.hold(self.result * rows.separate[1])


class _Backward(_Chunk):
    """The bytes of :class:`cqs.executors.distributed.backward_pass.BackwardPass`."""

    def __init__(self, memory: HeldBytes, shape: AttentionShape, rows: DeviceRows) -> None:
        super().__init__(memory, shape, rows)
        self._gradients, self._sums = self.inputs, [0.0, 0.0]
        """Bytes of a row of gradients of queries and keys, and of the sums that are held."""
        self._scratch = 0.0
        # Gradients of the output are received; output and LSE unless they were kept.
        answer = self.result - self.lse + self.result * (not rows.is_final)
        self.inputs = [answer, 0.0]
        if self.is_bounded:
            self.inputs = [answer + self._gradients[QUERIES], self._gradients[KEYS]]
            groups = zip(rows.shard, rows.head_groups, self._gradients, strict=True)
            sums = sum(n * number * row for n, number, row in groups)
            memory.hold_gradients()
            memory.hold(sums * self.wider * (self.wider > 1))
        else:
            queries, keys = (flow.received for flow in rows.rounds[0].routes)
            kept = self._gradients[QUERIES] * queries + self._gradients[KEYS] * keys
            memory.hold(kept + self.result * rows.results.received * rows.is_final)
            if rows.rounds_sums:
                self._scratch = self._gradients[QUERIES] * self.wider
                self.wider = 1.0

    def compute(self, current: Round[Flow]) -> None:
        numbers = [flow.received for flow in current.routes]
        if all(numbers):
            made = [n * row * self.wider for n, row in zip(numbers, self._gradients, strict=True)]
            self.memory.hold(sum(made))
            self.memory.hold_briefly(self._scratch * numbers[QUERIES])
            for side, number in enumerate(made):
                if self._sums[side]:  # added to those of an earlier round
                    self.memory.hold(-number)
                self._sums[side] = number

    def free(self, current: Round[Flow], sides: tuple[int, ...]) -> Transfer:
        """Free tokens, and send their gradients back; return the bytes that ``merge`` frees.

        Sums are first converted to the dtype of the inputs, unless the kernel has done so.
        """
        self.memory.hold(-sum(self._tokens[side] for side in sides))
        sums = sum(self._sums[side] for side in sides)
        if self.wider > 1:
            self.memory.hold(sums / self.wider)
            self.memory.hold(-sums)
        for side in sides:
            self._sums[side] = 0.0
        results = [(self._gradients[side], current.routes[side]) for side in sides]
        return self.return_rows(results, are_freed=True)
