"""Functions that make the shards of a sharded sequence on the actors of a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.attention import attention


class ShardProducer(ABC):
    """Makes the shard of one rank.

    A cluster calls the producer again if a shard is lost. The second shard must be bitwise
    identical to the first.
    """

    name: str
    """Name of the producer in error messages."""
    is_collective: bool = False
    """Whether all ranks must call the producer together."""
    is_early: bool = False
    """Whether a call may begin before other ranks have finished the previous exchange.

    If a rank fails in that time, the input tensors may be invalid; the cluster then discards the
    output and calls the producer again.
    """

    @abstractmethod
    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return one tensor, or a tuple or list of tensors.

        Args:
            rank: Rank that calls the producer, from 0.
            num_ranks: Number of shards of the sequence.
            *tensors: Tensors of the source shards, then tensors from the object store, all on the
                device of the actor.
        """


@dataclass(frozen=True)
class LoadShard(ShardProducer):
    """Returns the tensors that the driver put into the object store."""

    name = "shard"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors unchanged."""
        return tensors


@dataclass(frozen=True)
class MakeShard(ShardProducer):
    """Calls a user function of ``(rank, num_ranks)``."""

    function: Callable[[int, int], Any]
    name = "make_sharded"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return the result of ``function(rank, num_ranks)``."""
        return self.function(rank, num_ranks)


@dataclass(frozen=True)
class MapShard(ShardProducer):
    """Calls a user function of the tensors of a shard."""

    function: Callable[..., Any]
    is_collective: bool
    name = "map"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return the result of ``function(*tensors)``."""
        return self.function(*tensors)


@dataclass(frozen=True)
class AttendShards(ShardProducer):
    """Computes attention with all other ranks by :func:`cqs.distributed.attention`."""

    options: dict[str, Any]
    is_collective = True
    name = "attention"

    @property
    def is_early(self) -> bool:  # type: ignore[override]
        """Whether the result is used without being compared with that of valid inputs."""
        return not self.options["verify"]

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return the output, or ``(output, lse)`` if ``options["return_lse"]`` is true."""
        query, key, value = tensors
        return attention(query, key, value, group=dist.group.WORLD, **self.options)
