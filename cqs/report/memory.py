"""Peak memory of a task with its inputs."""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cqs.worker import HeldTokens
from cqs.worker.memory import measure_peak_bytes

Result = TypeVar("Result")


def hold(tensor: Tensor, ranges: Sequence[range]) -> HeldTokens:
    """Copy tokens of ``[batch, heads, seqlen, dim]``, as a worker receives them."""
    parts = [tensor[:, :, r.start : r.stop] for r in ranges]
    return HeldTokens.packed(torch.cat([tensor[:, :, :0], *parts], dim=2), ranges)


def measure_held(compute: Callable[[], Result], held: Sequence[HeldTokens]) -> tuple[Result, int]:
    """Return the result of a computation, and its peak memory in bytes including its inputs.

    Args:
        compute: The computation. It runs twice: the first run compiles, and allocates what stays.
        held: The inputs.
    """
    device = held[0].joined().device
    compute()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a cached block may be up to a megabyte larger than requested
    collects = gc.isenabled()
    gc.disable()  # no other object may be freed during the measurement
    try:
        result, peak = measure_peak_bytes(compute, device)
    finally:
        if collects:
            gc.enable()
    return result, peak + sum(tokens.joined().nbytes for tokens in held)
