"""Linear layers that are cut over the ranks of a tensor-parallel axis, as in Megatron."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cqs.nn.mesh import check_divisible


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which every rank computes some of the outputs.

    ``output = input @ weight.T + bias``, weight and bias cut along ``out_features``: the first
    layer of two in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Forward nothing is communicated.
    Backward the gradient of the input is a sum over the ranks: one all-reduce; if the input is a
    DTensor, it is left to be summed where that was made, so that several layers can share it.

    Input ``[..., in_features]``, the same on every rank; output ``[..., out_features / ranks]``, a
    plain tensor, this rank's slice.

    The parameters are DTensors; this is ``torch.nn.Linear`` under
    :class:`torch.distributed.tensor.parallel.ColwiseParallel`. All ranks get what the first rank of
    the axis draws. Without a mesh it is a plain ``torch.nn.Linear`` with the same names.

    Args:
        in_features: Size of the last dimension of the input, which every rank has whole.
        out_features: That of the output of all ranks together; a multiple of their number.
        bias: Whether there is one.
        mesh: Of one axis, as ``mesh["tensor"]``.
        device: As for ``torch.nn.Linear``.
        dtype: Likewise.

    Raises:
        ValueError: if ``out_features`` is no multiple of the ranks, or the mesh has several axes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the parameters, and keep this rank's slices."""
        check_divisible("out_features", out_features, mesh)
        super().__init__(in_features, out_features, bias, device, dtype)
        if mesh is not None:
            parallelize_module(self, mesh, ColwiseParallel())


class RowParallelLinear(nn.Linear):
    """A linear layer of which every rank computes with some of the inputs.

    ``output = input @ weight.T + bias``, weight cut along ``in_features``: the second layer of two,
    whose input is the output of a :class:`ColumnParallelLinear`. The outputs are sums over the
    ranks: one all-reduce forward and nothing backward or, with ``scatter_dim``, one reduce-scatter
    and one all-gather (Korthikanti et al., arXiv 2205.05198).

    Input ``[..., in_features / ranks]``; output ``[..., out_features]``, a plain tensor.

    The parameters are DTensors, the bias replicated; this is ``torch.nn.Linear`` under
    :class:`torch.distributed.tensor.parallel.RowwiseParallel`. For the rest see
    :class:`ColumnParallelLinear`.

    Args:
        in_features: Size of the last dimension of the input of all ranks together; a multiple of
            their number.
        out_features: That of the output.
        bias: Whether there is one; added once.
        scatter_dim: The dimension along which every rank gets a part of the output, as
            ``torch.chunk`` cuts it: some ranks' may be shorter, or empty. ``None``: all get all.
        mesh: Of one axis, as ``mesh["tensor"]``.
        device: As for ``torch.nn.Linear``.
        dtype: Likewise.

    Raises:
        ValueError: if ``in_features`` is no multiple of the ranks, or the mesh has several axes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        scatter_dim: int | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the parameters, and keep this rank's slices."""
        check_divisible("in_features", in_features, mesh)
        super().__init__(in_features, out_features, bias, device, dtype)
        if mesh is not None:
            layout: Any = Replicate() if scatter_dim is None else Shard(scatter_dim)
            parallelize_module(self, mesh, RowwiseParallel(output_layouts=layout))
