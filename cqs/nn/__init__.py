"""Provide modules for long-context models: transformer blocks and tensor-parallel layers."""

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
