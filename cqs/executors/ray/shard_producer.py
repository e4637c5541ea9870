"""How the shards of a sequence are made, told to the actors that make them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from cqs.distributed import attention


class ShardProducer(Protocol):
    """Makes a shard on a rank; called again for a shard that was lost, to give the same bits."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must call it together."""

    @property
    def is_early(self) -> bool:
        """Whether it may begin when other ranks are not yet done with what was made before.

        Its tensors are garbage if they die meanwhile: then what it does does not count.
        """

    @property
    def name(self) -> str:
        """What errors call it."""

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return one tensor or several, from those that were put or those of other shards."""


@dataclass(frozen=True)
class LoadShard:
    """Takes what the driver put into the object store."""

    is_collective = is_early = False
    name = "shard"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        return tensors


@dataclass(frozen=True)
class MakeShard:
    """Calls a function of the user, which makes the shard of a rank."""

    function: Callable[[int, int], Any]
    is_collective = is_early = False
    name = "make_sharded"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(rank, num_ranks)


@dataclass(frozen=True)
class MapShard:
    """Calls a function of the user with the tensors of a shard."""

    function: Callable[..., Any]
    is_collective: bool
    is_early = False
    name = "map"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(*tensors)


@dataclass(frozen=True)
class AttendShards:
    """Computes attention with all other ranks."""

    options: dict[str, Any]
    is_collective = is_early = True
    name = "attention"

    def __call__(self, rank: int, num_ranks: int, *tensors: Tensor) -> Any:
        """Return the output, and the lse if the options ask for it."""
        query, key, value = tensors
        return attention(query, key, value, group=dist.group.WORLD, **self.options)
