"""What is different where a CUDA graph is captured, which will be replayed without the caller."""

from typing import TypeVar

import torch

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


def keep_for_replays(read: _T, device: torch.device) -> _T:
    """Return what a launch reads; for good, if a CUDA graph is captured that reads it whenever."""
    if is_captured(device):
        _replayed[id(read)] = read
    return read
