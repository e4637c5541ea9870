"""A small language model of hybrid blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from cqs.nn.block import HybridTransformerBlock
from cqs.nn.mesh import AXES, broadcast_parameters, uncompiled_on_mesh
from cqs.nn.rows import find_tokens


class HybridDecoder(nn.Module):
    """An embedding, blocks, a norm and a linear layer to the vocabulary.

    Each rank of the mesh of the blocks embeds its own rows and computes their logits: embedding and
    last layer are replicated, and nothing is communicated for them. For the rest see
    :class:`HybridTransformerBlock`.

    Args:
        vocab_size: Number of different tokens.
        blocks: At least one, all of the same size and mesh; each may have its own pattern.
        norm_eps: Added to the mean square in the last norm.
        device: As for ``torch.nn.Linear``.
        dtype: Likewise.

    Raises:
        TypeError: if a block is none.
        ValueError: if there are no blocks, or they differ in size or mesh.

    Example:
        >>> from cqs.patterns import sliding_window
        >>> patterns = [None, sliding_window(4, 0)]
        >>> blocks = [HybridTransformerBlock(64, 4, 128, pattern=each) for each in patterns]
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
        """Draw the parameters of all but the blocks."""
        super().__init__()
        blocks = list(blocks)
        if not all(isinstance(block, HybridTransformerBlock) for block in blocks):
            raise TypeError("blocks must be of HybridTransformerBlock")
        if len({(block.hidden_size, block.mesh) for block in blocks}) != 1:
            raise ValueError("blocks must be at least one, all of the same hidden_size and mesh")
        hidden_size, self.mesh = blocks[0].hidden_size, blocks[0].mesh
        self.embedding = nn.Embedding(vocab_size, hidden_size, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, norm_eps, device=device, dtype=dtype)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, device=device, dtype=dtype)
        if self.mesh is not None:
            replicated = SequenceParallel(use_local_output=True)
            for name in ("embedding", "norm", "head"):
                for axis in AXES:
                    broadcast_parameters(getattr(self, name), self.mesh, axis)
                parallelize_module(self, self.mesh["tensor"], {name: replicated})

    @uncompiled_on_mesh
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the rows of this rank; every rank of the mesh calls this.

        Args:
            tokens: ``[batch, rows]``, int64: this rank's part, as for
                :meth:`HybridTransformerBlock.forward`.

        Returns:
            ``[batch, rows, vocab_size]``.

        Raises:
            ValueError: on every rank, if what ranks pass does not fit together.
        """
        positions = find_tokens(tokens, self.mesh)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, positions)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
