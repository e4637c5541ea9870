"""The transport that sends packets as messages of torch.distributed."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.transport.transfer import (
    Fill,
    LostError,
    Packet,
    Pass,
    Transport,
    Wait,
)
from cqs.scheduler.machines import SENT, Links

_FIRST_TAG = 1 << 30
"""First message tag of this package. Every call has its own tag, apart from the user's tags."""
_NUM_TAGS = 1 << 29
"""Number of tags of rows. As many tags follow, of messages that ask for rows."""
_LATENCIES_OF_ROUND = 20
"""Rows are sent in rounds if a round is expected to take so many times the latency of the links."""
_ROUNDS_AT_ONCE = 2
"""Rounds in progress: with one, ranks wait for those whose rounds take longer."""


class MessageTransport(Transport):
    """Sends packets as messages of torch.distributed, one for each packet and pair of ranks.

    On CPUs of several hosts long packets are sent in rounds, as by MPI's pairwise exchange (Thakur
    et al., 2005, doi 10.1177/1094342005051521): a rank sends to one or two ranks at a time, which
    have asked for it. With all messages at once TCP uses the links less well. NCCL makes such
    rounds itself.
    """

    num_streams = 1
    num_turns = 2
    chunk_rule = SENT

    def __init__(self, group: Any, links: Links | None = None) -> None:
        """Use a process group; ranks without rows post no messages.

        Args:
            group: The process group.
            links: Links between the hosts of a group on CPUs, the same on all ranks; ``None`` if
                nothing is sent in rounds.
        """
        # Its user decides how long a group lives, not the calls that are prepared for it.
        self._group = weakref.ref(group)
        self._links = links
        self._pass = Pass()
        self._last: Future[None] | None = None
        """The last transfer in rounds: the next begins when it has ended."""

    def begin(self, of_pass: Pass) -> None:
        """Begin a pass, whose messages carry the tag of its call."""
        self._pass = of_pass

    def end(self) -> None:
        """End the pass."""
        self._pass = Pass()  # its functions refer to the group

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets as described in :meth:`Transport.send`.

        Raises:
            LostError: A message could not be sent because a rank has failed.
        """
        # New buffers for every send: gloo and NCCL read them until the messages complete, and the
        # allocator returns their memory afterwards.
        rows_of_packets = [packet.new_rows(packet.layout.num_sent) for packet in packets]
        fill(rows_of_packets)
        if self._pass.confirm is not None:
            self._pass.confirm()
        group, tag = self._group(), _FIRST_TAG + self._pass.number % _NUM_TAGS
        outgoing, incoming = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for packet, packed in zip(packets, rows_of_packets, strict=True):
            layout = packet.layout
            sides: list[tuple[dict[int, list[Tensor]], Tensor, Sequence[int]]]
            sides = [(outgoing, packed, layout.lengths)]
            if not layout.route.stays:
                sides.append((incoming, packet.received, layout.expected))
            for found, tensor, lengths in sides:
                for rank, rows in enumerate(tensor.split_with_sizes(lengths)):
                    if lengths[rank] and rank != layout.route.rank:
                        found.setdefault(rank, []).append(rows)
        if self._are_long(packets):
            done = self._last = _start_rounds(group, tag, outgoing, incoming, self._last)
            return [partial(_wait_for_rounds, done)]
        messages = [
            dist.P2POp(operation, rows, group=group, tag=tag, group_peer=rank)
            for operation, found in ((dist.isend, outgoing), (dist.irecv, incoming))
            for rank, tensors in found.items()
            for rows in tensors
        ]
        if not messages:
            return []
        # One batch: messages posted one by one can wait for each other in a cycle of ranks.
        with _raising_lost_error():
            works = dist.batch_isend_irecv(messages)

        def wait(timeout: timedelta | None) -> None:
            of_works = [[each] for each in messages] if len(works) == len(messages) else [messages]
            with _raising_lost_error():
                for work, waited_for in zip(works, of_works, strict=True):
                    _wait_for(work, waited_for, timeout)
            messages.clear()  # releases the packed rows, which the messages read until now

        return [wait]

    def _are_long(self, packets: Sequence[Packet]) -> bool:
        """Return whether packets are sent in rounds; the same on all ranks."""
        if self._links is None:
            return False
        layouts = [packet.layout for packet in packets]
        most = sum(layout.places.most * layout.row_bytes for layout in layouts)
        num_rounds = len(layouts[0].lengths) - 1
        least = _LATENCIES_OF_ROUND * num_rounds * self._links.latency
        return most / self._links.bandwidth >= least


def _start_rounds(
    group: Any,
    tag: int,
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    previous: "Future[None] | None",
) -> "Future[None]":
    """Start a thread that sends and receives rows in rounds, after a previous one has ended."""
    done = Future[None]()

    def pass_rows() -> None:
        try:
            if previous is not None:
                previous.exception()
            _pass_in_rounds(group, tag, outgoing, incoming)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon: a process that ends does not wait for ranks that have failed.
    threading.Thread(target=pass_rows, daemon=True).start()
    return done


def _pass_in_rounds(
    group: Any,
    tag: int,
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
) -> None:
    """Send rows to the rank at each distance in turn, when it asks for them, and receive so."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    asking = torch.zeros(1, dtype=torch.uint8)

    def post(
        operation: Any, tensors: Sequence[Tensor], peer: int, tag: int = tag
    ) -> list[Callable[[], None]]:
        messages = [dist.P2POp(operation, each, None, group, tag, peer) for each in tensors]
        works = dist.batch_isend_irecv(messages) if messages else []
        return [partial(_wait_for, work, messages[:1], None) for work in works]

    sent, receiving = list[Callable[[], None]](), deque[list[Callable[[], None]]]()
    for distance in range(1, num_ranks):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        received = post(dist.irecv, incoming.get(source, ()), source)
        if received:
            sent += post(dist.isend, [asking], source, tag + _NUM_TAGS)
        if to in outgoing:
            for wait in post(dist.irecv, [asking.clone()], to, tag + _NUM_TAGS):
                wait()
            sent += post(dist.isend, outgoing[to], to)
        receiving.append(received)
        if len(receiving) >= _ROUNDS_AT_ONCE:
            for wait in receiving.popleft():
                wait()
    for wait in chain(*receiving, sent):
        wait()


def _wait_for(work: dist.Work, messages: Sequence[dist.P2POp], timeout: timedelta | None) -> None:
    """Wait for a message, or for several; if it is one, an error names the other rank."""
    try:
        work.wait(*([] if timeout is None else [timeout]))
    except RuntimeError as error:
        if len(messages) != 1:
            raise
        raise RuntimeError(f"rank {messages[0].group_peer}: {error}") from error


def _wait_for_rounds(done: "Future[None]", timeout: timedelta | None) -> None:
    with _raising_lost_error():
        try:
            done.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("rows were not received in time") from None


@contextmanager
def _raising_lost_error() -> Iterator[None]:
    """Raise a RuntimeError of torch.distributed as LostError."""
    try:
        yield
    except RuntimeError as lost:
        raise LostError(
            "rows of other ranks were not received: a rank has failed or did not make this call; "
            f"restart all ranks of the group ({lost})"
        ) from lost
