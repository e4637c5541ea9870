"""Exact attention, split over workers by cyclic quorum sets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cqs.scheduler import Plan as Plan
from cqs.scheduler import make_plan as make_plan
from cqs.version import __version__ as __version__

if TYPE_CHECKING:
    from cqs import distributed as distributed
    from cqs import nn as nn
    from cqs import patterns as patterns
    from cqs import streaming as streaming
    from cqs.api import attention as attention
    from cqs.executors.fingerprint import fingerprint as fingerprint
    from cqs.executors.ray import Cluster as Cluster
    from cqs.executors.verify import VerificationError as VerificationError
    from cqs.integrations.flex import flex_attention as flex_attention
    from cqs.partial import AttentionOutput as AttentionOutput
    from cqs.problem.scores import Scores as Scores

_LAZY = {
    "attention": "cqs.api",
    "AttentionOutput": "cqs.partial",
    "Cluster": "cqs.executors.ray",
    "Scores": "cqs.problem.scores",
    "fingerprint": "cqs.executors.fingerprint",
    "VerificationError": "cqs.executors.verify",
    "flex_attention": "cqs.integrations.flex",
}
_MODULES = ("distributed", "nn", "patterns", "streaming")
__all__ = ["Plan", "make_plan", *_LAZY, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import what needs numpy, torch or ray only when it is used: planning needs none."""
    if name in _MODULES:
        return import_module(f"cqs.{name}")
    if name in _LAZY:
        globals()[name] = getattr(import_module(_LAZY[name]), name)
        return globals()[name]
    raise AttributeError(f"module 'cqs' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those that are not imported yet too."""
    return [*__all__, "__version__"]
