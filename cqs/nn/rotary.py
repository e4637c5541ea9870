"""Rotary position embeddings."""

import torch
from torch import Tensor


def rotate(heads: Tensor, tokens: range, theta: float) -> Tensor:
    """Apply rotary position embeddings.

    Features i and ``i + head_dim / 2`` of the token at position p are rotated by the angle
    ``p * theta ** (-2 i / head_dim)`` (Su et al., arXiv 2104.09864, with the order of features of
    Llama). Angles are computed in float64, so they are accurate at any position.

    Args:
        heads: ``[batch, heads, rows, head_dim]`` with an even ``head_dim``.
        tokens: Positions of the rows.
        theta: Base of the angles.

    Returns:
        The rotated heads, ``[batch, heads, rows, head_dim]`` in the dtype of ``heads``.

    Example:
        >>> rotate(torch.ones(1, 1, 1, 2), range(0, 1), 10_000.0)
        tensor([[[[1., 1.]]]])
    """
    half = heads.shape[-1] // 2
    positions = torch.arange(tokens.start, tokens.stop, dtype=torch.float64, device=heads.device)
    features = torch.arange(half, dtype=torch.float64, device=heads.device)
    angles = torch.outer(positions, theta ** -(features / half))
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
