"""What is computed when, and what is in a device's memory meanwhile, under a budget of bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from cqs.scheduler import AttentionShape, Step
from cqs.scheduler.difference_covers import moduli_of_small_covers
from cqs.scheduler.interest_sets import load_interest_set

_TILE = 128
_PROGRAMS = 132
"""Tiles that a GPU computes at a time."""
_LAUNCH_SECONDS = 50e-6
_MERGE_BANDWIDTH = 2.5e12
"""Bytes per second at which results are merged on a GPU."""
_LIST_BYTES = 64
"""For every tile, what tells a kernel the tokens that it meets: at most."""
_LSES = 6
"""Tensors like an lse that a merge holds at once."""
_DISTURBANCE = 0.1
"""Seconds that a second of copying takes from computation beside it, or from others."""
_SAMPLE, _SAMPLE_OF_PATTERN = 64, 8
"""Blocks that are looked at to predict what moves."""
_MOST_TASKS = 1000


class Rates(NamedTuple):
    """What a device can do; plans depend on the ratios alone."""

    flops: float
    """Per second, of attention."""
    link: float
    """Bytes per second, each way, between the device and where the sequence is."""
    is_gpu: bool


GPU = Rates(550e12, 45e9, True)
"""Of an H200 and our kernels, from pinned memory over PCIe."""
CPU = Rates(0.2e12, 5e9, False)


class Pass(Enum):
    """What is computed, and so which side is held on the device while the other streams past."""

    FORWARD = "forward"
    """Queries are held; keys and values stream past."""
    QUERY_GRADIENTS = "gradients of queries"
    """Likewise, with the queries their output, its gradient and lse."""
    KEY_GRADIENTS = "gradients of keys and values"
    """Keys and values are held; queries, with the same, stream past."""


class Position(NamedTuple):
    """Up to where results are final."""

    group: int
    """Number of the group of heads; groups before it are done."""
    row: int
    """Tokens of the held side that are done in this group."""


START = Position(0, 0)


class Block(NamedTuple):
    """Some tokens that are held, of a group of heads; their result becomes final in one go."""

    batch: int
    heads: range
    """Of the queries."""
    kv_heads: range
    tokens: range
    end: Position
    """Up to where results are final with it."""


class Visit(NamedTuple):
    """Tokens stream past a block."""

    block: Block
    tokens: range | None
    """Of the other side; None where none meet the block at all."""
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class StreamPlan:
    """Blocks of one side are held on the device while what they meet of the other streams past.

    Heads are computed in groups, as few at a time as keep the device busy: the fewer there are, the
    more tokens fit, and the fewer times the others come by. Every other block takes its chunks
    backwards, so that its first ones are those that are still there.
    """

    seqlen_q: int
    seqlen_kv: int
    shape: AttentionShape
    is_causal: bool
    pattern: Any
    """A bound pattern, or ``None``."""
    budget: int
    """Bytes."""
    rates: Rates
    which: Pass
    heads_at_once: int
    """Key heads of a group."""
    rows: int
    """Tokens of a block."""
    chunk: int
    """Tokens that stream past at a time."""
    has_single_calls: bool = False
    """Whether kernels on a GPU compute one rectangle, or causal square, at a time."""

    @property
    def holds_keys(self) -> bool:
        """Whether the blocks are of keys."""
        return self.which == Pass.KEY_GRADIENTS

    @property
    def num_held(self) -> int:
        """Tokens of the side that is held."""
        return self.seqlen_kv if self.holds_keys else self.seqlen_q

    @property
    def num_streamed(self) -> int:
        """Tokens of the other."""
        return self.seqlen_q if self.holds_keys else self.seqlen_kv

    @property
    def num_groups(self) -> int:
        """Groups of heads, of all batch elements."""
        return self.shape.batch * (self.shape.kv_heads // self.heads_at_once)

    @property
    def group_size(self) -> int:
        """Query heads of a key head."""
        return self.shape.num_heads // self.shape.kv_heads

    @property
    def num_buffers(self) -> int:
        """How many times there is room for what comes in: one fills while another is used."""
        return 2 if self.rates.is_gpu else 1

    @property
    def merges(self) -> bool:
        """Whether a block meets the other side in several chunks."""
        return self.chunk < self.num_streamed

    def blocks(self, start: Position = START) -> Iterator[Block]:
        """Yield the blocks in order, from a position on."""
        groups_per_batch = self.shape.kv_heads // self.heads_at_once
        row = start.row
        for group in range(start.group, self.num_groups):
            batch, number = divmod(group, groups_per_batch)
            kv_heads = range(number * self.heads_at_once, (number + 1) * self.heads_at_once)
            heads = range(kv_heads.start * self.group_size, kv_heads.stop * self.group_size)
            for first in range(row, self.num_held, self.rows):
                tokens = range(first, min(first + self.rows, self.num_held))
                is_last = tokens.stop == self.num_held
                end = Position(group + 1, 0) if is_last else Position(group, tokens.stop)
                yield Block(batch, heads, kv_heads, tokens, end)
            row = 0

    def visits(self, start: Position = START) -> Iterator[Visit]:
        """Yield what is computed, in order, from a position on."""
        for block in self.blocks(start):
            chunks = list(self.chunks(block.tokens))
            if block.tokens.start // self.rows % 2:
                chunks.reverse()
            for i, tokens in enumerate(chunks):
                yield Visit(block, tokens, i == 0, i == len(chunks) - 1)
            if not chunks:
                yield Visit(block, None, True, True)

    def chunks(self, held: range) -> Iterator[range]:
        """Yield the chunks that meet some tokens which are held."""
        met = self._met(held)
        for first in range(met.start // self.chunk * self.chunk, met.stop, self.chunk):
            tokens = range(first, min(first + self.chunk, self.num_streamed))
            if self.pattern is None or self.pattern.count(*self.sides(held, tokens)):
                yield tokens

    def sides(self, held: range, streamed: range) -> tuple[range, range]:
        """Return queries and keys."""
        return (streamed, held) if self.holds_keys else (held, streamed)

    def steps(self, queries: range, keys: range) -> tuple[Step, ...]:
        """Return what some queries compute with some keys."""
        if not self.is_causal:
            return (_step(queries, [keys]),)
        ahead = self.seqlen_kv - self.seqlen_q
        first_seeing, first_full = keys.start - ahead, keys.stop - 1 - ahead
        steps = []
        if rows := _common(queries, first_seeing, first_full):
            square = range(rows.start + ahead, rows.stop + ahead)
            steps.append(_step(rows, [range(keys.start, square.start)], square))
        if rows := _common(queries, first_full, queries.stop):
            steps.append(_step(rows, [keys]))
        return tuple(steps)

    def count(self, held: range, streamed: range) -> int:
        """Return the number of pairs of some tokens, of one head."""
        queries, keys = self.sides(held, streamed)
        if self.pattern is not None:
            return int(self.pattern.count(queries, keys))
        return sum(step.live_pairs for step in self.steps(queries, keys))

    @cached_property
    def live_pairs(self) -> int:
        """Number of pairs of one head."""
        return self.count(range(self.num_held), range(self.num_streamed))

    def pairs_until(self, position: Position) -> int:
        """Return the number of pairs that are done at a position, of all heads."""
        rows = self.count(range(position.row), range(self.num_streamed))
        of_head = position.group * self.live_pairs + rows
        return of_head * self.heads_at_once * self.group_size

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that are held on the device at once."""
        rows, chunk = min(self.rows, self.num_held), min(self.chunk, self.num_streamed)
        held = self.num_buffers * (self._bytes_of_held(rows) + self._bytes_of_streamed(chunk))
        return held + self._bytes_of_results(rows, chunk) + _LIST_BYTES * -(-rows // _TILE)

    @cached_property
    def bytes_moved(self) -> int:
        """What goes to the device, about."""
        loaded = self._bytes_of_streamed(self._num_loaded)
        return self.num_groups * (self._bytes_of_held(self.num_held) + loaded)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations: two products of matrices forward, three and four backward."""
        columns = self.shape.head_dim, self.shape.value_columns
        of_pair = {
            Pass.FORWARD: sum(columns),
            Pass.QUERY_GRADIENTS: 2 * columns[0] + columns[1],
            Pass.KEY_GRADIENTS: 2 * sum(columns),
        }[self.which]
        return 2 * of_pair * self.live_pairs * self.shape.batch * self.shape.num_heads

    @cached_property
    def seconds(self) -> float:
        """Predicted time."""
        rates, shape = self.rates, self._shape_of_group
        rows, chunk = min(self.rows, self.num_held), min(self.chunk, self.num_streamed)
        computing, moving = self.flops / rates.flops, self.bytes_moved / rates.link
        if not rates.is_gpu:
            return computing + moving
        heads = shape.kv_heads if self.holds_keys else shape.num_heads
        tiles = heads * -(-rows // _TILE)
        computing *= -(-tiles // _PROGRAMS) * _PROGRAMS / max(tiles, 1)
        blocks = -(-self.num_held // self.rows)
        visits = blocks * -(-self.num_streamed // self.chunk) * (0.5 if self.is_causal else 1)
        merged = self.merges * 5 * heads * rows * shape.value_columns * shape.sum_itemsize
        computing += self.num_groups * visits * (_LAUNCH_SECONDS + merged / _MERGE_BANDWIDTH)
        first = self._bytes_of_held(rows) + self._bytes_of_streamed(chunk)
        return max(computing, moving) + (first + shape.result_bytes(rows)) / rates.link

    @property
    def cost(self) -> float:
        """What the choice is made by: seconds, and a little for what moves beside computation."""
        return self.seconds + _DISTURBANCE * self.bytes_moved / self.rates.link

    def explain(self) -> str:
        """Say what was chosen, and why."""
        held, streamed = ("keys", "queries") if self.holds_keys else ("queries", "keys")
        blocks, chunks = -(-self.num_held // self.rows), -(-self.num_streamed // self.chunk)
        lines = [
            f"{self.which.value}: {self.heads_at_once} of {self.shape.kv_heads} key heads at a "
            f"time, {blocks} blocks of {self.rows} {held}, held while {chunks} chunks of "
            f"{self.chunk} {streamed} stream past",
            f"peak {self.peak_bytes / 2**20:.0f} MiB of a budget of {self.budget / 2**20:.0f}; "
            f"{self.bytes_moved / 2**30:.3g} GiB to the device; about {self.seconds:.3g} s",
        ]
        if self.which == Pass.FORWARD and (split := self._quorum_split()) is not None:
            num_tasks, moved, seconds = split
            lines.append(
                f"not the cyclic quorum split: its {num_tasks} tasks would move "
                f"{moved / 2**30:.3g} GiB to this device, and as many results back and forth; "
                f"about {seconds:.3g} s. It moves the least where each task has its own device"
            )
        return "\n".join(lines)

    def _quorum_split(self) -> tuple[int, float, float] | None:
        """Return the least number of tasks that fit, what they move, and their time on a device.

        A task holds m / W of all tokens, and returns as large a share of partial results, which
        are merged where the answer is.
        """
        tokens = self.shape.query_bytes(self.seqlen_q) + self.shape.key_bytes(self.seqlen_kv)
        results = self.shape.result_bytes(self.seqlen_q)
        for num_tasks in moduli_of_small_covers(_MOST_TASKS):
            share = len(load_interest_set(num_tasks)) / num_tasks
            if self.num_buffers * share * (tokens + results) <= self.budget:
                moved = num_tasks * share * tokens
                computing = self.flops / self.rates.flops + num_tasks * _LAUNCH_SECONDS
                moving = moved / self.rates.link
                exposed = share * (tokens + results) / self.rates.link
                return num_tasks, moved, max(computing, moving) + exposed
        return None

    def _met(self, held: range) -> range:
        """Return the tokens of the other side that some meet, unless a pattern says less."""
        if not self.is_causal:
            return range(self.num_streamed)
        ahead = self.seqlen_kv - self.seqlen_q
        if self.holds_keys:
            return range(min(max(held.start - ahead, 0), self.seqlen_q), self.seqlen_q)
        return range(min(max(held.stop + ahead, 0), self.seqlen_kv))

    def _bytes_of_held(self, rows: int) -> int:
        shape = self._shape_of_group
        if self.which == Pass.FORWARD:
            return shape.query_bytes(rows)
        return shape.key_bytes(rows) if self.holds_keys else self._bytes_with_results(rows)

    def _bytes_of_streamed(self, tokens: int) -> int:
        if self.holds_keys:
            return self._bytes_with_results(tokens)
        return self._shape_of_group.key_bytes(tokens)

    def _bytes_with_results(self, rows: int) -> int:
        """Return the bytes of queries, outputs, their gradients and lse."""
        shape = self._shape_of_group
        output = shape.num_heads * rows * shape.value_columns * shape.itemsize
        return shape.query_bytes(rows) + shape.result_bytes(rows) + output

    def _bytes_of_results(self, rows: int, chunk: int) -> int:
        """Return the bytes of what is computed, from scratch to what waits for its way back."""
        shape = self._shape_of_group
        lse = shape.num_heads * shape.sum_itemsize
        wider = shape.sum_itemsize // shape.itemsize
        if self.which != Pass.FORWARD:
            queries, keys = (chunk, rows) if self.holds_keys else (rows, chunk)
            mine = shape.key_bytes(rows) if self.holds_keys else shape.query_bytes(rows)
            results = (1 + wider) * mine + 2 * lse * queries
            if not self.rates.is_gpu:  # its kernels compute all gradients, of two steps at once
                results += (2 + wider) * (shape.query_bytes(queries) + shape.key_bytes(keys))
            elif self.has_single_calls:  # all gradients: those of calls, their sums, and scratch
                results += (1 + 3 * wider) * (shape.query_bytes(queries) + shape.key_bytes(keys))
            return results
        of_calls = 3 * shape.result_bytes(rows) * self.has_single_calls
        if not self.merges:
            return of_calls + self.num_buffers * shape.result_bytes(rows)
        output = shape.num_heads * rows * shape.value_columns * shape.itemsize
        return of_calls + (1 + 2 * wider) * output + _LSES * lse * rows

    @cached_property
    def _num_loaded(self) -> int:
        """Tokens that stream past for a group, but those that are still there from before.

        Where there are many blocks, as if all were like some of them.
        """
        if not self.merges:
            return self.num_streamed
        num_blocks = -(-self.num_held // self.rows)
        sample = _SAMPLE if self.pattern is None else _SAMPLE_OF_PATTERN
        chosen = range(0, num_blocks, max(-(-num_blocks // sample), 1))
        met = sum(self._num_met(block * self.rows) for block in chosen)
        kept = (num_blocks - 1) // (2 if self.is_causal else 1) * self.chunk
        return max(met * num_blocks // max(len(chosen), 1) - kept, min(met, self.num_streamed))

    def _num_met(self, first: int) -> int:
        """Return the tokens of the chunks that a block meets."""
        held = range(first, min(first + self.rows, self.num_held))
        if self.pattern is not None:
            return sum(map(len, self.chunks(held)))
        met = self._met(held)
        first, last = met.start // self.chunk, -(-met.stop // self.chunk)
        return min(last * self.chunk, self.num_streamed) - first * self.chunk

    @cached_property
    def _shape_of_group(self) -> AttentionShape:
        heads = self.heads_at_once
        return replace(self.shape, batch=1, num_heads=heads * self.group_size, num_kv_heads=heads)


def make_stream_plan(
    seqlen_q: int,
    seqlen_kv: int,
    shape: AttentionShape,
    *,
    budget: int,
    is_causal: bool = False,
    pattern: Any = None,
    rates: Rates = GPU,
    which: Pass = Pass.FORWARD,
    heads_at_once: int | None = None,
    has_single_calls: bool = False,
) -> StreamPlan:
    """Plan attention of any length in a budget of device memory; touches no data.

    Args:
        seqlen_q: Queries.
        seqlen_kv: Keys.
        shape: Of the tensors.
        budget: Bytes that may be held on the device at once.
        is_causal: See :func:`cqs.attention`.
        pattern: Bound to these lengths, or ``None``.
        rates: Of the device.
        which: Pass.
        heads_at_once: Key heads of a group; ``None`` chooses.
        has_single_calls: Whether kernels on a GPU compute one rectangle, or causal square, at a
            time. Their results and scratch are then counted as well: an upper bound.

    Raises:
        ValueError: if not even a tile of queries and keys fits.
    """
    possible = [n for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0]
    least: StreamPlan | None = None
    best: StreamPlan | None = None
    for heads in possible if heads_at_once is None else [heads_at_once]:
        plan = StreamPlan(
            seqlen_q,
            seqlen_kv,
            shape,
            is_causal,
            pattern,
            budget,
            rates,
            which,
            heads,
            rows=_TILE,
            chunk=_TILE,
            has_single_calls=has_single_calls,
        )
        least = least or plan
        chunk = _round_up(plan.num_streamed)
        while True:
            plan = replace(plan, rows=_TILE, chunk=chunk)
            if plan.peak_bytes <= budget:
                plan = _with_most_rows(plan)
                if best is None or plan.cost < best.cost:
                    best = plan
            if chunk == _TILE:
                break
            chunk = _round_up(chunk // 2)
    if best is None:
        assert least is not None
        raise ValueError(
            f"a memory budget of {budget} bytes is too small: a tile of {_TILE} queries and keys "
            f"takes {least.peak_bytes}"
        )
    return best


def _with_most_rows(plan: StreamPlan) -> StreamPlan:
    """Return the plan with the largest blocks that fit, all about equally large."""
    few, many = 1, _round_up(plan.num_held) // _TILE
    while few < many:  # in tiles
        middle = (few + many + 1) // 2
        if replace(plan, rows=middle * _TILE).peak_bytes <= plan.budget:
            few = middle
        else:
            many = middle - 1
    number = math.ceil(plan.num_held / (few * _TILE))
    return replace(plan, rows=_round_up(math.ceil(plan.num_held / max(number, 1))))


def _round_up(tokens: int) -> int:
    """Return the tokens of whole tiles, at least one."""
    return max(-(-tokens // _TILE), 1) * _TILE


def _step(queries: range, keys: list[range], square: range | None = None) -> Step:
    pairs = len(queries) * sum(map(len, keys))
    if square is not None:
        pairs += len(queries) * (len(queries) + 1) // 2
    return Step(0, queries, tuple(each for each in keys if each), square, pairs)


def _common(tokens: range, start: int, stop: int) -> range:
    return range(max(tokens.start, start), min(tokens.stop, stop))
