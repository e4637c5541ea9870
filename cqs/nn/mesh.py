"""Device meshes with one axis for context parallelism and one for tensor parallelism."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cqs.uncompiled import uncompiled

AXES = ("sequence", "tensor")
"""Names of the axes of a mesh."""
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


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


def check_divisible(name: str, number: int, axis: DeviceMesh | None) -> None:
    """Raise ValueError unless the ranks of a mesh axis divide a number.

    Args:
        name: Name of the number in the error.
        number: The number to divide.
        axis: A mesh with one axis; ``None`` accepts any number.
    """
    if axis is None:
        return
    if axis.ndim != 1:
        raise ValueError(f"mesh must have one axis, such as mesh['tensor'], got {axis.ndim} axes")
    if number % axis.size():
        raise ValueError(
            f"{name} must be a multiple of the {axis.size()} ranks of the tensor axis, got {number}"
        )


def tensor_axis(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the tensor axis of a mesh, or ``None`` without a mesh."""
    return None if mesh is None else mesh["tensor"]


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


def uncompiled_on_mesh(forward: _Forward) -> _Forward:
    """Exclude a module's forward method from ``torch.compile`` if the module has a mesh.

    PyTorch 2.13 fails to compile the norm of a DTensor whose shape varies.
    """
    outside = uncompiled(forward)

    @wraps(forward)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward if self.mesh is None else outside)(self, *args, **kwargs)

    return choose  # type: ignore[return-value]
