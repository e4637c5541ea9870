"""Streams of a GPU that compute in turns, so that one begins while another ends.

A kernel that keeps every multiprocessor busy has an end in which some have nothing left to do; on
another stream the next one already begins there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


class StreamPool:
    """Some streams, which begin after the current one and which it waits for in the end.

    What a stream allocates and frees is taken again by that stream alone.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        """Use ``number`` streams; with one, the current one, as without a GPU."""
        several = device.type == "cuda" and number > 1
        self._streams = _streams(device, number) if several else ()

    def __enter__(self) -> "StreamPool":
        if self._streams:
            self._device = torch.cuda.device(self._streams[0].device)
            self._device.__enter__()
            self._outside = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(self._outside)
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            self._outside.wait_stream(stream)
        if self._streams:
            self._device.__exit__(*error)

    @contextmanager
    def at(self, turn: int) -> Iterator[None]:
        """Launch on the stream whose turn it is; not within another turn."""
        if not self._streams:
            yield
            return
        # torch.cuda.stream() would look up what is known here, several times
        torch.cuda.set_stream(self._streams[turn % len(self._streams)])
        try:
            yield
        finally:
            torch.cuda.set_stream(self._outside)


@lru_cache
def _streams(device: torch.device, number: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(number))
