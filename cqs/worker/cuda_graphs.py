"""Checks and caches for calls that a CUDA graph captures."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

_replayed: dict[int, object] = {}
"""Values that captured CUDA graphs read, by id; they are never freed."""


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream of a device."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():  # to change the device takes longer
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_not_captured(device: torch.device) -> None:
    """Raise RuntimeError if a CUDA graph is being captured, before an unsupported operation."""
    if is_captured(device):
        raise RuntimeError(
            "a CUDA graph cannot capture the first call: call once with the same arguments before "
            "the capture"
        )


def outside_of_graphs(make: Callable[[], _T]) -> _T:
    """Return the result of ``make``; CUDA graphs do not reuse the memory of its tensors.

    Graphs of torch.compile own all memory that the calling thread allocates: another thread calls
    ``make``.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def cached_on_device(
    make: Callable[Concatenate[torch.device, _P], _T], most: int = 512
) -> Callable[Concatenate[torch.device, _P], _T]:
    """Cache a function's tensors per device; keep those forever that a captured CUDA graph reads.

    The cached function raises RuntimeError if it would have to compute during a capture.

    Args:
        make: Function of a device and hashable arguments.
        most: Most results that are kept, of all devices.
    """

    @lru_cache(maxsize=most)
    @wraps(make)
    def make_anew(device: torch.device, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_not_captured(device)
        return outside_of_graphs(lambda: make(device, *args, **kwargs))

    @wraps(make_anew)
    def find(device: torch.device, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        value = make_anew(device, *args, **kwargs)  # type: ignore[arg-type]  # they are hashable
        if is_captured(device):
            _replayed[id(value)] = value
        return value

    return find
