"""Exact attention, split over workers by cyclic quorum sets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cqs.scheduler import Plan, make_plan

if TYPE_CHECKING:
    from cqs import distributed as distributed
    from cqs import nn as nn
    from cqs import patterns as patterns
    from cqs.api import attention as attention
    from cqs.executors.ray import Cluster as Cluster
    from cqs.flex import flex_attention as flex_attention

__all__ = [
    "Cluster",
    "Plan",
    "attention",
    "distributed",
    "flex_attention",
    "make_plan",
    "nn",
    "patterns",
]
__version__ = "0.1.0"

_LAZY = {
    "attention": "cqs.api",
    "Cluster": "cqs.executors.ray",
    "flex_attention": "cqs.flex",
}


def __getattr__(name: str) -> Any:
    """Import what needs numpy, torch or ray only when it is used: planning needs none."""
    if name in ("distributed", "nn", "patterns"):
        return import_module(f"cqs.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cqs' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those that are not imported yet too."""
    return [*__all__, "__version__"]
