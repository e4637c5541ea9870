"""Copies of rows between tensors, as values."""

from typing import NamedTuple


class RowCopy(NamedTuple):
    """One copy: adjacent rows of adjacent heads from a source tensor to a target tensor."""

    tensor: int
    """Index of the source, and of the target."""
    source_row: int
    target_row: int
    num_rows: int
    source_head: int
    target_head: int
    num_heads: int


CopySchedule = tuple[RowCopy, ...]
