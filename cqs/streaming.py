"""Exact attention over sequences larger than device memory, within a memory budget."""

import sys

if sys.platform != "linux":
    raise ImportError(f"cqs.streaming requires Linux, got {sys.platform}")

from cqs.executors.streaming.attention import Resumable, attention
from cqs.executors.streaming.plan import Pass, StreamPlan, make_stream_plan
from cqs.executors.streaming.sources import InFile, OnDemand, open_tensor

__all__ = [
    "InFile",
    "OnDemand",
    "Pass",
    "Resumable",
    "StreamPlan",
    "attention",
    "make_stream_plan",
    "open_tensor",
]
