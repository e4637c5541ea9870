"""Device meshes with an axis for context and one for tensor parallelism, and rows on them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cqs.executors.distributed.agreement import Request, agree, errors_shared
from cqs.uncompiled import uncompiled

AXES = ("sequence", "tensor")
"""Names of the axes of a mesh."""


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raise ValueError for a mesh with other axes, unordered ranks, or without this process."""
    if mesh is None:
        return
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"mesh must have the axes {AXES}, got {mesh.mesh_dim_names}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"mesh must have ascending ranks, got {mesh.mesh.tolist()}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must contain this process, rank {dist.get_rank()}, got {ranks}")


def check_divisible(name: str, number: int, mesh: DeviceMesh | None) -> None:
    """Raise ValueError unless the ranks of the tensor axis divide a number.

    Args:
        name: Name of the number in the error.
        number: The number to divide.
        mesh: Device mesh with the axes ``("sequence", "tensor")``; ``None`` accepts any number.
    """
    if mesh is not None and number % (num_ranks := mesh["tensor"].size()):
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks of the tensor axis, got {number}"
        )


def broadcast_parameters(module: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Broadcast the parameters of the first rank of an axis, unless they are on ``meta``.

    Args:
        module: The module whose parameters are overwritten.
        mesh: Device mesh with the axes ``("sequence", "tensor")``.
        axis: Name of the axis.
    """
    for parameter in module.parameters():
        data = parameter.detach()
        local = data.to_local() if isinstance(data, DTensor) else data
        if not local.is_meta:
            dist.broadcast(local, group=mesh.get_group(axis), group_src=0)


def uncompiled_on_mesh(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exclude a module's forward method from ``torch.compile`` if the module has a mesh.

    PyTorch 2.13 fails to compile the norm of a DTensor whose shape varies.
    """
    outside = uncompiled(forward)

    @wraps(forward)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return (forward if self.mesh is None else outside)(self, *args, **kwargs)

    return choose


def find_tokens(shard: Tensor, mesh: DeviceMesh | None) -> range | None:
    """Return the positions of the rows of all ranks of this tensor axis.

    Every rank of the mesh calls this. The ranks exchange their numbers of rows between CPUs,
    without a synchronisation of GPUs.

    Args:
        shard: The rows of this rank, ``[batch, rows, ...]``.
        mesh: Device mesh with the axes ``("sequence", "tensor")``; ``None`` means that the shard is
            the whole sequence.

    Returns:
        The positions; ``None`` means all rows of the shard, because ``torch.compile`` does
        not support a range of unknown length.

    Raises:
        TypeError: The shard is not a plain tensor; the other ranks raise ValueError.
        ValueError: Shards differ in dtype, batch or features, are on another device type than the
            mesh, are empty, or are not divided as by ``torch.chunk`` over the tensor axis. Raised
            on every rank.
    """
    return None if mesh is None else _agree_on_tokens(shard, mesh)


@uncompiled
def _agree_on_tokens(shard: Tensor, mesh: DeviceMesh) -> range:
    """Return the positions for :func:`find_tokens`, outside of ``torch.compile``.

    ``errors_shared`` raises an error of one rank on all; ``agree`` compares their requests and
    returns the lengths of all, of which a layer has only the first.
    """
    group, tensor_group = mesh.get_group("sequence"), mesh.get_group("tensor")
    with errors_shared(group):  # ranks of other tensor axes wait for this one
        with errors_shared(tensor_group):
            _check_shard(shard, mesh)
        batch, length, *size = shard.shape
        request = Request({"call": "a layer", "dtype": shard.dtype, "batch": batch, "size": size})
        rows = agree(tensor_group, request, (length, 0, 0, 0)).seqlens_q
        chunks = torch.empty(sum(rows), device="meta").chunk(len(rows))
        if rows != tuple(map(len, chunks)) or 0 in rows:
            raise ValueError(
                "hidden must be divided over the tensor axis as by torch.chunk, with a row on "
                f"every rank, got rows {rows}"
            )
    group_rows = agree(group, request, (sum(rows), 0, 0, 0)).seqlens_q
    first = sum(group_rows[: dist.get_rank(group)])
    return range(first, first + sum(rows))


def _check_shard(shard: Tensor, mesh: DeviceMesh) -> None:
    """Raise TypeError or ValueError unless the rows are a tensor on the mesh's device."""
    if not isinstance(shard, Tensor):
        raise TypeError(f"hidden must be a tensor, got {type(shard).__name__}")
    if isinstance(shard, DTensor):
        raise TypeError("hidden must be a plain torch.Tensor, got DTensor: pass hidden.to_local()")
    if shard.device.type != mesh.device_type:
        raise ValueError(
            f"hidden must be on the {mesh.device_type} device of the mesh, got {shard.device}"
        )
    if shard.ndim < 2 or not shard.shape[0]:
        shape = tuple(shard.shape)
        raise ValueError(f"hidden must be [batch of at least 1, rows, ...], got {shape}")


def gather(shard: Tensor, tokens: range | None, mesh: DeviceMesh | None) -> Tensor:
    """All-gather the rows of the tensor axis; the backward pass reduce-scatters their gradients.

    Args:
        shard: The rows of this rank, ``[batch, rows, size]``.
        tokens: Positions of the gathered rows, from :func:`find_tokens`.
        mesh: Device mesh with the axes ``("sequence", "tensor")``; ``None`` returns the shard.

    Returns:
        ``[batch, len(tokens), size]``; with a mesh a replicated DTensor, so that the gradients of
        several layers share one reduction.
    """
    if mesh is None or tokens is None:
        return shard
    batch, _, size = shard.shape
    whole = DTensor.from_local(
        shard,
        mesh["tensor"],
        [Shard(1)],
        run_check=False,
        shape=torch.Size((batch, len(tokens), size)),
        stride=(len(tokens) * size, size, 1),
    )
    return whole.redistribute(placements=[Replicate()])
