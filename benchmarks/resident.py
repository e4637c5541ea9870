"""What the process holds over time, as the operating system counts it."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

Result = TypeVar("Result")

STATM = Path("/proc/self/statm")
"""Where Linux says how much of this process is in memory."""
_INTERVAL = 1e-3


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
