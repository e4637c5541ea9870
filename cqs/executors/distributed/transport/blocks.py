"""Exchange of blocks of tensors between ranks, by a collective of torch.distributed."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.transport.exchange import lost

BlocksOfRanks = Sequence[Sequence[Tensor]]
"""Tensors that are sent to each rank, or received from it."""


def swap_blocks(group: Any, sent: BlocksOfRanks, received: BlocksOfRanks, like: Tensor) -> None:
    """Send blocks to every rank, and copy those of every rank to their places.

    Args:
        group: The process group, all of whose ranks call this.
        sent: The blocks, of one dtype on all ranks.
        received: The places, in the order in which the blocks are sent.
        like: A tensor of this dtype, on the device of the blocks.

    Raises:
        LostError: Another rank has failed or does not answer.
    """
    blocks, places = list(chain(*sent)), list(chain(*received))
    nothing = like.new_empty(0)
    into_bytes = [sum(block.nbytes for block in tensors) for tensors in received]
    out_bytes = [sum(block.nbytes for block in tensors) for tensors in sent]
    packed = torch.cat([nothing, *(block.reshape(-1) for block in blocks)])
    incoming = nothing.new_empty(sum(place.numel() for place in places))
    # In bytes, because gloo has no bfloat16.
    into, out = (flat.view(torch.uint8) for flat in (incoming, packed))
    try:
        dist.all_to_all_single(into, out, into_bytes, out_bytes, group=group)
    except RuntimeError as error:
        raise lost(error) from error
    for place, block in zip(places, incoming.split([p.numel() for p in places]), strict=True):
        place.copy_(block.view(place.shape))
