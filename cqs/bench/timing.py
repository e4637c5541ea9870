"""Seconds of computations that take turns, so that a drifting clock meets all of them alike."""

import time
from collections.abc import Callable, Mapping

import torch


def time_in_turn(
    computations: Mapping[str, Callable[[], object]], repeats: int, device: str
) -> dict[str, list[float]]:
    """Run every computation ``repeats`` times, in turn; return the seconds of each.

    Each turn begins with another one, so that none always comes first.

    On a GPU each time runs from one event of its stream to another, on a CPU by the wall clock.
    """
    seconds: dict[str, list[float]] = {name: [] for name in computations}
    names = list(computations)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(computations[name], device))
    return seconds


def _time(compute: Callable[[], object], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    compute()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
