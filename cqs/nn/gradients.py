"""What is left to do for gradients after the last backward pass of a step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cqs.distributed.agreement import agree, control_group, swap
from cqs.distributed.group_calls import calls_on
from cqs.nn.mesh import AXES


@torch.no_grad()
def reduce_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of what several ranks have, over those ranks.

    Call it on every rank of the mesh, once for each optimiser step, between ``backward`` and
    ``step``. Then every gradient is that of the sum, over all ranks, of what each called
    ``backward`` on: a mean over the tokens of all ranks is the sum of theirs over the number of
    all. DTensors, as the parameters of :mod:`cqs.nn`, are summed over the sequence axis, and over
    the tensor axis if they are not cut; other parameters over both. A rank on which a parameter was
    not used, as an expert may be, counts as 0, and has a gradient afterwards if another rank has.

    Not for modules under ``torch.distributed.fsdp.fully_shard(module, mesh=mesh["sequence"])``,
    which does this itself. It takes the mean over the sequence axis unless it is told not to, by
    ``module.set_gradient_divide_factor(1.0)``.

    Args:
        module: Any, of layers of :mod:`cqs.nn` and others.
        mesh: Of the axes sequence and tensor.

    Raises:
        ValueError: on every rank, if modules differ in their number of parameters.
    """
    parameters = list(module.parameters())
    has_gradient = [parameter.grad is not None for parameter in parameters]
    for axis in AXES:
        has_gradient = _of_any(has_gradient, mesh.get_group(axis))
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


def _of_any(flags: Sequence[bool], group: Any) -> list[bool]:
    """Return which flags any rank of a group has; GPUs are not waited for."""
    calls, num_ranks = calls_on(group), dist.get_world_size(group)
    with calls.call():  # another thread's messages must not come between
        agree(group, {"call": "reduce_gradients", "parameters": len(flags)}, None)
        found = swap(control_group(group), list(map(int, flags)), [len(flags)] * num_ranks)
    calls.check()
    return [any(found[i :: len(flags)]) for i in range(len(flags))]
