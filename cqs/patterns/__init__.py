"""Sparse attention patterns in closed form, with exact counts of live pairs at any length."""

from cqs.patterns.acsr import acsr
from cqs.patterns.bigbird import bigbird
from cqs.patterns.block_list import BlockList
from cqs.patterns.bound import BoundPattern
from cqs.patterns.masks import block_sparse, from_block_mask, from_deepspeed, from_mask
from cqs.patterns.pattern import Pattern, per_head
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.patterns.regular import (
    block_diagonal,
    causal,
    dilated,
    fixed,
    sliding_window,
    strided,
)
from cqs.patterns.tokens import documents, global_tokens, longformer
from cqs.patterns.views import View, views

__all__ = [
    "FAR",
    "Axis",
    "BlockList",
    "BoundPattern",
    "Pattern",
    "Piece",
    "View",
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
    "per_head",
    "sliding_window",
    "strided",
    "views",
]
