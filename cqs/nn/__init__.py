"""Modules for models of long sequences: hybrid blocks and the parallel layers they are made of."""

from cqs.nn.block import HybridTransformerBlock
from cqs.nn.decoder import HybridDecoder
from cqs.nn.gradients import reduce_gradients
from cqs.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "HybridDecoder",
    "HybridTransformerBlock",
    "RowParallelLinear",
    "reduce_gradients",
]
