"""Processes that are killed while something else runs."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def killing(pids: Sequence[int], seconds: float) -> Iterator[None]:
    """Kill processes after some seconds, if the block does not end before."""
    timer = threading.Timer(seconds, kill, [pids])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill(pids: Sequence[int]) -> None:
    """Send SIGKILL to processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
