"""Seconds of computations, in turn, so that a drifting clock affects all of them equally."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Timer:
    """Times computations on a GPU or a CPU.

    A CPU is timed by the wall clock, a GPU from one event of its stream to another.
    """

    def __init__(
        self,
        device_type: str,
        *,
        warm_up: Callable[[], object] | None = None,
        by_wall_clock: bool = False,
    ):
        """Prepare to time.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            warm_up: Launches GPU work that precedes every computation and is not timed, such as
                :func:`make_busy`; ``None`` starts on an idle GPU.
            by_wall_clock: Time a GPU by the wall clock too, from an idle GPU to an idle GPU: for
                computations that use several streams or copy to the host.
        """
        self._on_gpu = device_type == "cuda"
        self._warm_up = warm_up
        self._by_events = self._on_gpu and not by_wall_clock

    def time(self, compute: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of a computation, and its result."""
        if self._on_gpu:
            torch.cuda.synchronize()
            if self._warm_up is not None:
                self._warm_up()
        if not self._by_events:
            start = time.perf_counter()
            result = compute()
            if self._on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - start, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def turns(names: Iterable[str], number: int) -> Iterator[list[str]]:
    """Yield the names in ``number`` random orders, the same ones in every call.

    A GPU is slower after some work than after other work: the predecessor must vary.
    """
    generator, order = random.Random(0), list(names)
    for _ in range(number):
        generator.shuffle(order)
        yield list(order)


def run_in_turn(
    computations: Mapping[str, Callable[[], Any]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Run all computations ``repeats`` times, in the orders of :func:`turns`.

    Args:
        computations: The computations by name.
        repeats: Number of repeats.
        tick: Called after every repeat.

    Yields:
        The results of each repeat, by name.
    """
    for order in turns(computations, repeats):
        yield {name: computations[name]() for name in order}
        tick()
