"""The definition of a sharded sequence, from which lost shards are made again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.attention import attention
from cqs.executors.ray.pool import Actor

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a shard."""
Address = str | tuple[str, int]
"""Path of a file store, or host and port of a TCP store."""
Split = Callable[[int], Sequence[tuple[Tensor, ...]]]
"""Returns tensors of each rank, given the number of ranks."""


@dataclass(frozen=True)
class ShardProducer:
    """Makes the shard of one rank.

    A cluster calls the producer again if a shard is lost. The second shard must be bitwise
    identical to the first.
    """

    name: str
    """Name of the producer in error messages."""
    function: Callable[..., Any]
    """Returns one tensor, or a tuple or list of tensors.

    Its arguments are the rank, the number of ranks, the tensors of the source shards, and the
    tensors from the object store. All tensors are on the device of the actor.
    """
    is_collective: bool = False
    """Whether all ranks must call the function together."""
    is_early: bool = False
    """Whether a call may begin before other ranks have finished the previous exchange.

    If a rank fails in that time, the input tensors may be invalid; the cluster then discards the
    output and calls the function again.
    """


@dataclass(eq=False)
class ShardOperation:
    """The definition of a sharded sequence, and the actors that hold its shards.

    An operation outlives its :class:`Sharded` while others need it to restore lost shards.
    """

    number: int
    """Sequence number of the operation, greater than those of its sources."""
    producer: ShardProducer
    """Makes the shards."""
    pickled: bytes
    """The pickled producer."""
    sources: "tuple[ShardOperation, ...]"
    """Operations whose shards are inputs of the producer."""
    stored: list[tuple[Any, ...]]
    """For each rank, references to input tensors in the object store."""
    holders: dict[int, Actor] = field(default_factory=dict)
    """For each rank with a shard, the actor that received it."""
    shapes: dict[int, Shapes] = field(default_factory=dict)
    """For each rank, the shapes of the tensors of its shard."""

    def add_shapes(self, made: dict[int, Shapes]) -> None:
        """Store the shapes of shards, by ascending rank.

        Raises:
            ValueError: Ranks differ in the number of tensors, or a repeated shard in its shapes.
        """
        name = self.producer.name
        for rank, shapes in made.items():
            if shapes != self.shapes.setdefault(rank, shapes):
                raise ValueError(
                    f"{name} must repeat the shapes of rank {rank}'s shard, {self.shapes[rank]}, "
                    f"got {shapes} when it made the lost shard again"
                )
            if (number := len(shapes)) != len(self.shapes[0]):
                raise ValueError(
                    f"{name} must make the same number of tensors on every rank, "
                    f"got {number} on rank {rank} and {len(self.shapes[0])} on rank 0"
                )


def load_shard(rank: int, num_ranks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that the driver put into the object store."""
    return tensors


def map_shard(function: Callable[..., Any], rank: int, num_ranks: int, *tensors: Tensor) -> Any:
    """Return the result of a user function of the tensors of a shard."""
    return function(*tensors)


def attend_shards(
    options: dict[str, Any],
    autocasts: dict[str, torch.dtype],
    rank: int,
    num_ranks: int,
    *tensors: Tensor,
) -> Any:
    """Compute attention with all other ranks by :func:`cqs.distributed.attention`.

    Args:
        options: Arguments of the function.
        autocasts: Dtypes of ``torch.autocast`` on the driver, by device.
        rank: Rank of this worker.
        num_ranks: Number of workers.
        tensors: Query, key and value of this rank, and rows of a bias.
    """
    query, key, value, *bias = tensors
    if (scores := options.get("scores")) is not None:
        sinks, slopes = (
            None if tensor is None else tensor.to(query.device)
            for tensor in (scores.sinks, scores.alibi_slopes)
        )
        scores = replace(scores, sinks=sinks, alibi_slopes=slopes, bias=bias[0] if bias else None)
        options = options | {"scores": scores}
    device = query.device.type
    with torch.autocast(device, autocasts.get(device), enabled=device in autocasts):
        return attention(query, key, value, group=dist.group.WORLD, **options)
