"""Provide modules for long-context models: transformer blocks and decoders."""

from cqs.nn.block import HybridTransformerBlock
from cqs.nn.decoder import HybridDecoder
from cqs.nn.gradients import reduce_gradients

__all__ = ["HybridDecoder", "HybridTransformerBlock", "reduce_gradients"]
