"""Streaming plans: the order of computation and its device memory, within a budget of bytes."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from cqs.ranges import overlap
from cqs.scheduler import AttentionShape, Step
from cqs.scheduler.machines import MACHINES, Machine

_T = TypeVar("_T")

_TILE = 128
"""Tokens of a kernel's tile; blocks and chunks are whole tiles."""
_LAUNCH_SECONDS = 50e-6
"""Launch overhead of one visit."""
_MERGE_BANDWIDTH = 2.5e12
"""Bytes per second at which a GPU merges partial outputs."""
_LIST_BYTES = 64
"""Upper bound on the bytes of the tile list, per tile of the block."""
_LSES = 6
"""Tensors of the size of an LSE that a merge holds at a time."""
_DISTURBANCE = 0.1
"""Cost, in seconds, of one second of copies that overlap computation."""
_SAMPLE, _SAMPLE_OF_PATTERN = 64, 8
"""Blocks that are sampled to predict traffic, without and with a pattern."""


class Pass(Enum):
    """A pass over the problem. It determines the side that the device holds in blocks."""

    FORWARD = "forward"
    """Blocks of queries are held; keys and values are streamed."""
    QUERY_GRADIENTS = "gradients of queries"
    """Blocks of Q, O, dO and LSE are held; keys and values are streamed."""
    KEY_GRADIENTS = "gradients of keys and values"
    """Blocks of keys and values are held; Q, O, dO and LSE are streamed."""


class Position(NamedTuple):
    """A position in the order of a plan; all results before it are final."""

    group: int
    """Index of the group of heads; earlier groups are done."""
    row: int
    """Number of tokens of the held side that are done in this group."""


START = Position(0, 0)


class RowsOfHeads(NamedTuple):
    """The rows of a tensor ``[batch, heads, seqlen, ...]`` that are copied."""

    batch: int
    """Batch element."""
    heads: range
    """Heads to copy."""
    rows: range
    """Tokens to copy."""


class HeldBlock(NamedTuple):
    """Tokens of the held side, for one group of heads. All their results become final together."""

    batch: int
    """Index of the batch element."""
    heads: range
    """Query heads."""
    kv_heads: range
    """KV heads that the query heads share."""
    tokens: range
    """Tokens of the held side."""
    chunks: tuple[range, ...]
    """Tokens of the streamed side, in the order of computation."""
    end: Position
    """The position up to which results are final once this block is done."""

    def place(self, tokens: range, *, has_keys: bool) -> RowsOfHeads:
        """Return the place of tokens of this block's heads in a tensor of queries or of keys."""
        return RowsOfHeads(self.batch, self.kv_heads if has_keys else self.heads, tokens)


@dataclass(frozen=True)
class StreamPlan:
    """The order of computation of one pass: blocks are held while chunks are streamed past them.

    The heads are divided into groups. Fewer heads at a time leave room for larger blocks, and so
    the other side is streamed fewer times; too few leave the GPU idle. Every second block takes its
    chunks in reverse order, because the last chunk of the block before is still on the device.
    """

    seqlen_q: int
    """Number of queries."""
    seqlen_kv: int
    """Number of keys."""
    shape: AttentionShape
    """Batch, heads, head dimensions and itemsize of the tensors."""
    budget: int
    """Most bytes that may be held on the device at a time."""
    is_causal: bool = False
    """Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``."""
    pattern: Any = None
    """A pattern bound to the two lengths, or ``None``."""
    machine: Machine = MACHINES["H200"]
    """Throughput of the device, and its link to the memory of the sequence."""
    which: Pass = Pass.FORWARD
    """The pass that is planned."""
    has_single_calls: bool = False
    """Whether the GPU backend computes one rectangle, or one causal square, per call. An upper
    bound on the results and scratch of its calls is then counted too."""
    heads_at_once: int = 1
    """KV heads of a group; divides the number of KV heads."""
    rows: int = _TILE
    """Tokens of a block."""
    chunk: int = _TILE
    """Tokens of a chunk."""

    @property
    def holds_keys(self) -> bool:
        """Whether blocks consist of keys and values rather than queries."""
        return self.which == Pass.KEY_GRADIENTS

    @property
    def num_held(self) -> int:
        """Number of tokens of the held side."""
        return self.sides(self.seqlen_q, self.seqlen_kv)[0]

    @property
    def num_streamed(self) -> int:
        """Number of tokens of the streamed side."""
        return self.sides(self.seqlen_q, self.seqlen_kv)[1]

    @property
    def num_groups(self) -> int:
        """Number of groups of heads in all batch elements."""
        return self.shape.batch * (self.shape.kv_heads // self.heads_at_once)

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head."""
        return self.shape.num_heads // self.shape.kv_heads

    @property
    def num_buffers(self) -> int:
        """Number of input buffers per side; on a GPU one is filled while the other is used."""
        return 1 if self.machine.tiles == 1 else 2

    @property
    def merges(self) -> bool:
        """Whether the streamed side has several chunks, so that partial outputs are merged."""
        return self.chunk < self.num_streamed

    @property
    def visit(self) -> tuple[int, int]:
        """Most tokens of a block and of a chunk."""
        return min(self.rows, self.num_held), min(self.chunk, self.num_streamed)

    def blocks(self, start: Position = START) -> Iterator[HeldBlock]:
        """Yield the blocks in order, beginning at a position."""
        for group in range(start.group, self.num_groups):
            batch, head = divmod(group * self.heads_at_once, self.shape.kv_heads)
            kv_heads = range(head, head + self.heads_at_once)
            heads = range(kv_heads.start * self.group_size, kv_heads.stop * self.group_size)
            row = start.row if group == start.group else 0
            for first in range(row, self.num_held, self.rows):
                tokens = range(first, min(first + self.rows, self.num_held))
                is_last = tokens.stop == self.num_held
                end = Position(group + 1, 0) if is_last else Position(group, tokens.stop)
                # By the block's index, not by a count: a resumed run must use the same order.
                step = -1 if first // self.rows % 2 else 1
                chunks = tuple(self.chunks(tokens))[::step]
                yield HeldBlock(batch, heads, kv_heads, tokens, chunks, end)

    def chunks(self, held: range) -> Iterator[range]:
        """Yield the chunks that have live pairs with some tokens of the held side, ascending."""
        met = self._met(held)
        for first in range(met.start, met.stop, self.chunk):
            tokens = range(first, min(first + self.chunk, self.num_streamed))
            if self.pattern is None or self.pattern.count(*self.sides(held, tokens)):
                yield tokens

    def sides(self, one: _T, other: _T) -> tuple[_T, _T]:
        """Return ``(queries, keys)`` of the held and the streamed side, or the reverse."""
        return (other, one) if self.holds_keys else (one, other)

    def steps(self, queries: range, keys: range, shift: int = 0) -> tuple[Step, ...]:
        """Return the steps that compute a rectangle of the score matrix, causal or not.

        With ``is_causal`` these are at most two: the rows that the diagonal crosses, and the rows
        that attend to all of ``keys``. A pattern is not considered.

        Args:
            queries: Rows of the rectangle.
            keys: Columns of the rectangle.
            shift: Position of query 0 less that of key 0, if they are not counted from the first
                tokens of the problem.
        """
        if not self.is_causal:
            return (Step.of(0, queries, [keys], None),)
        ahead = self._ahead + shift
        first_seeing, first_full = keys.start - ahead, keys.stop - 1 - ahead
        steps = []
        if rows := overlap(queries, range(first_seeing, first_full)):
            square = range(rows.start + ahead, rows.stop + ahead)
            steps.append(Step.of(0, rows, [range(keys.start, square.start)], square))
        if rows := overlap(queries, range(first_full, queries.stop)):
            steps.append(Step.of(0, rows, [keys], None))
        return tuple(steps)

    @property
    def _ahead(self) -> int:
        """Query i of a causal problem attends to keys up to ``i + _ahead``."""
        return self.seqlen_kv - self.seqlen_q

    def count(self, held: range, streamed: range) -> int:
        """Return the number of live pairs of some tokens, for one query head."""
        queries, keys = self.sides(held, streamed)
        if self.pattern is not None:
            return int(self.pattern.count(queries, keys))
        return sum(step.live_pairs for step in self.steps(queries, keys))

    @cached_property
    def live_pairs(self) -> int:
        """Number of live pairs of one query head."""
        return self.count(range(self.num_held), range(self.num_streamed))

    def pairs_until(self, position: Position) -> int:
        """Return the number of live pairs that precede a position, over all query heads."""
        rows = self.count(range(position.row), range(self.num_streamed))
        head_pairs = position.group * self.live_pairs + rows
        return head_pairs * self.heads_at_once * self.group_size

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted peak memory on the device, in bytes."""
        rows, chunk = self.visit
        inputs = self.num_buffers * self._input_bytes(rows, chunk)
        return inputs + self._bytes_of_results(rows, chunk) + _LIST_BYTES * -(-rows // _TILE)

    @cached_property
    def bytes_uploaded(self) -> int:
        """Approximate number of bytes sent to the device."""
        return self.num_groups * self._input_bytes(self.num_held, self._num_loaded)

    @cached_property
    def flops(self) -> int:
        """FLOPs of live pairs: two matrix products forward, three or four in a backward pass."""
        columns = self.shape.head_dim, self.shape.value_columns
        products = sum(columns) * (2 if self.holds_keys else 1)
        if self.which == Pass.QUERY_GRADIENTS:
            products += columns[0]
        return 2 * products * self.live_pairs * self.shape.batch * self.shape.num_heads

    @cached_property
    def seconds(self) -> float:
        """Predicted time in seconds, by the cost model."""
        machine, shape = self.machine, self._shape_of_group
        rows, chunk = self.visit
        rate = machine.rate if self.which == Pass.FORWARD else machine.backward_rate
        computing, moving = self.flops / rate, self.bytes_uploaded / machine.host
        if self.num_buffers == 1:
            return computing + moving
        heads = shape.kv_heads if self.holds_keys else shape.num_heads
        # Wave quantisation: the tiles of a visit fill whole waves of programs.
        tiles = heads * -(-rows // _TILE)
        computing *= -(-tiles // machine.tiles) * machine.tiles / max(tiles, 1)
        blocks = -(-self.num_held // self.rows)
        visits = blocks * -(-self.num_streamed // self.chunk) * (0.5 if self.is_causal else 1)
        merged = self.merges * 5 * heads * rows * shape.value_columns * shape.sum_itemsize
        computing += self.num_groups * visits * (_LAUNCH_SECONDS + merged / _MERGE_BANDWIDTH)
        # Nothing overlaps the upload of the first visit and the download of the last results.
        first = self._input_bytes(rows, chunk) + shape.result_bytes(rows)
        return max(computing, moving) + first / machine.host

    @lru_cache(maxsize=64)  # noqa: B019
    def fit(self, heads_at_once: int | None = None) -> "StreamPlan":
        """Return the plan with the sizes of least predicted cost within the memory budget.

        For each number of KV heads and each chunk size (halved from the whole length to one tile),
        blocks are as large as the budget permits.

        Args:
            heads_at_once: KV heads of a group; ``None`` chooses it.

        Raises:
            ValueError: The budget is too small for one tile of queries and keys.
        """
        number = self.shape.kv_heads
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        chunks = [_round_up(self.num_streamed)]
        while chunks[-1] > _TILE:
            chunks.append(_round_up(chunks[-1] // 2))
        plans = [
            replace(self, heads_at_once=heads, rows=_TILE, chunk=chunk)
            for heads in ([heads_at_once] if heads_at_once else divisors)
            for chunk in chunks
        ]
        fitting = [plan._with_most_rows() for plan in plans if plan.peak_bytes <= self.budget]
        if not fitting:
            phase = "forward" if self.which == Pass.FORWARD else "backward"
            raise ValueError(
                f"memory_budget must be at least {min(plan.peak_bytes for plan in plans)} bytes, "
                f"for a tile of {_TILE} queries and keys in the {phase} pass, got {self.budget}"
            )
        link = self.machine.host
        return min(
            fitting, key=lambda plan: plan.seconds + _DISTURBANCE * plan.bytes_uploaded / link
        )

    def _with_most_rows(self) -> "StreamPlan":
        """Return the plan with the fewest blocks that fit, of nearly equal size."""
        tiles = range(1, _round_up(self.num_held) // _TILE + 1)
        most = bisect_right(
            tiles, self.budget, key=lambda tile: replace(self, rows=tile * _TILE).peak_bytes
        )
        number = max(math.ceil(self.num_held / (most * _TILE)), 1)
        return replace(self, rows=_round_up(math.ceil(self.num_held / number)))

    def __str__(self) -> str:
        """Describe the plan in one line."""
        held, streamed = self.sides("queries", "keys")
        blocks, chunks = -(-self.num_held // self.rows), -(-self.num_streamed // self.chunk)
        return (
            f"{self.heads_at_once} of {self.shape.kv_heads} KV heads at a time, "
            f"{blocks} blocks of {self.rows} {held}, held while "
            f"{chunks} chunks of {self.chunk} {streamed} stream past"
        )

    def _met(self, held: range) -> range:
        """Return the tokens in chunks with live pairs, without regard to a pattern."""
        first, stop = 0, self.num_streamed
        if self.is_causal and self.holds_keys:
            first = min(max(held.start - self._ahead, 0), stop)
        elif self.is_causal:
            stop = min(max(held.stop + self._ahead, 0), stop)
        whole = -(-stop // self.chunk) * self.chunk
        return range(first // self.chunk * self.chunk, min(whole, self.num_streamed))

    def _input_bytes(self, held: int, streamed: int) -> int:
        """Return the bytes of a group's inputs, for numbers of tokens of the two sides."""
        shape = self._shape_of_group
        queries, keys = self.sides(held, streamed)
        inputs = shape.query_bytes(queries) + shape.key_bytes(keys)
        if self.which != Pass.FORWARD:  # dO, and O and LSE
            output = shape.num_heads * queries * shape.value_columns * shape.itemsize
            inputs += output + shape.result_bytes(queries)
        return inputs

    def _bytes_of_results(self, rows: int, chunk: int) -> int:
        """Return the bytes of scratch, sums, and results that wait for their download."""
        shape = self._shape_of_group
        lse = shape.num_heads * shape.sum_itemsize
        wider = shape.sum_itemsize // shape.itemsize
        if self.which != Pass.FORWARD:
            queries, keys = self.sides(rows, chunk)
            mine = shape.key_bytes(rows) if self.holds_keys else shape.query_bytes(rows)
            copies = 2 + wider  # CPU kernels compute dQ, dK and dV, of two steps at a time
            if self.num_buffers == 2:  # dQ, dK and dV of each call, their sums, and scratch
                copies = (1 + 3 * wider) * self.has_single_calls
            call_bytes = copies * (shape.query_bytes(queries) + shape.key_bytes(keys))
            return call_bytes + (1 + wider) * mine + 2 * lse * queries
        call_bytes = 3 * shape.result_bytes(rows) * self.has_single_calls
        if not self.merges:
            return call_bytes + self.num_buffers * shape.result_bytes(rows)
        output = shape.num_heads * rows * shape.value_columns * shape.itemsize
        return call_bytes + (1 + 2 * wider) * output + _LSES * lse * rows

    @cached_property
    def _num_loaded(self) -> int:
        """Number of tokens streamed to the device for one group of heads.

        Chunks that are still on the device from the block before do not count. With many blocks
        this is an estimate from an evenly spaced sample of them.
        """
        if not self.merges:
            return self.num_streamed
        num_blocks = -(-self.num_held // self.rows)
        sample = _SAMPLE if self.pattern is None else _SAMPLE_OF_PATTERN
        chosen = range(0, num_blocks, max(-(-num_blocks // sample), 1))
        blocks = (range(i * self.rows, min((i + 1) * self.rows, self.num_held)) for i in chosen)
        if self.pattern is None:
            met = sum(len(self._met(held)) for held in blocks)
        else:
            met = sum(len(tokens) for held in blocks for tokens in self.chunks(held))
        kept = (num_blocks - 1) // (2 if self.is_causal else 1) * self.chunk
        return max(met * num_blocks // max(len(chosen), 1) - kept, min(met, self.num_streamed))

    @cached_property
    def _shape_of_group(self) -> AttentionShape:
        heads = self.heads_at_once
        return replace(self.shape, batch=1, num_heads=heads * self.group_size, num_kv_heads=heads)


def make_stream_plan(
    seqlen_q: int, seqlen_kv: int, shape: AttentionShape, *, budget: int, **options: Any
) -> StreamPlan:
    """Choose the group, block and chunk sizes of least predicted cost within a memory budget.

    No tensor is read.

    Args:
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys.
        shape: Batch, heads, head dimensions and itemsize of the tensors.
        budget: Most bytes that may be held on the device at a time.
        options: ``is_causal``, ``pattern``, ``machine``, ``which`` and ``has_single_calls``, the
            attributes of :class:`StreamPlan`.

    Raises:
        ValueError: The budget is too small for one tile of queries and keys.
    """
    return StreamPlan(seqlen_q, seqlen_kv, shape, budget, **options).fit()


def _round_up(tokens: int) -> int:
    """Round a number of tokens up to whole tiles, at least one."""
    return max(-(-tokens // _TILE), 1) * _TILE
