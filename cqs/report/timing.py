"""Seconds of computations, in turn, so that a drifting clock affects all of them equally."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Timer:
    """Times computations: on a CPU by the wall clock, on a GPU by events of its stream."""

    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    warm_up: Callable[[], object] = lambda: None
    """Launches GPU work that precedes every computation and is not timed, such as
    :func:`make_busy`; by default a computation starts on an idle GPU."""

    def time(self, compute: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of a computation, and its result."""
        if self.device_type == "cpu":
            start = time.perf_counter()
            result = compute()
            return time.perf_counter() - start, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.warm_up()
        begin.record()
        result = compute()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3, result


def make_busy(last: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Return a function that keeps the GPU busy with matrix products for about 24 milliseconds.

    A computation that is launched meanwhile, as in the middle of a model, does not wait for the
    host: its launch overhead is not part of its time.

    Args:
        last: Launches the last part of the work, such as a collective.
    """
    matrix = torch.randn(10_240, 10_240, dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        for _ in range(8):
            matrix @ matrix
        last()

    return work


def make_timer(last: Callable[[], object] = lambda: None) -> Timer:
    """Return a timer of the GPU of this process, kept busy beforehand, or else of the CPU.

    Args:
        last: See :func:`make_busy`.
    """
    if not torch.cuda.is_available():
        return Timer("cpu")
    return Timer("cuda", warm_up=make_busy(last))


def run_in_turn(
    computations: Mapping[str, Callable[[], Any]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Run all computations ``repeats`` times, in random orders, the same ones in every call.

    A GPU is slower after some work than after other work: the predecessor must vary.

    Args:
        computations: The computations by name.
        repeats: Number of repeats.
        tick: Called after every repeat.

    Yields:
        The results of each repeat, by name, in their order.
    """
    generator, order = random.Random(0), list(computations)
    for _ in range(repeats):
        generator.shuffle(order)
        yield {name: computations[name]() for name in order}
        tick()
