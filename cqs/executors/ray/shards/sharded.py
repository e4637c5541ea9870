"""Sequences whose shards stay on the actors of a cluster."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cqs.arguments import as_bool
from cqs.executors.ray.shards.actor import Shapes
from cqs.executors.ray.shards.producer import MapShard

if TYPE_CHECKING:
    from cqs.executors.ray.cluster import Cluster


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


class Sharded:
    """One or several tensors split along a dimension, with one shard on each worker of a cluster.

    :meth:`cqs.Cluster.shard`, :meth:`cqs.Cluster.make_sharded`, :meth:`cqs.Cluster.attention` and
    :meth:`map` return sharded sequences. If a worker fails, its shards are lost. The cluster makes
    a lost shard again when it is needed: it repeats the call that made it, and first the calls that
    made its inputs if those are lost too.

    The memory of a sequence without references is freed before the next call on the cluster.
    Sharded sequences do not record gradients.
    """

    def __init__(
        self,
        cluster: "Cluster",
        operation: ShardOperation,
        forget: Callable[[ShardOperation], None],
    ):
        """Wrap the shards of an operation; call ``forget`` when nothing refers to this object."""
        self._cluster, self._operation = cluster, operation
        operation.is_wanted = True
        weakref.finalize(self, forget, operation).atexit = False

    def __repr__(self) -> str:
        return f"Sharded({self._operation.name}, shapes={list(self.shapes)})"

    @property
    def cluster(self) -> "Cluster":
        """The cluster whose workers hold the shards."""
        return self._cluster

    @property
    def operation(self) -> ShardOperation:
        """The operation that made the shards."""
        return self._operation

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """For each rank, the shapes of its tensors."""
        return tuple(self._operation.shapes[rank] for rank in range(self._operation.num_ranks))

    def wait(self) -> None:
        """Wait until the GPUs have computed all shards, for example before measuring time.

        Raises:
            ValueError: The cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they restored shards.
        """
        self._cluster.wait_for_shards(self)

    def to_local(self, dim: int = 2) -> Tensor | tuple[Tensor, ...]:
        """Copy the shards to this process and concatenate them on the CPU.

        Args:
            dim: Dimension along which the shards are concatenated, usually that of the tokens.

        Returns:
            A CPU tensor, or a tuple of CPU tensors if each shard has several.

        Raises:
            ValueError: The cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they restored shards.
        """
        shards = self._cluster.fetch_shards(self)
        several = tuple(torch.cat(parts, dim=dim) for parts in zip(*shards, strict=True))
        return several if len(several) > 1 else several[0]

    def map(
        self, function: Callable[..., Any], *others: "Sharded", is_collective: bool = False
    ) -> "Sharded":
        """Apply a function to every shard on its worker.

        Args:
            function: Called without gradients on each worker with the tensors of its shard, then
                those of ``others``; returns one tensor or several. It must not write to its inputs,
                and a repeated call must return bitwise identical tensors.
            others: Sharded sequences of the same cluster.
            is_collective: All workers call the function together, as ranks of the default process
                group. The function may then call :func:`cqs.distributed.attention` and collectives
                of ``torch.distributed``, any number of times; a whole model is one call.

        Returns:
            The sharded sequence of the function's results.

        Raises:
            TypeError: An argument has the wrong type, or the function does not return tensors.
            ValueError: The cluster is closed, ``others`` belong to another cluster, or shards have
                different numbers of tensors.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed or hung ``max_attempts`` times. Also if a collective
                function raises RuntimeError each time, which may mean that another rank failed.
            Exception: The function raised; a note on the exception names the rank.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        is_collective = as_bool("is_collective", is_collective)
        return self._cluster.make_shards(MapShard(function, is_collective), (self, *others))

    def replicate(self) -> None:
        """Copy the shards to the object store, from which lost shards are then restored.

        Lost shards are not computed again. The sequences from which they were computed are
        released, unless other sequences need them.

        Raises:
            ValueError: The cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they restored shards.
        """
        self._cluster.replicate_shards(self)
