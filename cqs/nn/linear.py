"""Tensor-parallel linear layers, as in Megatron-LM."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cqs.nn.mesh import check_divisible


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are divided among the ranks of a mesh axis.

    Every rank computes some columns of ``output = input @ weight.T + bias``. This is the first of
    two layers in Megatron-LM (Shoeybi et al., arXiv 1909.08053). The forward pass requires no
    communication. The gradient of the input is summed by one all-reduce in the backward pass. If
    the input is a DTensor, the gradient stays partial, so that several layers share one reduction.

    The input has shape ``[..., in_features]`` and is equal on every rank. The output has shape
    ``[..., out_features / ranks]`` and is a plain tensor, this rank's columns.

    The parameters are DTensors: the layer is ``torch.nn.Linear`` under
    :class:`torch.distributed.tensor.parallel.ColwiseParallel`. All ranks receive the initial values
    of the first rank. Without a mesh the layer is a plain ``torch.nn.Linear`` with the same names.

    Args:
        in_features: Features of the input.
        out_features: Features of the output over all ranks; a multiple of the number of ranks.
        bias: Whether the layer adds a bias.
        mesh: Device mesh with one axis, such as ``mesh["tensor"]``; ``None`` means this device
            alone.
        device: Device of the parameters: ``None``, the device type of the mesh, or ``"meta"``.
        dtype: Dtype of the parameters; ``None`` means PyTorch's default.

    Raises:
        ValueError: The number of ranks does not divide ``out_features``, or the mesh has several
            axes.
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
    """A linear layer whose input features are divided among the ranks of a mesh axis.

    Every rank multiplies its input features; ``output = input @ weight.T + bias`` is the sum over
    the ranks. This is the second of two layers: its input is the output of a
    :class:`ColumnParallelLinear`. The sum takes one all-reduce in the forward pass. With
    ``scatter_dim`` it takes one reduce-scatter forward and one all-gather backward (Korthikanti et
    al., arXiv 2205.05198).

    The input has shape ``[..., in_features / ranks]``, the output ``[..., out_features]``; it is a
    plain tensor.

    The parameters are DTensors, the bias is replicated: the layer is ``torch.nn.Linear`` under
    :class:`torch.distributed.tensor.parallel.RowwiseParallel`. All ranks receive the initial values
    of the first rank. Without a mesh the layer is a plain ``torch.nn.Linear`` with the same names.

    Args:
        in_features: Features of the input over all ranks; a multiple of the number of ranks.
        out_features: Features of the output.
        bias: Whether the layer adds a bias, once.
        scatter_dim: Dimension of the output that is divided among the ranks as by ``torch.chunk``;
            some parts may be shorter or empty. ``None`` returns the whole output on every rank.
        mesh: Device mesh with one axis, such as ``mesh["tensor"]``; ``None`` means this device
            alone.
        device: Device of the parameters: ``None``, the device type of the mesh, or ``"meta"``.
        dtype: Dtype of the parameters; ``None`` means PyTorch's default.

    Raises:
        ValueError: The number of ranks does not divide ``in_features``, or the mesh has several
            axes.
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
