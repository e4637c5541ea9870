"""Sequences whose shards stay on the actors of a cluster."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cqs.arguments import as_bool
from cqs.executors.ray.shards.group import WorkerGroup
from cqs.executors.ray.shards.operation import Shapes, ShardOperation, ShardProducer, map_shard


class Sharded:
    """One or several tensors split along a dimension, with one shard on each worker of a cluster.

    :meth:`cqs.Cluster.shard`, :meth:`cqs.Cluster.make_sharded`, :meth:`cqs.Cluster.attention` and
    :meth:`map` return sharded sequences. If a worker fails, its shards are lost. The cluster makes
    a lost shard again when it is needed: it repeats the call that made it, and first the calls that
    made its inputs if those are lost too.

    The memory of a sequence without references is freed before the next call on the cluster.
    Sharded sequences do not record gradients.
    """

    def __init__(self, group: WorkerGroup, operation: ShardOperation):
        """Wrap the shards of an operation, which are freed when nothing refers to this object."""
        self._group, self.operation = group, operation
        group.sequences.add(self)

    def __repr__(self) -> str:
        return f"Sharded({self.operation.producer.name}, shapes={list(self.shapes)})"

    @classmethod
    def make(
        cls,
        group: WorkerGroup,
        producer: ShardProducer,
        sources: Sequence["Sharded"] = (),
        parts: Callable[[int], Sequence[tuple[Tensor, ...]]] | None = None,
    ) -> "Sharded":
        """Make a sharded sequence.

        GPUs may still compute its shards at return, but nothing that was requested earlier.

        Args:
            group: The workers of a cluster.
            producer: Makes the shard of each rank.
            sources: Sequences of this cluster whose shards are the first inputs of the producer.
            parts: Returns additional input tensors of the producer for each rank, given the number
                of ranks; ``None`` means none.

        Raises:
            TypeError: A source is not a :class:`Sharded`.
            ValueError: A source belongs to another cluster, or the cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Failures made an operation fail ``max_attempts`` times.
            Exception: The producer raised; a note on the exception names the rank.
        """
        for source in sources:
            if not isinstance(source, Sharded):
                raise TypeError(
                    f"others must be sharded sequences, got {type(source).__name__}: make one with "
                    "Cluster.shard"
                )
            if source._group is not group:
                raise ValueError(
                    f"sharded sequences must belong to this cluster, got {source!r} of another"
                )

        inputs = tuple(source.operation for source in sources)
        return group.call(lambda: cls(group, group.make(producer, inputs, parts)))

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """For each rank, the shapes of its tensors."""
        return tuple(shapes for _, shapes in sorted(self.operation.shapes.items()))

    def wait(self) -> None:
        """Wait until the GPUs have computed all shards, for example before measuring time.

        Raises:
            ValueError: The cluster is closed.
            WorkersFailedError: No replacement for a failed worker could be started.
            TaskFailedError: Workers failed ``max_attempts`` times while they restored shards.
        """
        self._group.call(self._group.finish, self.operation)

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
        shards = self._group.call(self._group.fetch, self.operation)
        several = tuple(
            torch.cat([blob.tensor() for blob in blobs], dim=dim)
            for blobs in zip(*shards, strict=True)
        )
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
        producer = ShardProducer("map", partial(map_shard, function), is_collective)
        return Sharded.make(self._group, producer, (self, *others))
