"""Reduction of gradients over the ranks of a device mesh."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cqs.executors.distributed.agreement import gather
from cqs.nn.mesh import AXES


@torch.no_grad()
def reduce_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated parameters over the ranks that replicate them.

    Call this on every rank of the mesh, once per optimiser step, between ``backward`` and ``step``.
    Afterwards every gradient is that of the sum of the ranks' losses. For a mean over all tokens,
    divide each rank's summed loss by the total number of tokens.

    DTensors, such as the parameters of :mod:`cqs.nn`, are summed over the sequence axis, and over
    the tensor axis if they are replicated there. Other parameters are summed over both axes. A
    missing gradient counts as 0, for example that of an expert without tokens; the parameter has a
    gradient afterwards if it has one on any rank.

    ``torch.distributed.fsdp.fully_shard(module, mesh=mesh["sequence"])`` reduces gradients itself;
    do not call this function for such modules. FSDP takes the mean over the sequence axis unless
    ``module.set_gradient_divide_factor(1.0)`` is called.

    Args:
        module: A module of layers of :mod:`cqs.nn` and other layers.
        mesh: Device mesh with the axes ``("sequence", "tensor")``.

    Raises:
        ValueError: Modules differ in their number of parameters; raised on every rank.
    """
    parameters = list(module.parameters())
    has_gradient = [parameter.grad is not None for parameter in parameters]
    for axis in AXES:
        has_gradient = _any_rank(has_gradient, mesh.get_group(axis))
    for parameter, is_needed in zip(parameters, has_gradient, strict=True):
        if not is_needed:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor)
            gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad, gradient = gradient, gradient.to_local()
        else:
            dist.all_reduce(gradient, group=mesh.get_group("tensor"))
        dist.all_reduce(gradient, group=mesh.get_group("sequence"))


def _any_rank(flags: Sequence[bool], group: Any) -> list[bool]:
    """Return the logical or of the flags of all ranks, without a synchronisation of GPUs."""
    request = {"call": "reduce_gradients", "parameters": len(flags)}
    rank_flags = gather(group, request, list(map(int, flags)))
    return [any(parameter_flags) for parameter_flags in zip(*rank_flags, strict=True)]
