"""Packets of tensor rows that ranks exchange, and the interface of the transports."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.route import PackOffsets, Route
from cqs.executors.distributed.transport.row_copies import CopySchedule, copy_rows
from cqs.scheduler.machines import ChunkRule


@dataclass(frozen=True, eq=False)
class PacketLayout:
    """Route, heads and row shape of a packet, which all calls of a signature share."""

    route: Route
    row_shape: tuple[int, ...]
    """Shape ``(batch, heads, ...)`` of one packed row; the same on all ranks."""
    itemsize: int
    """Size of an element in bytes."""
    widths: tuple[int, ...]
    """Number of heads of each source that are sent to a rank."""
    schedule: CopySchedule = ()
    """Copies from the sources, listed twice, to the rows for other ranks and then to
    :attr:`Packet.received_by_source`. Empty if nothing is copied or the caller writes the rows."""
    _: KW_ONLY
    is_home: bool
    """Whether the rows are results, sent along the route in reverse to the token owners."""

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows that this rank sends to every rank; 0 for itself."""
        numbers = list(self.route.receives if self.is_home else self.route.lengths)
        numbers[self.route.rank] = 0
        return numbers

    @cached_property
    def num_sent(self) -> int:
        """Number of rows that this rank sends to others."""
        return sum(self.lengths)

    @cached_property
    def expected(self) -> Sequence[int]:
        """Number of rows that this rank receives from every rank, itself included."""
        return self.route.lengths if self.is_home else self.route.receives

    @cached_property
    def num_received(self) -> int:
        """Number of rows that this rank receives, from itself included."""
        return sum(self.expected)

    @cached_property
    def places(self) -> PackOffsets:
        """Row offsets of the packed rows in the send buffers of all ranks."""
        return self.route.offsets[self.is_home]

    @cached_property
    def row_bytes(self) -> int:
        """Size of one packed row in bytes."""
        return math.prod(self.row_shape) * self.itemsize

    @cached_property
    def stays_home(self) -> bool:
        """Whether these are results of which this rank neither sends nor receives any."""
        return self.is_home and self.route.stays

    def by_source(self, rows: Tensor) -> list[Tensor]:
        """Return views ``[batch, heads, rows, ...]`` of packed rows, one for each source."""
        packed = rows.movedim(0, 2)
        return [packed] if len(self.widths) == 1 else list(packed.split_with_sizes(self.widths, 1))


class Packet:
    """Rows of several tensors that follow one route and are packed into one message per rank."""

    def __init__(self, layout: PacketLayout, sources: Sequence[Tensor]) -> None:
        """Allocate the receive buffer.

        Args:
            layout: Route, heads and row shape.
            sources: Tensors ``[batch, heads, rows, ...]`` of one dtype, equal in shape except for
                the heads. If no results move, they take the place of the received ones.
        """
        self.layout, self.sources = layout, sources
        self.received_by_source = sources
        """Tensors ``[batch, heads, rows, ...]`` of the received rows, one for each source."""
        if not layout.stays_home:
            self.received = self.new_rows(layout.num_received)
            """Uninitialised, ``[rows, batch, heads, ...]``, ordered by sending rank."""
            self.received_by_source = layout.by_source(self.received)

    def new_rows(self, number: int) -> Tensor:
        """Allocate ``[number, batch, heads, ...]``, uninitialised."""
        return self.sources[0].new_empty((number, *self.layout.row_shape))

    def pack(self, packed: Tensor) -> None:
        """Copy rows for other ranks to ``packed``, and this rank's own rows to :attr:`received`."""
        if self.layout.schedule:
            targets = *self.layout.by_source(packed), *self.received_by_source
            copy_rows((*self.sources, *self.sources), targets, self.layout.schedule)


Fill = Callable[[list[Tensor]], None]
"""Writes the rows of each packet into ``[rows, batch, heads, ...]``, ordered by receiving rank."""


Wait = Callable[[timedelta | None], None]
"""Makes the current stream wait for rows; with a timeout, blocks the host instead.

A transport on CPUs blocks the host in both cases.
"""


class Transport:
    """Sends packets between the ranks of a group."""

    num_streams: int
    """Number of CUDA streams that may compute in turns without delaying communication."""
    num_turns: int
    """Maximum number of head chunks that are in transit in one direction at a time."""
    chunk_rule: ChunkRule
    """Thresholds of the number of head chunks for this transport."""
    has_buffer = False
    """Whether packed rows are in a send buffer that stays allocated between sends."""
    peak_bytes = 0
    """Peak size of the send buffer in bytes, which PyTorch's memory statistics do not include."""

    def begin(self, number: int) -> None:
        """Begin a forward or backward pass on which all ranks have agreed.

        Args:
            number: Number of the call on its group; equal on all ranks.
        """

    def end(self) -> None:
        """End the pass, also after an error. Later work on the current stream waits for its end."""

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets to the other ranks and start receiving theirs.

        Every rank of the group must call this equally often, with packets of equal row sizes. The
        host waits for the GPU only if the packets require a larger send buffer than any before.

        Args:
            packets: The packets to send in this turn.
            fill: Function that writes the rows for other ranks; called once the buffer has room.
            turn: Index of the buffer slot, from 0 to ``num_turns - 1``. Sends in one slot are
                ordered: a send waits until the previous one has been read.
            num_turns: Number of buffer slots in this pass.

        Returns:
            Functions that wait; the received rows are valid once all of them have returned.
        """
        raise NotImplementedError


class LostError(dist.DistError):
    """A rank has failed or does not answer; the group cannot be used any more."""


class Transfer:
    """Tensors that are being received while the GPU runs other work."""

    def __init__(self, tensors: list[Tensor], pending: list[Wait]) -> None:
        """Track tensors that are being received.

        Args:
            tensors: Tensors ``[batch, heads, rows, ...]`` that are valid after the transfer.
            pending: Functions that wait for their rows.
        """
        self._tensors, self._pending = tensors, pending

    def wait(self) -> list[Tensor]:
        """Wait for the transfer and return its tensors, ``[batch, heads, rows, ...]``.

        May be called once. On a GPU only the current stream waits.
        """
        for wait in self._pending:
            wait(None)
        self._pending.clear()
        tensors, self._tensors = self._tensors, []  # the caller frees the memory
        return tensors

    def settle(self, end: float) -> None:
        """Wait until the time ``end`` of ``time.monotonic()`` for tensors that will not be used."""
        with suppress(RuntimeError):  # the other ranks may have failed too
            for wait in self._pending:
                wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
