"""Sequences that live on the actors, and what their shards were made from."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cqs.executors.ray.member import Shapes
from cqs.executors.ray.shard_producer import MapShard
from cqs.scheduler.arguments import as_bool

if TYPE_CHECKING:
    from cqs.executors.ray.cluster import Cluster


@dataclass(eq=False)
class Step:
    """How the shards of a sequence are made, and who has them; outlives its :class:`Sharded`."""

    number: int
    """Greater than those of its sources."""
    name: str
    """What errors call it."""
    producer: Any
    """Pickled, or a reference to that."""
    is_collective: bool
    is_early: bool
    num_ranks: int
    sources: "tuple[Step, ...]" = ()
    stored: tuple[tuple[Any, ...], ...] = ()
    """For each rank, blobs in the object store that its shard is made from."""
    holders: list[int | None] = field(init=False)
    """For each rank, the index of the actor that was given its shard."""
    shapes: dict[int, Shapes] = field(default_factory=dict)
    """For each rank, those of the tensors that were made."""
    is_wanted: bool = False
    """Whether a :class:`Sharded` refers to it."""

    def __post_init__(self) -> None:
        self.holders = [None] * self.num_ranks


class Sharded:
    """One or several tensors cut along a dimension, a shard on each worker of a cluster.

    Made by :meth:`cqs.Cluster.shard`, :meth:`cqs.Cluster.make_sharded`,
    :meth:`cqs.Cluster.attention` and :meth:`map`. A shard that is lost with its worker is made
    again, when it is needed, in the way in which it was made: the shards of what it was computed
    from too, if they are gone.

    Its memory is freed before the next call on the cluster once nothing refers to it. Records no
    gradients.
    """

    def __init__(self, cluster: "Cluster", step: Step, forget: Callable[[Step], None]):
        """Wrap shards that have been made; ``forget`` is told when nothing refers to them."""
        self._cluster, self._step = cluster, step
        step.is_wanted = True
        weakref.finalize(self, forget, step).atexit = False

    def __repr__(self) -> str:
        return f"Sharded({self._step.name}, shapes={list(self.shapes)})"

    @property
    def cluster(self) -> "Cluster":
        """The cluster whose workers have the shards."""
        return self._cluster

    @property
    def step(self) -> Step:
        """How the shards were made."""
        return self._step

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """For each rank, the shapes of its tensors."""
        return tuple(self._step.shapes[rank] for rank in range(self._step.num_ranks))

    def wait(self) -> None:
        """Wait until the GPUs are done, as one does before looking at a clock.

        Raises:
            ValueError: if the cluster is closed.
            WorkersFailedError: as :meth:`map`.
            TaskFailedError: likewise.
        """
        self._cluster.wait_for_shards(self)

    def to_local(self, dim: int = 2) -> Tensor | tuple[Tensor, ...]:
        """Bring the shards to this process, joined along ``dim``, on the CPU.

        Returns:
            The tensor, or a tuple if the shards have several.

        Raises:
            ValueError: if the cluster is closed.
            WorkersFailedError: as :meth:`map`.
            TaskFailedError: likewise.
        """
        shards = self._cluster.fetch_shards(self)
        several = tuple(torch.cat(parts, dim=dim) for parts in zip(*shards, strict=True))
        return several if len(several) > 1 else several[0]

    def map(
        self, function: Callable[..., Any], *others: "Sharded", is_collective: bool = False
    ) -> "Sharded":
        """Apply a function to every shard, where it is.

        Args:
            function: Called without gradients on each worker with the tensors of its shard, then
                those of ``others``; returns a tensor or several. It must not write to them, and
                must give the same bits when it is called again.
            others: Of the same cluster.
            is_collective: The workers call the function together, as the ranks of the default
                process group: it may call :func:`cqs.distributed.attention`, as often as it likes,
                and collectives of ``torch.distributed``. A whole model then costs one call.

        Raises:
            TypeError: if an argument, or what the function returns, is of the wrong type.
            ValueError: if the cluster is closed or ``others`` are of another.
            WorkersFailedError: if a worker died and none could be started in its place.
            TaskFailedError: if workers die or hang whenever they try, or a collective function
                raises RuntimeError whenever it is called: that may mean that another rank failed.
            Exception: what the function raises, with a note that names the rank.
        """
        if not callable(function):
            raise TypeError(f"map takes a function, got {function!r}")
        is_collective = as_bool("is_collective", is_collective)
        return self._cluster.make_shards(MapShard(function, is_collective), (self, *others))

    def replicate(self) -> None:
        """Keep a copy in the object store of this process, from which lost shards are taken.

        They are then not computed again, and what they were computed from is let go.

        Raises:
            ValueError: if the cluster is closed.
            WorkersFailedError: as :meth:`map`.
            TaskFailedError: likewise.
        """
        self._cluster.replicate_shards(self)
