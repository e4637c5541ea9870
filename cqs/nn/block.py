"""A transformer block whose sequence is cut over one axis of a mesh, its layers over the other."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from cqs.nn.attention import SelfAttention
from cqs.nn.feed_forward import FeedForward
from cqs.nn.mesh import broadcast_parameters, check_mesh, uncompiled_on_mesh
from cqs.nn.rows import find_tokens
from cqs.patterns import Pattern


class HybridTransformerBlock(nn.Module):
    """A transformer block: attention by cyclic quorums, the rest by tensor parallelism.

    ``hidden + attention(norm(hidden))``, then ``hidden + feed_forward(norm(hidden))``, as in Llama:
    RMSNorm, grouped-query attention with rotary embeddings, SwiGLU, no biases.

    The sequence is cut over all ranks of the mesh, in order: every rank has a contiguous part. For
    attention and for the feed-forward layer the ranks of a tensor axis gather their rows, and each
    computes with its slice of the heads and features: Megatron's sequence parallelism (Korthikanti
    et al., arXiv 2205.05198), four collectives forward and four backward within the tensor axis.
    In between :func:`cqs.distributed.attention` works over the sequence axis. With a tensor axis of
    1 this is sequence parallelism alone, with a sequence axis of 1 tensor parallelism alone.

    Parameters are DTensors over the tensor axis, and replicated over the sequence axis: after
    ``backward`` call :func:`cqs.nn.reduce_gradients`, or wrap the model by
    ``torch.distributed.fsdp.fully_shard(model, mesh=mesh["sequence"])``. All ranks get what the
    first rank draws: from one seed the same parameters for any mesh.

    State dicts have the same names for any mesh, and none. Take and load those that are whole
    with ``get_model_state_dict`` and ``set_model_state_dict`` of
    ``torch.distributed.checkpoint.state_dict`` and ``StateDictOptions(full_state_dict=True)``;
    ``torch.distributed.checkpoint`` saves those that are cut, and loads them for another mesh.

    Args:
        hidden_size: Features of a token; an even multiple of ``num_heads``.
        num_heads: Heads of the queries.
        feed_forward_size: Features between the layers of the feed-forward part.
        num_kv_heads: Heads of keys and values; ``None`` means as many. It divides ``num_heads``.
        is_causal: As for :func:`cqs.attention`.
        pattern: Likewise; if it differs by head it is for all of ``num_heads``.
        rope_theta: Base of the rotary embeddings.
        norm_eps: Added to mean squares in norms.
        head_parallel: See :func:`cqs.distributed.attention`; of the heads that a rank has.
        mesh: Devices, of the axes ``("sequence", "tensor")``, from
            ``torch.distributed.device_mesh.init_device_mesh``; ``None``: this device alone. The
            tensor axis divides heads, key heads and ``feed_forward_size``.
        device: As for ``torch.nn.Linear``; of the kind of the mesh, or ``"meta"``.
        dtype: Likewise.

    Raises:
        TypeError: for sizes that are no integers, and a pattern that is none.
        ValueError: for sizes that do not fit each other or the mesh, and for a mesh of other axes,
            whose ranks do not ascend, or that this process is not in.

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
        """Draw the parameters, and keep this rank's slices."""
        super().__init__()
        check_mesh(mesh)
        self.hidden_size, self.mesh = hidden_size, mesh
        self.attention_norm, self.feed_forward_norm = (
            nn.RMSNorm(hidden_size, norm_eps, device=device, dtype=dtype) for _ in range(2)
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
            device=device,
            dtype=dtype,
        )
        self.feed_forward = FeedForward(
            hidden_size, feed_forward_size, mesh=mesh, device=device, dtype=dtype
        )
        if mesh is not None:
            norm = SequenceParallel(use_local_output=True)
            parallelize_module(
                self, mesh["tensor"], {"attention_norm": norm, "feed_forward_norm": norm}
            )
            broadcast_parameters(self, mesh, "sequence")

    @uncompiled_on_mesh
    def forward(self, hidden: Tensor, tokens: range | None = None) -> Tensor:
        """Compute the block for the rows of this rank; every rank of the mesh calls this.

        Args:
            hidden: ``[batch, rows, hidden_size]``: a contiguous part of the sequence, the first on
                the first rank of the mesh. Every rank needs a row. Along the tensor axis parts are
                cut as ``torch.chunk`` cuts; between tensor axes they may differ in length.
                ``distribute_tensor(whole, mesh, [Shard(1), Shard(1)]).to_local()`` is such a part.
            tokens: Positions of the rows of all ranks of this tensor axis; ``None`` asks the others
                for their numbers, which a stack of blocks needs to do once.

        Returns:
            The same shape.

        Raises:
            ValueError: on every rank, if what ranks pass does not fit together.
        """
        if tokens is None:
            tokens = find_tokens(hidden, self.mesh)
        hidden = hidden + self.attention(self.attention_norm(hidden), tokens)
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden), tokens)
        return output
