"""The definition of a sharded sequence, from which lost shards are made again."""

from dataclasses import dataclass, field
from typing import Any

from cqs.executors.ray.shards.actor import Shapes


@dataclass(eq=False)
class ShardOperation:
    """The definition of a sharded sequence, and the actors that hold its shards.

    An operation outlives its :class:`Sharded` while others need it to restore lost shards.
    """

    number: int
    """Sequence number of the operation, greater than those of its sources."""
    name: str
    """Name of the operation in error messages."""
    producer: Any
    """The pickled producer, or a Ray reference to it."""
    is_collective: bool
    """Whether all ranks must call the producer together."""
    is_early: bool
    """Whether a call may begin before other ranks have finished the previous exchange."""
    num_ranks: int
    """Number of shards."""
    sources: "tuple[ShardOperation, ...]" = ()
    """Operations whose shards are inputs of the producer."""
    stored: tuple[tuple[Any, ...], ...] = ()
    """For each rank, references to input tensors in the object store."""
    holders: list[int | None] = field(init=False)
    """For each rank, the index of the actor that received its shard; None without a shard."""
    shapes: dict[int, Shapes] = field(default_factory=dict)
    """For each rank, the shapes of the tensors of its shard."""
    is_wanted: bool = False
    """Whether a :class:`Sharded` refers to the operation."""

    def __post_init__(self) -> None:
        self.holders = [None] * self.num_ranks
