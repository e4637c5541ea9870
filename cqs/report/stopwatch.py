"""How long computations take on a device, and their turns."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from cqs.report.timing import make_busy, time_in_turn

Result = TypeVar("Result")


class Stopwatch:
    """Times computations on the GPU of this process, or without one on the CPU.

    A GPU is busy when it is told what to do, as in the middle of a model: what a launch costs is no
    part of a time.
    """

    def __init__(self, last: Callable[[], object] | None = None):
        """Prepare to time.

        Args:
            last: What the GPU does at the end of being busy.
        """
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._behind = self._make_busy(last) if self._device == "cuda" else None

    def time(self, compute: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of a computation, and its result."""
        results: list[Result] = []
        found = time_in_turn(
            {"": lambda: results.append(compute())}, 1, self._device, behind=self._behind
        )
        return found[""][0], results[0]

    def _make_busy(self, last: Callable[[], object] | None) -> Callable[[], None]:
        work = make_busy()

        def work_first() -> None:
            work()
            if last is not None:
                last()

        return work_first


def in_turn(
    computations: Mapping[str, Callable[[], Any]], repeats: int
) -> Iterator[dict[str, Any]]:
    """Run computations in turn, each time beginning with another one.

    A clock that drifts then meets all of them alike.

    Yields:
        For each repeat what they return, by name.
    """
    names = list(computations)
    for repeat in range(repeats):
        first = repeat % len(names)
        yield {name: computations[name]() for name in names[first:] + names[:first]}
