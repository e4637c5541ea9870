"""CUDA streams that run head chunks in turns.

At the end of a kernel some multiprocessors are idle (tail effect). The next kernel, on another
stream, starts on them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import torch

OnStream = Callable[[int], AbstractContextManager[None]]
"""Returns a context that launches on the stream of a turn; the contexts must not be nested."""


@contextmanager
def open_streams(device: torch.device, number: int) -> Iterator[OnStream]:
    """Use streams that start after the current stream and that it waits for on exit.

    The allocator reuses memory that was freed on one of the streams on the same stream only.

    Args:
        device: The GPU of the streams.
        number: Number of streams; turns use them in rotation.
    """
    streams = _streams(device, number)
    with torch.cuda.device(device):
        outside = torch.cuda.current_stream()

        @contextmanager
        def on_stream(turn: int) -> Iterator[None]:
            # torch.cuda.stream() would look up the device and the previous stream on every call
            torch.cuda.set_stream(streams[turn % len(streams)])
            try:
                yield
            finally:
                torch.cuda.set_stream(outside)

        for stream in streams:
            stream.wait_stream(outside)
        try:
            yield on_stream
        finally:
            for stream in streams:
                outside.wait_stream(stream)


@lru_cache
def _streams(device: torch.device, number: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(number))
