"""What a pass over a problem shows to loggers and profilers."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

from torch.autograd import profiler

from cqs.problem import Problem
from cqs.scheduler import Plan

_LOGGER = logging.getLogger("cqs")
_UNOBSERVED = nullcontext()


def observe(
    name: str, problem: Problem, plan: Plan, name_backend: Callable[[], str]
) -> AbstractContextManager[None]:
    """Mark a pass in the traces of PyTorch's profilers, and log it at level DEBUG.

    Args:
        name: ``"forward"`` or ``"backward"``.
        problem: The problem, whose bytes of query, key and value are logged.
        plan: The plan that is computed.
        name_backend: Returns the name of the backend; called only if the pass is logged.
    """
    if _LOGGER.isEnabledFor(logging.DEBUG) or profiler._is_profiler_enabled:
        return _observed(name, problem, plan, name_backend)
    return _UNOBSERVED


@contextmanager
def _observed(
    name: str, problem: Problem, plan: Plan, name_backend: Callable[[], str]
) -> Iterator[None]:
    start = perf_counter()
    with profiler.record_function(f"cqs.{name}"):
        yield
    if _LOGGER.isEnabledFor(logging.DEBUG):
        tensors = problem.query, problem.key, problem.value
        num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)
        milliseconds = 1000 * (perf_counter() - start)
        text = "%s of %s; backend %s, %d bytes of query, key and value, %.3f ms of the host"
        _LOGGER.debug(text, name, plan, name_backend(), num_bytes, milliseconds)
