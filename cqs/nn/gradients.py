"""What is left to do for gradients after the last backward pass of a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def reduce_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of what several ranks have, over those ranks.

    Call it on every rank of the mesh, once for each optimiser step, between ``backward`` and
    ``step``. Then every gradient is that of the sum, over all ranks, of what each called
    ``backward`` on: a mean over the tokens of all ranks is the sum of theirs over the number of
    all. DTensors, as the parameters of :mod:`cqs.nn`, are summed over the sequence axis, and over
    the tensor axis if they are not cut; other parameters over both.

    Not for modules under ``torch.distributed.fsdp.fully_shard(module, mesh=mesh["sequence"])``,
    which does this itself. It takes the mean over the sequence axis unless it is told not to, by
    ``module.set_gradient_divide_factor(1.0)``.

    Args:
        module: Any, of layers of :mod:`cqs.nn` and others.
        mesh: Of the axes sequence and tensor.
    """
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor)
            gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad, gradient = gradient, gradient.to_local()
        else:
            dist.all_reduce(gradient, group=mesh.get_group("tensor"))
        dist.all_reduce(gradient, group=mesh.get_group("sequence"))
