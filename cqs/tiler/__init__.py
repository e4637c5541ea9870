"""Merge the partial outputs of tasks into the result. Uses torch, without Ray."""

from cqs.tiler.gradient_sum import GradientSum
from cqs.tiler.tiler import Tiler

__all__ = ["GradientSum", "Tiler"]
