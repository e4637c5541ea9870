"""What a task holds at its peak."""

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cqs.worker import HeldTokens
from cqs.worker.memory import measure_peak_bytes


def hold(tensor: Tensor, ranges: Sequence[range]) -> HeldTokens:
    """Copy tokens of ``[batch, heads, seqlen, dim]``, as a worker receives them."""
    parts = [tensor[:, :, r.start : r.stop] for r in ranges]
    return HeldTokens.packed(torch.cat([tensor[:, :, :0], *parts], dim=2), ranges)


def measure_held(compute: Callable[[], object], held: Sequence[HeldTokens]) -> int:
    """Return the most bytes that a computation takes with the tokens that it is given.

    Args:
        compute: Runs twice: at first it compiles, and allocates what stays.
        held: The tokens.
    """
    device = held[0].joined().device
    compute()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a block of it may be up to a megabyte larger than is asked for
    collects = gc.isenabled()
    gc.disable()  # nothing else is to be freed meanwhile
    try:
        _, peak = measure_peak_bytes(compute, device)
    finally:
        if collects:
            gc.enable()
    return peak + sum(tokens.joined().nbytes for tokens in held)
