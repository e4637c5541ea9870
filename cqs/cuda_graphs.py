"""What is different where a CUDA graph is captured, which will be replayed without the caller."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

_replayed: dict[int, object] = {}


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_not_captured(device: torch.device) -> None:
    """Raise RuntimeError if a CUDA graph is captured, before what a graph cannot do."""
    if is_captured(device):
        raise RuntimeError(
            "a first call cannot be captured in a CUDA graph: "
            "make one with the same arguments before"
        )


def cached_on_device(
    make: Callable[Concatenate[torch.device, _P], _T],
) -> Callable[Concatenate[torch.device, _P], _T]:
    """Cache what kernels read on a device: for good, if a CUDA graph that reads it is captured.

    A function made so raises RuntimeError where it would have to make anew what is captured.
    """

    @lru_cache(maxsize=256)
    @wraps(make)
    def make_anew(device: torch.device, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_not_captured(device)
        return make(device, *args, **kwargs)

    @wraps(make_anew)
    def find(device: torch.device, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        found = make_anew(device, *args, **kwargs)  # type: ignore[arg-type]  # they are hashable
        if is_captured(device):
            _replayed[id(found)] = found
        return found

    return find
