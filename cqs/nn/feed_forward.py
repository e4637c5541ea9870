"""A tensor-parallel feed-forward layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cqs.arguments import as_integer
from cqs.nn.linear import ColumnParallelLinear, RowParallelLinear
from cqs.nn.mesh import check_divisible, tensor_axis
from cqs.nn.rows import gather


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): ``down(silu(gate(hidden)) * up(hidden))``.

    The arguments are those of :class:`cqs.nn.HybridTransformerBlock`.
    """

    def __init__(
        self,
        hidden_size: int,
        feed_forward_size: int,
        *,
        mesh: DeviceMesh | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Initialise the parameters and keep this rank's shards."""
        super().__init__()
        axis = tensor_axis(mesh)
        feed_forward_size = as_integer("feed_forward_size", feed_forward_size, 1)
        check_divisible("feed_forward_size", feed_forward_size, axis)
        self.mesh = mesh
        options: dict[str, Any] = {"bias": False, "mesh": axis, "device": device, "dtype": dtype}
        self.gate, self.up = (
            ColumnParallelLinear(hidden_size, feed_forward_size, **options) for _ in range(2)
        )
        self.down = RowParallelLinear(feed_forward_size, hidden_size, scatter_dim=1, **options)

    def forward(self, hidden: Tensor, tokens: range) -> Tensor:
        """Compute the layer for the rows of this rank.

        Args:
            hidden: ``[batch, rows, hidden_size]``, the rows of this rank.
            tokens: Positions of the rows of all ranks of this tensor axis.

        Returns:
            ``[batch, rows, hidden_size]``.
        """
        rows = gather(hidden, tokens, self.mesh)
        output: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return output
