"""Seconds of computations that take turns, so that a drifting clock meets all of them alike."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_PRODUCTS_AHEAD = 4


def time_in_turn(
    computations: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str,
    *,
    behind_work: bool = False,
) -> dict[str, list[float]]:
    """Run every computation ``repeats`` times, in turn; return the seconds of each.

    Each turn begins with another one, so that none always comes first.

    On a GPU each time runs from one event of its stream to another, on a CPU by the wall clock.

    Args:
        computations: What to time, by name.
        repeats: How often.
        device: ``"cuda"`` or ``"cpu"``.
        behind_work: Whether to launch while the GPU is busy with matrix products, for about 12
            milliseconds, as in the middle of a model: what a launch costs the caller is then no
            part of the time.
    """
    ahead = None
    if behind_work:
        ahead = torch.randn(10_240, 10_240, dtype=torch.bfloat16, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in computations}
    names = list(computations)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(computations[name], device, ahead))
    return seconds


def time_calls(computations: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return for each computation on a GPU the least seconds until it is launched, of five."""
    seconds = {}
    for name, compute in computations.items():
        waits = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            compute()
            waits.append(time.perf_counter() - start)
        seconds[name] = min(waits)
    return seconds


def _time(compute: Callable[[], object], device: str, ahead: Tensor | None) -> float:
    if device != "cuda":
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead is not None:
        for _ in range(_PRODUCTS_AHEAD):
            ahead @ ahead
    begin.record()
    compute()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
