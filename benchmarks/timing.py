"""Repeats of benchmarks: their times and their progress bars."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from tqdm import tqdm

from cqs.report.timing import Timer, run_in_turn

Item = TypeVar("Item")
Result = TypeVar("Result")
_DELAY = 2.0
"""Seconds of work before a bar appears."""


def progress_bar(total: int, label: str = "", *, is_shown: bool = True) -> tqdm:
    """Return a bar on stderr that appears after two seconds, on terminals only.

    Args:
        total: Number of updates until the work is done.
        label: What is measured.
        is_shown: False for no bar, as on all ranks but one.
    """
    disable = None if is_shown else True
    return tqdm(total=total, desc=label, delay=_DELAY, disable=disable, leave=False)


def track(
    items: Iterable[Item], total: int, label: str = "", *, is_shown: bool = True
) -> Iterator[Item]:
    """Yield items, with a bar; the arguments are those of :func:`progress_bar`."""
    with progress_bar(total, label, is_shown=is_shown) as bar:
        for item in items:
            yield item
            bar.update()


def time_by_wall_clock(compute: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of a computation from an idle GPU, if any, to an idle one, and its result.

    For computations that use several streams or copy to the host.
    """
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    result = compute()
    synchronize()
    return time.perf_counter() - start, result


def time_in_turn(
    computations: Mapping[str, Callable[[], object]],
    repeats: int,
    timer: Timer,
    label: str = "",
) -> dict[str, list[float]]:
    """Time all computations ``repeats`` times, in turn; return the seconds of each, by name.

    Args:
        computations: The computations, by name.
        repeats: Number of repeats.
        timer: Times each of them.
        label: What the progress bar calls them.
    """

    def timed(compute: Callable[[], object]) -> Callable[[], float]:
        return lambda: timer.time(compute)[0]

    timed_ones = {name: timed(compute) for name, compute in computations.items()}
    turns_of_all = run_in_turn(timed_ones, repeats)
    rounds = list(track(turns_of_all, repeats, label))
    return {name: [found[name] for found in rounds] for name in computations}


def time_calls(computations: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return for each computation on a GPU the least host time of a call, in seconds."""
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
