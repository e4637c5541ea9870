"""A transformer block with context and tensor parallelism over two axes of a device mesh."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, parallel

from cqs.arguments import as_integer
from cqs.nn.attention import SelfAttention
from cqs.nn.mesh import (
    broadcast_parameters,
    check_divisible,
    check_mesh,
    find_tokens,
    gather,
    uncompiled_on_mesh,
)
from cqs.patterns import Pattern


class HybridTransformerBlock(nn.Module):
    """A Llama block with context parallelism by quorums and tensor parallelism.

    The block computes ``hidden + attention(norm(hidden))``, then
    ``hidden + feed_forward(norm(hidden))``. It uses RMSNorm, grouped-query attention with rotary
    embeddings and SwiGLU, without biases.

    The sequence is divided among all ranks of the mesh, in order: every rank has a contiguous
    shard. The ranks of a tensor axis gather their rows before attention and before the feed-forward
    layer, and each computes its own heads and features. This is Megatron's sequence parallelism
    (Korthikanti et al., arXiv 2205.05198), with four collectives forward and four backward within
    the tensor axis. :func:`cqs.distributed.attention` computes attention over the sequence axis.
    With a tensor axis of size 1 this is context parallelism alone; with a sequence axis of size 1
    it is tensor parallelism alone.

    Parameters are DTensors over the tensor axis and are replicated over the sequence axis. After
    ``backward`` call :func:`cqs.nn.reduce_gradients`, or wrap the model with
    ``torch.distributed.fsdp.fully_shard(model, mesh=mesh["sequence"])``. All ranks receive the
    initial values of the first rank, so one random seed gives the same parameters for any mesh.

    State dicts have the same names for any mesh and without one. For full state dicts use
    ``get_model_state_dict`` and ``set_model_state_dict`` of
    ``torch.distributed.checkpoint.state_dict`` with ``StateDictOptions(full_state_dict=True)``.
    ``torch.distributed.checkpoint`` saves sharded ones and loads them for another mesh.

    Args:
        hidden_size: Features of a token; an even multiple of ``num_heads``.
        num_heads: Number of query heads.
        feed_forward_size: Hidden features of the feed-forward layer.
        num_kv_heads: Number of KV heads, a divisor of ``num_heads``; ``None`` means ``num_heads``.
        is_causal: Whether token i attends only to tokens up to i.
        pattern: Query-key pairs that attend, see :func:`cqs.attention`. A pattern that differs by
            head has one entry for each of ``num_heads``.
        rope_theta: Base of the rotary embeddings.
        norm_eps: Value added to the mean square in the norms.
        head_parallel: Head-parallel degree of the heads of a rank, see
            :func:`cqs.distributed.attention`.
        mesh: Device mesh with the axes ``("sequence", "tensor")``, from
            ``torch.distributed.device_mesh.init_device_mesh``; ``None`` means this device alone.
            The size of the tensor axis must divide ``num_heads``, ``num_kv_heads`` and
            ``feed_forward_size``.
        device: Device of the parameters: ``None``, the device type of the mesh, or ``"meta"``.
        dtype: Dtype of the parameters; ``None`` means PyTorch's default.

    Raises:
        TypeError: A size is not an integer, or ``pattern`` is not a pattern.
        ValueError: Sizes do not fit each other or the mesh. Also if the mesh has other axes, its
            ranks do not ascend, or it does not contain this process.

    Example:
        >>> block = HybridTransformerBlock(64, 4, 128, num_kv_heads=2)
        >>> block(torch.randn(1, 10, 64)).shape
        torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        feed_forward_size: int,
        *,
        num_kv_heads: int | None = None,
        is_causal: bool = True,
        pattern: Pattern | None = None,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
        head_parallel: int | str = "auto",
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialise the parameters and keep this rank's shards."""
        super().__init__()
        check_mesh(mesh)
        self.hidden_size, self.mesh = hidden_size, mesh
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm, self.feed_forward_norm = (
            nn.RMSNorm(hidden_size, norm_eps, **placement) for _ in range(2)
        )
        self.attention = SelfAttention(
            hidden_size,
            num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            is_causal=is_causal,
            pattern=pattern,
            rope_theta=rope_theta,
            head_parallel=head_parallel,
            mesh=mesh,
            **placement,
        )
        self.feed_forward = FeedForward(hidden_size, feed_forward_size, mesh=mesh, **placement)
        if mesh is not None:
            norm = parallel.SequenceParallel(use_local_output=True)
            row = parallel.RowwiseParallel(output_layouts=Shard(1))
            styles = {"*_norm": norm, "attention.output": row, "feed_forward.down": row}
            for name in ("attention.[qkv]*", "feed_forward.gate", "feed_forward.up"):
                styles[name] = parallel.ColwiseParallel()
            parallel.parallelize_module(self, mesh["tensor"], styles)
            broadcast_parameters(self, mesh, "sequence")

    @uncompiled_on_mesh
    def forward(
        self, hidden: Tensor, tokens: range | None = None, pattern: Pattern | None = None
    ) -> Tensor:
        """Compute the block for the rows of this rank; every rank of the mesh calls this.

        Args:
            hidden: ``[batch, rows, hidden_size]``, this rank's contiguous shard of the sequence, in
                rank order, with at least one row. Along the tensor axis the rows must be divided as
                by ``torch.chunk``; shards of different tensor axes may differ in length.
                ``distribute_tensor(whole, mesh, [Shard(1), Shard(1)]).to_local()`` is such a shard.
            tokens: Positions of the rows of all ranks of this tensor axis. ``None`` exchanges the
                numbers of rows, which a stack of blocks does once.
            pattern: Query-key pairs that attend in this call, besides the pattern of the block:
                ``documents(cu_seqlens)`` for the packed sequences of all ranks.

        Returns:
            ``[batch, rows, hidden_size]``.

        Raises:
            ValueError: The shards of the ranks do not fit together; raised on every rank.
        """
        if tokens is None:
            tokens = find_tokens(hidden, self.mesh)
        hidden = hidden + self.attention(self.attention_norm(hidden), tokens, pattern)
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden), tokens)
        return output


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
        **placement: Any,
    ) -> None:
        """Initialise the parameters and keep this rank's shards."""
        super().__init__()
        feed_forward_size = as_integer("feed_forward_size", feed_forward_size, 1)
        check_divisible("feed_forward_size", feed_forward_size, mesh)
        self.mesh = mesh
        self.gate, self.up = (
            nn.Linear(hidden_size, feed_forward_size, bias=False, **placement) for _ in range(2)
        )
        self.down = nn.Linear(feed_forward_size, hidden_size, bias=False, **placement)

    def forward(self, hidden: Tensor, tokens: range | None) -> Tensor:
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
