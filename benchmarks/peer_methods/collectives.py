"""Collectives: those of NCCL on GPUs, and messages on CPUs.

Those of gloo took 1.3 to 1.6 times as long between hosts as messages whose receives are posted
first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name in PyTorch 2.13, or in earlier versions."""


class Messages:
    """Messages in transit, and what is done with them."""

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], object]) -> None:
        """Call ``finish`` when all messages are received."""
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Wait for the messages; may be called once."""
        for work in self._works:
            work.wait()
        self._finish()


def all_to_all(received: Tensor, packed: Tensor, group: Any) -> dist.Work | Messages:
    """Send row r of ``packed`` to rank r, and receive row r from it."""
    if packed.is_cuda:
        work: dist.Work = dist.all_to_all_single(received, packed, group=group, async_op=True)
        return work
    return _exchange(received, packed, group, lambda: None)


def reduce_scatter(total: Tensor, packed: Tensor, group: Any) -> dist.Work | Messages:
    """Sum the equal parts of ``packed`` that all ranks have of this rank's rows."""
    if packed.is_cuda:
        work: dist.Work = _reduce_scatter(total, packed, group=group, async_op=True)
        return work
    parts = packed.unflatten(0, (dist.get_world_size(group), -1))
    received = torch.empty_like(parts)
    return _exchange(received, parts, group, lambda: torch.sum(received, 0, out=total))


def exchange(
    sends: Sequence[tuple[int, Tensor]], receipts: Sequence[tuple[int, Tensor]], group: Any
) -> list[dist.Work]:
    """Send tensors to ranks of a group, and receive tensors from ranks; receives come first."""
    messages = [
        dist.P2POp(operation, tensor, group=group, group_peer=rank)
        for operation, sides in ((dist.irecv, receipts), (dist.isend, sends))
        for rank, tensor in sides
    ]
    return dist.batch_isend_irecv(messages) if messages else []


def _exchange(
    received: Tensor, packed: Tensor, group: Any, finish: Callable[[], object]
) -> Messages:
    own = dist.get_rank(group)
    received[own] = packed[own]
    sends, receipts = (
        [(rank, part) for rank, part in enumerate(parts) if rank != own]
        for parts in (packed, received)
    )
    return Messages(exchange(sends, receipts, group), finish)
