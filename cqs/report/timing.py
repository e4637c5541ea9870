"""Seconds of computations that take turns, so that a drifting clock meets all of them alike."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


def time_in_turn(
    computations: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str,
    *,
    behind: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Run every computation ``repeats`` times, in turn; return the seconds of each.

    Each turn has an order of its own, so that none always comes after the same.

    On a GPU each time runs from one event of its stream to another, on a CPU by the wall clock.

    Args:
        computations: What to time, by name.
        repeats: How often.
        device: ``"cuda"`` or ``"cpu"``.
        behind: Launches what the GPU does before, untimed; see :func:`make_busy`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in computations}
    for order in turns(computations, repeats):
        for name in order:
            seconds[name].append(_time(computations[name], device, behind))
    return seconds


def turns(names: Iterable[str], number: int) -> Iterator[list[str]]:
    """Yield the names in so many orders, the same whenever this is asked for.

    A GPU is slower after some work than after other: what follows what must not be fixed.
    """
    generator, order = random.Random(0), list(names)
    for _ in range(number):
        generator.shuffle(order)
        yield list(order)


def make_busy() -> Callable[[], None]:
    """Return what keeps the GPU busy with matrix products for about 24 milliseconds.

    What is launched meanwhile, as in the middle of a model, does not wait for the caller: what a
    launch costs is no part of its time.
    """
    matrix = torch.randn(10_240, 10_240, dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        for _ in range(8):
            matrix @ matrix

    return work


def time_calls(computations: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return for each computation on a GPU the least seconds until it is launched."""
    seconds = {}
    for name, compute in computations.items():
        waits = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            compute()
            waits.append(time.perf_counter() - start)
        seconds[name] = min(waits)
    return seconds


def _time(compute: Callable[[], object], device: str, behind: Callable[[], object] | None) -> float:
    if device != "cuda":
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if behind is not None:
        behind()
    begin.record()
    compute()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
