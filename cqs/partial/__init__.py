"""Partial outputs, gradients, and their merge: all that worker and tiler share."""

from cqs.partial.merge import (
    RunningMerge,
    has_triton,
    merge_partials,
    merge_rows,
    merges_at_once,
)
from cqs.partial.values import (
    SUM_BLOCK,
    AttentionOutput,
    Gradients,
    Partial,
    check_partial,
    lse_dtype,
    weighted_sum,
)

__all__ = [
    "SUM_BLOCK",
    "AttentionOutput",
    "Gradients",
    "Partial",
    "RunningMerge",
    "check_partial",
    "has_triton",
    "lse_dtype",
    "merge_partials",
    "merge_rows",
    "merges_at_once",
    "weighted_sum",
]
