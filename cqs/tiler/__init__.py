"""Partial results into the answer: torch, no ray, no task."""

from cqs.tiler.gradient_sum import GradientSum
from cqs.tiler.tiler import Tiler

__all__ = ["GradientSum", "Tiler"]
