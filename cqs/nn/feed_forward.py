"""A feed-forward layer that is cut over the tensor axis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cqs.nn.linear import ColumnParallelLinear, RowParallelLinear
from cqs.nn.mesh import check_divisible, tensor_axis
from cqs.nn.rows import gather
from cqs.scheduler.arguments import as_integer


class FeedForward(nn.Module):
    """``down(silu(gate(hidden)) * up(hidden))``: SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        feed_forward_size: int,
        *,
        mesh: DeviceMesh | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Draw the parameters."""
        super().__init__()
        axis = tensor_axis(mesh)
        feed_forward_size = as_integer("feed_forward_size", feed_forward_size, 1)
        check_divisible("feed_forward_size", feed_forward_size, axis)
        self.mesh = mesh
        self.gate, self.up = (
            ColumnParallelLinear(
                hidden_size, feed_forward_size, bias=False, mesh=axis, device=device, dtype=dtype
            )
            for _ in range(2)
        )
        self.down = RowParallelLinear(
            feed_forward_size,
            hidden_size,
            bias=False,
            scatter_dim=1,
            mesh=axis,
            device=device,
            dtype=dtype,
        )

    def forward(self, hidden: Tensor, tokens: range) -> Tensor:
        """Return the rows of this rank; see :meth:`cqs.nn.HybridTransformerBlock.forward`."""
        rows = gather(hidden, tokens, self.mesh)
        output: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return output
