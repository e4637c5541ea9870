"""CUDA streams that run head chunks in turns.

At the end of a kernel some multiprocessors are idle (tail effect). The next kernel, on another
stream, starts on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


class StreamPool:
    """CUDA streams that start after the current stream and that it waits for on exit.

    The allocator reuses memory that was freed on one of the streams on the same stream only.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        """Use ``number`` streams of a device; if it is 1 or there is no GPU, the current stream."""
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
        """Launch on stream ``turn`` (modulo their number); contexts must not be nested."""
        if not self._streams:
            yield
            return
        # torch.cuda.stream() would look up the device and the previous stream on every call
        torch.cuda.set_stream(self._streams[turn % len(self._streams)])
        try:
            yield
        finally:
            torch.cuda.set_stream(self._outside)


@lru_cache
def _streams(device: torch.device, number: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(number))
