"""Sparse attention patterns in closed form, with exact counts of live pairs at any length."""

from cqs.patterns.bigbird import bigbird
from cqs.patterns.bound import BoundPattern
from cqs.patterns.masks import acsr, block_sparse, from_block_mask, from_deepspeed, from_mask
from cqs.patterns.pattern import Pattern, per_head
from cqs.patterns.positions import (
    block_diagonal,
    causal,
    dilated,
    documents,
    fixed,
    global_tokens,
    longformer,
    padded,
    sliding_window,
    strided,
)

__all__ = [
    "BoundPattern",
    "Pattern",
    "acsr",
    "bigbird",
    "block_diagonal",
    "block_sparse",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "from_block_mask",
    "from_deepspeed",
    "from_mask",
    "global_tokens",
    "longformer",
    "padded",
    "per_head",
    "sliding_window",
    "strided",
]
