"""Self-attention that is tensor-parallel over heads and context-parallel over the sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cqs.distributed
from cqs.api import attention as attend
from cqs.arguments import as_integer, to_float
from cqs.nn.mesh import check_divisible, gather
from cqs.patterns import Pattern, per_head
from cqs.problem.masks import check_is_pattern


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embeddings.

    The arguments and errors are those of :class:`cqs.nn.HybridTransformerBlock`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int,
        is_causal: bool,
        pattern: Pattern | None,
        rope_theta: float,
        head_parallel: int | str,
        mesh: DeviceMesh | None,
        **placement: Any,
    ) -> None:
        """Check the sizes and initialise the parameters."""
        super().__init__()
        hidden_size = as_integer("hidden_size", hidden_size, 1)
        num_heads = as_integer("num_heads", num_heads, 1)
        num_kv_heads = as_integer("num_kv_heads", num_kv_heads, 1)
        if not to_float(rope_theta, "rope_theta must be a number") > 0:
            raise ValueError(f"rope_theta must be positive, got {rope_theta}")
        if hidden_size % (2 * num_heads):
            raise ValueError(
                f"hidden_size must be an even multiple of num_heads, {num_heads}, got {hidden_size}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, {num_kv_heads}, got {num_heads}"
            )
        check_divisible("num_heads", num_heads, mesh)
        check_divisible("num_kv_heads", num_kv_heads, mesh)
        self.mesh = mesh
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.is_causal = is_causal
        self.pattern = None if pattern is None else self._select_own_heads(pattern)
        self.rope_theta = rope_theta
        self.strategy = cqs.distributed.Strategy(head_parallel)
        self.query, self.key, self.value = (
            nn.Linear(hidden_size, number * self.head_dim, bias=False, **placement)
            for number in (num_heads, num_kv_heads, num_kv_heads)
        )
        self.output = nn.Linear(hidden_size, hidden_size, bias=False, **placement)

    def forward(
        self, hidden: Tensor, tokens: range | None, pattern: Pattern | None = None
    ) -> Tensor:
        """Compute attention for the rows of this rank.

        Args:
            hidden: ``[batch, rows, hidden_size]``, the rows of this rank.
            tokens: Positions of the rows of all ranks of this tensor axis, see
                :func:`cqs.nn.mesh.find_tokens`.
            pattern: Query-key pairs that attend in this call, besides the pattern of the layer.

        Returns:
            ``[batch, rows, hidden_size]``.
        """
        if pattern is not None:
            pattern = self._select_own_heads(pattern)
        if self.pattern is not None:
            pattern = self.pattern if pattern is None else self.pattern & pattern
        heads = self.project(hidden, tokens)
        compute: Callable[..., Any] = attend
        if self.mesh is not None:
            group = self.mesh.get_group("sequence")
            compute = partial(cqs.distributed.attention, group=group, strategy=self.strategy)
        output = compute(*heads, is_causal=self.is_causal, pattern=pattern)
        assert isinstance(output, Tensor)
        return self.merge(output)

    def project(self, hidden: Tensor, tokens: range | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, ``[batch, heads of this rank, len(tokens), head_dim]``.

        Args:
            hidden: ``[batch, rows, hidden_size]``, the rows of this rank.
            tokens: Positions of the rows of all ranks of this tensor axis.
        """
        rows = gather(hidden, tokens, self.mesh)
        query, key, value = (
            layer(rows).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        theta = self.rope_theta
        return rotate(query, tokens, theta), rotate(key, tokens, theta), value

    def merge(self, heads: Tensor) -> Tensor:
        """Apply the output projection and return the rows of this rank.

        Args:
            heads: ``[batch, heads of this rank, len(tokens), head_dim]``.

        Returns:
            ``[batch, rows, hidden_size]``, summed over the tensor axis.
        """
        rows: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return rows

    def _select_own_heads(self, pattern: Pattern) -> Pattern:
        """Return the pattern of the query heads of this rank, or raise TypeError or ValueError."""
        check_is_pattern(pattern)
        batch, heads = pattern.heads
        if heads == 1 or self.mesh is None:
            return pattern
        if heads != self.num_heads:
            raise ValueError(f"pattern must be for num_heads = {self.num_heads} heads, got {heads}")
        tensor = self.mesh["tensor"]
        number, rank = self.num_heads // tensor.size(), tensor.get_local_rank()
        own = range(rank * number, (rank + 1) * number)
        return per_head([[pattern.head(element, head) for head in own] for element in range(batch)])


def rotate(heads: Tensor, tokens: range | None, theta: float) -> Tensor:
    """Apply rotary position embeddings.

    Features i and ``i + head_dim / 2`` of the token at position p are rotated by the angle
    ``p * theta ** (-2 i / head_dim)`` (Su et al., arXiv 2104.09864, with the order of features of
    Llama). Angles are computed in float64, so they are accurate at any position.

    Args:
        heads: ``[batch, heads, rows, head_dim]`` with an even ``head_dim``.
        tokens: Positions of the rows; ``None`` counts from 0.
        theta: Base of the angles.

    Returns:
        The rotated heads, ``[batch, heads, rows, head_dim]`` in the dtype of ``heads``.

    Example:
        >>> rotate(torch.ones(1, 1, 1, 2), range(0, 1), 10_000.0)
        tensor([[[[1., 1.]]]])
    """
    half = heads.shape[-1] // 2
    first, stop = (0, heads.shape[2]) if tokens is None else (tokens.start, tokens.stop)
    positions = torch.arange(first, stop, dtype=torch.float64, device=heads.device)
    features = torch.arange(half, dtype=torch.float64, device=heads.device)
    angles = torch.outer(positions, theta ** -(features / half))
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.split(half, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
