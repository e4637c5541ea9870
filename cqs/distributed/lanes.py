"""Streams of a GPU that compute in turns, so that one begins while another ends.

A kernel that keeps every multiprocessor busy has an end in which some have nothing left to do; on
another stream the next one already begins there.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch


class Lanes:
    """Some streams, which begin after the current one and which it waits for in the end.

    What a lane allocates and frees is taken again by that lane alone.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        """Use ``number`` streams; with one, the current one, as without a GPU."""
        several = device.type == "cuda" and number > 1
        self._streams = _streams(device, number) if several else ()

    def __enter__(self) -> "Lanes":
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def at(self, turn: int) -> AbstractContextManager[object]:
        """Launch on the lane whose turn it is."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[turn % len(self._streams)])


@lru_cache
def _streams(device: torch.device, number: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(number))
