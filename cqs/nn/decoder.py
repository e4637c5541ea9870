"""A decoder-only language model of hybrid blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from cqs.nn.block import HybridTransformerBlock
from cqs.nn.mesh import AXES, broadcast_parameters, find_tokens, uncompiled_on_mesh
from cqs.patterns import Pattern


class HybridDecoder(nn.Module):
    """A decoder-only language model: embedding, hybrid blocks, norm and output projection.

    Each rank of the mesh embeds its own rows and computes their logits. Embedding and output
    projection are replicated and require no communication. Parallelism, parameters and state dicts
    are those of :class:`HybridTransformerBlock`.

    Args:
        vocab_size: Size of the vocabulary.
        blocks: At least one block, all with the same ``hidden_size`` and mesh; each may have its
            own pattern.
        norm_eps: Value added to the mean square in the last norm.
        device: Device of the parameters: ``None``, the device type of the mesh, or ``"meta"``.
        dtype: Dtype of the parameters; ``None`` means PyTorch's default.

    Raises:
        TypeError: An element of ``blocks`` is not a :class:`HybridTransformerBlock`.
        ValueError: There are no blocks, or they differ in ``hidden_size`` or mesh.

    Example:
        >>> from cqs.patterns import sliding_window
        >>> patterns = [None, sliding_window(4, 0)]
        >>> blocks = [HybridTransformerBlock(64, 4, 128, pattern=pattern) for pattern in patterns]
        >>> HybridDecoder(100, blocks)(torch.arange(10)[None]).shape
        torch.Size([1, 10, 100])
    """

    def __init__(
        self,
        vocab_size: int,
        blocks: Iterable[HybridTransformerBlock],
        *,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialise the embedding, the norm and the output projection."""
        super().__init__()
        blocks = list(blocks)
        if not all(isinstance(block, HybridTransformerBlock) for block in blocks):
            kinds = sorted({type(block).__name__ for block in blocks})
            raise TypeError(f"blocks must be HybridTransformerBlocks, got {kinds}")
        if len({(block.hidden_size, block.mesh) for block in blocks}) != 1:
            raise ValueError(
                "blocks must be at least one block, all with the same hidden_size and mesh, "
                f"got {len(blocks)}"
            )
        hidden_size, self.mesh = blocks[0].hidden_size, blocks[0].mesh
        self.embedding = nn.Embedding(vocab_size, hidden_size, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, norm_eps, device=device, dtype=dtype)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, device=device, dtype=dtype)
        if self.mesh is not None:
            layers = {"embedding": self.embedding, "norm": self.norm, "head": self.head}
            for axis in AXES:
                broadcast_parameters(nn.ModuleDict(layers), self.mesh, axis)
            replicated = SequenceParallel(use_local_output=True)
            parallelize_module(self, self.mesh["tensor"], {name: replicated for name in layers})

    @uncompiled_on_mesh
    def forward(self, tokens: Tensor, pattern: Pattern | None = None) -> Tensor:
        """Return the logits of the rows of this rank; every rank of the mesh calls this.

        Args:
            tokens: ``[batch, rows]``, int64: this rank's shard, divided as ``hidden`` of
                :meth:`HybridTransformerBlock.forward`.
            pattern: Query-key pairs that attend in this call, besides the patterns of the blocks.

        Returns:
            ``[batch, rows, vocab_size]``.

        Raises:
            ValueError: The shards of the ranks do not fit together; raised on every rank.
        """
        positions = find_tokens(tokens, self.mesh)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, positions, pattern)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
