"""Memory over time: of tensors, and of the process."""

import ctypes
import os
import pickle
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch

from cqs.worker.memory import record_cpu_memory

Result = TypeVar("Result")

STATM = Path("/proc/self/statm")
"""File in which Linux states how much of this process is in memory."""
_INTERVAL = 1e-3


def record_memory(
    compute: Callable[[], Result], device: torch.device, snapshot_path: Path | None = None
) -> tuple[Result, list[tuple[float, int]]]:
    """Run a function and return its result and its memory over time.

    The bytes are those of :func:`cqs.worker.memory.measure_peak_bytes`. On a GPU they come from the
    memory history of PyTorch's allocator, which must not be recorded already. Its times are those
    of the host; kernels may run later.

    Args:
        compute: The function to run.
        device: The device whose memory is recorded.
        snapshot_path: File for the history of a GPU, which https://pytorch.org/memory_viz shows,
            or ``None``.

    Returns:
        The result, and samples: seconds since the start, and the bytes allocated from then on.
    """
    if device.type != "cuda":
        return record_cpu_memory(compute)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(context=None)
    try:
        start = time.time()
        result = compute()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    if snapshot_path is not None:
        snapshot_path.write_bytes(pickle.dumps(snapshot))
    number = torch.cuda.current_device() if device.index is None else device.index
    samples = [(at - start, held - before) for at, held in samples_of_snapshot(snapshot, number)]
    return result, [(0.0, 0), *samples]


def samples_of_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> list[tuple[float, int]]:
    """Return the allocated memory of a GPU while its memory history was recorded.

    As in ``torch.cuda.memory_allocated``, a block counts until its owner frees it, although a
    stream may still use it.

    Args:
        snapshot: Return value of ``torch.cuda.memory._snapshot()``, after
            ``torch.cuda.memory._record_memory_history()``.
        device: Index of the GPU.

    Returns:
        For each event, seconds since the Unix epoch and the bytes allocated from then on.
    """
    signs = {"alloc": 1, "free_requested": -1}
    events = [
        (entry["time_us"] / 1e6, signs[entry["action"]] * entry["size"])
        for entry in snapshot["device_traces"][device]
        if entry["action"] in signs
    ]
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    before = sum(each["allocated_size"] for each in segments) - sum(size for _, size in events)
    sizes = accumulate(size for _, size in events)
    return [(at, before + size) for (at, _), size in zip(events, sizes, strict=True)]


def record_resident(compute: Callable[[], Result]) -> tuple[Result, list[tuple[float, int]]]:
    """Run ``compute`` and return its result and the growth of the resident set over time.

    A thread looks every millisecond, each time after the allocator of the C library, where it is
    glibc's, has given back to the system what is free.

    Returns:
        The result, and samples: seconds since the start, and the bytes by which the resident set
        was larger than then.

    Raises:
        NotImplementedError: if the system has no /proc/self/statm.
    """
    if not STATM.exists():
        raise NotImplementedError(f"the resident set is read from {STATM}, which is not there")
    libc = ctypes.CDLL(None)
    samples, is_done = [(0.0, 0)], Event()
    before, start = _resident_bytes(libc), time.perf_counter()

    def sample() -> None:
        held = _resident_bytes(libc) - before
        samples.append((time.perf_counter() - start, held))

    def sample_often() -> None:
        while not is_done.wait(_INTERVAL):
            sample()

    sampler = Thread(target=sample_often)
    sampler.start()
    try:
        result = compute()
    finally:
        is_done.set()
        sampler.join()
    sample()
    return result, samples


def _resident_bytes(libc: ctypes.CDLL) -> int:
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
