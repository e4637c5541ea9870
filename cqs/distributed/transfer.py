"""Rows of tensors on their way between ranks, and the messages that carry them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from cqs.distributed.group_calls import calls_on
from cqs.distributed.layout import PackOffsets, Route
from cqs.distributed.row_copies import CopySchedule, copy_rows
from cqs.scheduler.heads import SENT, ChunkRule

_FIRST_TAG = 1 << 30
"""Tags from here on tell messages of one call from those of another, and from the user's."""


@dataclass(frozen=True)
class Packet:
    """Rows of tensors that go the same way: together to each rank, and together from each."""

    route: Route
    sources: Sequence[Tensor]
    """``[batch, heads, rows, ...]``, equal but for the heads."""
    widths: Sequence[int]
    """Heads of each of them that travel."""
    schedule: CopySchedule
    """Between the sources, twice, and the rows for other ranks, then those that come; none if there
    are none, or they are written otherwise."""
    _: KW_ONLY
    is_home: bool
    """Whether they go back by the route."""

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows for every other rank."""
        numbers = list(self.route.receives if self.is_home else self.route.lengths)
        numbers[self.route.rank] = 0
        return numbers

    @cached_property
    def expected(self) -> Sequence[int]:
        """Number of rows from every rank, this one included."""
        return self.route.lengths if self.is_home else self.route.receives

    @cached_property
    def places(self) -> PackOffsets:
        """Where ranks have packed what they send."""
        return self.route.places_home if self.is_home else self.route.places_out

    @cached_property
    def received(self) -> Tensor:
        """``[rows, batch, heads, ...]``, rank by rank."""
        return self.new_rows(sum(self.expected))

    @cached_property
    def coming(self) -> list[Tensor]:
        """What is received for each of the sources, ``[batch, heads, rows, ...]``."""
        return self._by_source(self.received)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of all sources, the same on all ranks."""
        batch, _, _, *dim = self.sources[0].shape
        return batch, sum(self.widths), *dim

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of all sources."""
        return math.prod(self.row_shape) * self.sources[0].itemsize

    def new_rows(self, number: int) -> Tensor:
        """Make room for some rows."""
        return self.sources[0].new_empty((number, *self.row_shape))

    def pack(self, packed: Tensor) -> None:
        """Copy the rows for other ranks to ``packed``, those of this rank to where they come."""
        if self.schedule:
            targets = *self._by_source(packed), *self.coming
            copy_rows((*self.sources, *self.sources), targets, self.schedule)

    def _by_source(self, rows: Tensor) -> list[Tensor]:
        return list(rows.movedim(0, 2).split(list(self.widths), dim=1))


Fill = Callable[[list[Tensor]], None]
"""Writes the rows of each packet, rank by rank, into ``[rows, batch, heads, ...]``."""


class PendingTransfer(Protocol):
    """Something that comes."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Have what a GPU does from now on wait for it; with a time-out, wait here for so long."""


class Transport(Protocol):
    """What takes packets from rank to rank."""

    num_streams: int
    """How many streams of a GPU may compute in turns without keeping packets from travelling."""
    num_turns: int
    """How many head chunks may be under way on one way at one time."""
    chunk_rule: ChunkRule
    """See :func:`cqs.scheduler.heads.choose_num_stages`."""

    def begin(self) -> None:
        """Begin a pass, which every rank of the group does as often."""

    def end(self) -> None:
        """End the pass, also one that failed: what a GPU does from now on comes after it."""

    def send(
        self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int
    ) -> list[PendingTransfer]:
        """Send packets, and have those of other ranks come.

        A GPU is not waited for, unless they need more room than any before.

        Every rank of the group calls this as often, with packets of rows of the same sizes.

        Args:
            packets: What goes with this send.
            fill: Writes the rows for other ranks; called once there is room for them.
            turn: Of the head chunk, from 0. What is under way in one turn comes after what was sent
                there before.
            num_turns: How many there are.
        """


class MessageTransport:
    """Sends by messages of torch.distributed, one from each rank to each."""

    num_streams = 1
    num_turns = 2
    chunk_rule = SENT

    def __init__(self, group: Any) -> None:
        """Use a group for one call; a rank takes part where it sends or receives something."""
        self._group = group
        # A backward pass that comes out of order finds no rows, instead of those of another call.
        self._tag = _FIRST_TAG + calls_on(group).num_calls % _FIRST_TAG

    def begin(self) -> None:
        """Begin a pass: messages do not need that."""

    def end(self) -> None:
        """End the pass: messages do not need that."""

    def send(
        self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int
    ) -> list[PendingTransfer]:
        """Send packets; see :class:`Transport`."""
        rows_of_packets = [packet.new_rows(sum(packet.lengths)) for packet in packets]
        fill(rows_of_packets)
        messages = []
        for packet, packed in zip(packets, rows_of_packets, strict=True):
            ways: list[tuple[Any, Tensor, Sequence[int]]] = [(dist.isend, packed, packet.lengths)]
            if not packet.route.stays:
                ways.append((dist.irecv, packet.received, packet.expected))
            messages += [
                dist.P2POp(act, rows, group=self._group, tag=self._tag, group_peer=rank)
                for act, tensor, lengths in ways
                for rank, rows in enumerate(tensor.split(list(lengths)))
                if len(rows) and rank != packet.route.rank
            ]
        if not messages:
            return []
        with _clearly():
            return [_Batch(messages, dist.batch_isend_irecv(messages))]


class LostError(dist.DistError):
    """Rows of other ranks will not come, nor anything else in this group."""


class _Batch:
    """Messages that were posted together."""

    def __init__(self, messages: list[dist.P2POp], works: list[Any]) -> None:
        self._messages, self._works = messages, works

    def wait(self, timeout: timedelta | None = None) -> None:
        with _clearly():
            for work in self._works:
                work.wait(*([] if timeout is None else [timeout]))
        self._messages.clear()  # only now may the memory of what was packed be given to others


@contextmanager
def _clearly() -> Iterator[None]:
    """Say what it means where messages fail."""
    try:
        yield
    except RuntimeError as lost:
        raise LostError(
            "the rows of other ranks have not arrived: a rank has failed, or does not call this "
            f"({lost})"
        ) from lost


class Transfer:
    """Tensors under way.

    A GPU goes on meanwhile with what it has been given.
    """

    def __init__(self, coming: list[Tensor], pending: list[PendingTransfer]) -> None:
        """Wait for ``under_way`` before ``coming`` is used."""
        self._coming, self._pending = coming, pending

    def wait(self) -> list[Tensor]:
        """Return what came for each tensor, ``[batch, heads, rows, ...]``; once.

        On a GPU it is there for what is launched from now on.
        """
        for each in self._pending:
            each.wait()
        self._pending.clear()
        coming, self._coming = self._coming, []
        return coming

    def settle(self, end: float) -> None:
        """Wait, until some time of the clock, for what is under way and will not be used."""
        with suppress(RuntimeError):  # others have failed too
            for each in self._pending:
                each.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
