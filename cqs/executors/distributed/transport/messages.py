"""The transport that sends packets as messages of torch.distributed."""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.transport.transfer import (
    Fill,
    LostError,
    Packet,
    Transport,
    Wait,
)
from cqs.scheduler.machines import SENT

_FIRST_TAG = 1 << 30
"""First message tag of this package. Every call has its own tag, apart from the user's tags."""
_NUM_TAGS = 1 << 30
"""Number of tags; later calls take them again."""


class MessageTransport(Transport):
    """Sends packets as messages of torch.distributed, one for each packet and pair of ranks."""

    num_streams = 1
    num_turns = 2
    chunk_rule = SENT

    def __init__(self, group: Any) -> None:
        """Use a process group; ranks without rows post no messages."""
        # Its user decides how long a group lives, not the calls that are prepared for it.
        self._group = weakref.ref(group)
        self._number = 0

    def begin(self, number: int) -> None:
        """Begin a pass, whose messages carry the tag of its call."""
        self._number = number

    def send(self, packets: Sequence[Packet], fill: Fill, turn: int, num_turns: int) -> list[Wait]:
        """Send packets as described in :meth:`Transport.send`.

        Raises:
            LostError: A message could not be sent because a rank has failed.
        """
        # New buffers for every send: gloo and NCCL read them until the messages complete, and the
        # allocator returns their memory afterwards.
        rows_of_packets = [packet.new_rows(packet.layout.num_sent) for packet in packets]
        fill(rows_of_packets)
        group, tag = self._group(), _FIRST_TAG + self._number % _NUM_TAGS
        outgoing, incoming = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for packet, packed in zip(packets, rows_of_packets, strict=True):
            layout = packet.layout
            sides: list[tuple[dict[int, list[Tensor]], Tensor, Sequence[int]]]
            sides = [(outgoing, packed, layout.lengths)]
            if not layout.route.stays:
                sides.append((incoming, packet.received, layout.expected))
            for rows_by_rank, tensor, lengths in sides:
                own, parts = layout.route.rank, tensor.split_with_sizes(lengths)
                # A rank sends to the next one first: at the same time no two send to one rank.
                for rank in (*range(own + 1, len(parts)), *range(own)):
                    if lengths[rank]:
                        rows_by_rank.setdefault(rank, []).append(parts[rank])
        # Receives first: gloo tells a sender on their one connection that it may send, which would
        # wait behind rows that are sent the other way.
        messages = [
            dist.P2POp(operation, rows, group=group, tag=tag, group_peer=rank)
            for operation, rows_by_rank in ((dist.irecv, incoming), (dist.isend, outgoing))
            for rank, tensors in rows_by_rank.items()
            for rows in tensors
        ]
        if not messages:
            return []
        # One batch: messages posted one by one can wait for each other in a cycle of ranks.
        try:
            works = dist.batch_isend_irecv(messages)
        except RuntimeError as error:
            raise _lost(error) from error

        def wait(timeout: timedelta | None) -> None:
            limit = [] if timeout is None else [timeout]
            for i, work in enumerate(works):
                try:
                    work.wait(*limit)
                except RuntimeError as error:  # a work may stand for all messages
                    is_one = len(works) == len(messages)
                    raise _lost(error, messages[i].group_peer if is_one else None) from error
            messages.clear()  # releases the packed rows, which the messages read until now

        return [wait]


def _lost(error: RuntimeError, rank: int | None = None) -> LostError:
    """Return the error for one of torch.distributed, about a message of a rank if it is known."""
    reason = error if rank is None else f"rank {rank}: {error}"
    return LostError(
        "rows of other ranks were not received: a rank has failed or did not make this call; "
        f"restart all ranks of the group ({reason})"
    )
