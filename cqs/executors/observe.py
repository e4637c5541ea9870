"""What a pass of an executor tells loggers and profilers."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

from torch.autograd import profiler

from cqs.scheduler import Plan

_LOGGER = logging.getLogger("cqs")
_UNOBSERVED = nullcontext()


def observe(
    name: str, plan: Plan, backend: str | None, num_bytes: int
) -> AbstractContextManager[None]:
    """Mark one pass for PyTorch's profilers, and log it at level DEBUG.

    Args:
        name: ``"forward"`` or ``"backward"``.
        plan: The plan that is computed.
        backend: Name of the backend; ``None`` if the workers choose it.
        num_bytes: Bytes that this process reads, sends and receives.
    """
    if _LOGGER.isEnabledFor(logging.DEBUG) or profiler._is_profiler_enabled:
        return _observed(name, plan, backend, num_bytes)
    return _UNOBSERVED


@contextmanager
def _observed(name: str, plan: Plan, backend: str | None, num_bytes: int) -> Iterator[None]:
    start = perf_counter()
    with profiler.record_function(f"cqs.{name}"):
        yield
    milliseconds = 1000 * (perf_counter() - start)
    _LOGGER.debug(
        "%s: %s, backend %s, %d bytes, %.3f ms of the host",
        name,
        plan,
        backend or "chosen by the workers",
        num_bytes,
        milliseconds,
    )
