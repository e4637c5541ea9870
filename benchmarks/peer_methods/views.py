"""Views of a shard with rows first, which is its order in memory, and with heads first."""

from torch import Tensor


def rows_first(tensor: Tensor) -> Tensor:
    """Return ``[rows, batch, heads, dim]``, contiguous; a view if it is a shard."""
    return rows_first_view(tensor).contiguous()


def rows_first_view(tensor: Tensor) -> Tensor:
    """View ``[batch, heads, rows, dim]`` as ``[rows, batch, heads, dim]``."""
    return tensor.movedim(2, 0)


def heads_first(tensor: Tensor) -> Tensor:
    """View ``[rows, batch, heads, dim]`` as ``[batch, heads, rows, dim]``."""
    return tensor.movedim(0, 2)
