"""A clock that attributes time to the parts of a computation."""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Attributes the time of a GPU or CPU to the parts of a computation."""

    def __init__(self, device_type: str, parts: Sequence[str]) -> None:
        """Take the device type, ``"cuda"`` or ``"cpu"``, and the names of all parts."""
        self._parts = parts
        self._on_gpu = device_type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    @property
    def part(self) -> str:
        """The current part."""
        return self._marks[-1][0]

    def enter(self, part: str) -> None:
        """Start a part."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def stop(self) -> dict[str, float]:
        """End the last part, and return the seconds of each."""
        self.enter(self._parts[-1])
        if self._on_gpu:
            torch.cuda.synchronize()
        totals = dict.fromkeys(self._parts, 0.0)
        for (part, start), (_, end) in pairwise(self._marks):
            totals[part] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        return totals

    def attributed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function whose time counts as a part; the part before goes on afterwards."""

        @wraps(function)
        def marked(*arguments: Any, **options: Any) -> Any:
            before = self.part
            self.enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self.enter(before)

        return marked
