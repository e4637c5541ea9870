"""The devices of a layer: one mesh with an axis for the sequence and one for tensor parallelism."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cqs.uncompiled import uncompiled

AXES = ("sequence", "tensor")
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Refuse a mesh of other axes, out of order, or without this process.

    Raises:
        ValueError: which says what is wrong.
    """
    if mesh is None:
        return
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"the mesh must have the axes {AXES}, got {mesh.mesh_dim_names}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks of the mesh must ascend, got {mesh.mesh.tolist()}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()}, this process, is not in the mesh of {ranks}")


def check_divisible(name: str, number: int, axis: DeviceMesh | None) -> None:
    """Refuse a number that cannot be cut for the ranks of a mesh of one axis.

    Raises:
        ValueError: which names both numbers.
    """
    if axis is None:
        return
    if axis.ndim != 1:
        raise ValueError(f"a layer is cut over one axis of a mesh, got {axis.mesh_dim_names}")
    if number % axis.size():
        raise ValueError(
            f"{name} must be a multiple of the {axis.size()} ranks of the tensor axis, got {number}"
        )


def tensor_axis(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return what linear layers are cut over."""
    return None if mesh is None else mesh["tensor"]


def broadcast_parameters(module: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Give all ranks of an axis the parameters of its first, unless they are on ``meta``."""
    for parameter in module.parameters():
        data = parameter.detach()
        local = data.to_local() if isinstance(data, DTensor) else data
        if not local.is_meta:
            dist.broadcast(local, group=mesh.get_group(axis), group_src=0)


def uncompiled_on_mesh(forward: _Forward) -> _Forward:
    """Have ``torch.compile`` leave a module as it is if it has a mesh.

    PyTorch 2.13 fails to compile the norm of a DTensor whose shape varies.
    """
    outside = uncompiled(forward)

    @wraps(forward)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward if self.mesh is None else outside)(self, *args, **kwargs)

    return choose  # type: ignore[return-value]
