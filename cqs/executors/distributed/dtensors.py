"""Process groups of device meshes, and DTensors that are sharded on the sequence."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_of(group: Any, query: Any) -> Any:
    """Return the process group of the argument ``group``, which may be a 1-D device mesh.

    Without one, the group is that of the mesh of ``query`` if it is a DTensor.

    Raises:
        ValueError: The mesh has several dimensions.
    """
    if group is None and hasattr(query, "placements"):
        group = query.device_mesh
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group must be a 1-D device mesh, got {group}: pass one of its dimensions, mesh[name]"
        )
    return group.get_group()


def to_local(*tensors: Tensor) -> "tuple[tuple[Tensor, ...], DeviceMesh | None]":
    """Return this rank's shards of query, key and value, and the mesh if they are DTensors.

    Raises:
        ValueError: They are DTensors on different meshes, or not sharded on the sequence alone.
    """
    if not all(hasattr(tensor, "placements") for tensor in tensors):
        return tensors, None
    from torch.distributed.tensor import Shard

    shards: Any = tensors
    mesh = shards[0].device_mesh
    for name, shard in zip(("query", "key", "value"), shards, strict=True):
        if shard.device_mesh != mesh or shard.placements != (Shard(2),):
            raise ValueError(
                f"{name} must have the mesh of query, 1-D, and the placements (Shard(2),), got "
                f"{shard.placements} on {shard.device_mesh}"
            )
    return tuple(shard.to_local(grad_placements=[Shard(2)]) for shard in shards), mesh


def to_local_copy(name: str, tensor: Any) -> Any:
    """Return this rank's copy of a DTensor that is replicated; other arguments as they are.

    The gradients of the copies are those of the ranks, which DTensor adds up.

    Raises:
        ValueError: It is not replicated on a 1-D mesh.
    """
    if not hasattr(tensor, "placements"):
        return tensor
    from torch.distributed.tensor import Partial, Replicate

    if tensor.placements != (Replicate(),):
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor with the placements (Replicate(),), got "
            f"{tensor.placements}"
        )
    return tensor.to_local(grad_placements=[Partial()])


def as_dtensor(shard: Tensor, query: Tensor, mesh: "DeviceMesh") -> Tensor:
    """Return the DTensor of a shard of the result, with the rows of ``query``.

    Args:
        shard: ``[batch, num_heads, rows]`` or ``[batch, num_heads, rows, value_dim]``.
        query: The DTensor ``query``.
        mesh: Its mesh.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*shard.shape[:2], query.shape[2], *shard.shape[3:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
