"""Exact attention over sequences larger than device memory, within a memory budget."""

from cqs.executors.streaming.attention import attention
from cqs.executors.streaming.plan import Pass, StreamPlan, make_stream_plan
from cqs.executors.streaming.sources import InFile, OnDemand, open_tensor

__all__ = [
    "InFile",
    "OnDemand",
    "Pass",
    "StreamPlan",
    "attention",
    "make_stream_plan",
    "open_tensor",
]
