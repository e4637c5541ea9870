"""How much memory a computation takes, as the allocator saw it."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory that a GPU has."""
    return torch.cuda.get_device_properties(device).total_memory


def measure_peak_bytes(compute: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Run ``compute`` and return its result and the most bytes it held at once in tensors.

    Counts what is allocated on ``device`` while it runs, scratch of PyTorch's kernels included, on
    top of what was allocated before: on a GPU by the statistics of PyTorch's allocator, on the CPU
    by its profiler (about a millisecond).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = compute()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it announces every start on stderr otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = compute()
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak
