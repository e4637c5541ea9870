"""What a pass over a problem shows to loggers and profilers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from torch.autograd import profiler

from cqs.scheduler import Plan

_LOGGER = logging.getLogger("cqs")


@contextmanager
def observe(
    name: str, plan: Plan, num_bytes: int, name_backend: Callable[[], str]
) -> Iterator[None]:
    """Mark a pass in the traces of PyTorch's profilers, and log it at level DEBUG.

    Args:
        name: ``"forward"`` or ``"backward"``.
        plan: The plan that is computed.
        num_bytes: Bytes of the query, key and value of this process.
        name_backend: Returns the name of the backend; called only if the pass is logged.
    """
    if not is_observed():
        yield
        return
    start = perf_counter()
    with profiler.record_function(f"cqs.{name}"):
        yield
    if _LOGGER.isEnabledFor(logging.DEBUG):
        milliseconds = 1000 * (perf_counter() - start)
        text = "%s: %s; backend %s, %d bytes of query, key and value, %.3f ms of the host"
        _LOGGER.debug(text, name, plan, name_backend(), num_bytes, milliseconds)


def is_observed() -> bool:
    """Return whether passes are logged or profiled."""
    return _LOGGER.isEnabledFor(logging.DEBUG) or profiler._is_profiler_enabled
