"""Exact attention over sequences that do not fit on the device, within a budget of bytes."""

from cqs.streaming.plan import Pass, StreamPlan, make_stream_plan
from cqs.streaming.sources import InFile, OnDemand, open_tensor

__all__ = ["InFile", "OnDemand", "Pass", "StreamPlan", "make_stream_plan", "open_tensor"]
