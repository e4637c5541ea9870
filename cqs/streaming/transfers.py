"""Rows of heads from where a sequence is to a device, and back, beside what the device computes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from cqs.streaming.sources import InMemory, Source, Target

_PIECE_BYTES = 16 * 2**20
_NUM_PIECES = 4


class Transfers(Protocol):
    """Copies to and from a device. What it calls a mark says how far the device has come."""

    def mark(self) -> Any:
        """Return a mark of all that was launched."""

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> Any:
        """Copy rows of some heads to ``[heads, rows, dim]`` once a mark is passed; return another.

        The caller may go on before the copy is done.
        """

    def wait(self, mark: Any) -> None:
        """Have the device go on once a mark is passed."""

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Copy ``[heads, rows, dim]`` back once a mark is passed; what is returned waits for it.

        The caller may go on before, but must not write to the tensor.
        """

    def close(self) -> None:
        """Wait for all copies, those too that nobody will use."""


class SameMemory:
    """The device is the CPU."""

    def mark(self) -> None:
        """Everything is done already."""

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> None:
        """Read rows straight into the tensor."""
        for head, into in zip(heads, target, strict=True):
            source.read(batch, head, rows, into)

    def wait(self, mark: Any) -> None:
        """Go on."""

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Write rows."""
        for head, values in zip(heads, tensor, strict=True):
            target.write(batch, head, rows, values)
        return lambda: None

    def close(self) -> None:
        """There is nothing to wait for."""


class OverLink:
    """A GPU: rows that are not in pinned memory go through some pinned pieces of it, in turn.

    Results go back on a thread of their own: to touch new memory takes longer than to copy it.
    """

    def __init__(self, device: torch.device):
        """Allocate the pieces."""
        self._device = device
        self._up, self._down = _CopyStream(device), _CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cqs-download")

    def mark(self) -> torch.cuda.Event:
        """Record an event on the stream that computes."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> torch.cuda.Event:
        """Copy beside the computation."""
        stream_index = self._up
        if after is not None:
            stream_index.stream.wait_event(after)
        for head, into in zip(heads, target, strict=True):
            if isinstance(source, InMemory) and source.tensor.is_pinned():
                with torch.cuda.stream(stream_index.stream):
                    into.copy_(source.rows_in_place(batch, head, rows), non_blocking=True)
                continue
            for part in _cut(rows, into):
                piece = stream_index.take(part, into)
                source.read(batch, head, part, piece)
                first = part.start - rows.start
                with torch.cuda.stream(stream_index.stream):
                    into[first : first + len(part)].copy_(piece, non_blocking=True)
                stream_index.give_back()
        arrived: torch.cuda.Event = stream_index.stream.record_event()
        return arrived

    def wait(self, mark: Any) -> None:
        """Let the stream that computes wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Copy beside the computation, a piece while the one before is written."""
        leaving = [tensor]  # taken out on the thread: freed before it says that it is done
        return self._thread.submit(
            self._download, leaving, after, target, batch, heads, rows
        ).result

    def close(self) -> None:
        """End the thread and both ways."""
        self._thread.shutdown()
        for stream_index in (self._up, self._down):
            stream_index.stream.synchronize()

    def _download(
        self,
        leaving: list[Tensor],
        after: Any,
        target: Target,
        batch: int,
        heads: range,
        rows: range,
    ) -> None:
        tensor = leaving.pop()
        stream_index = self._down
        stream_index.stream.wait_event(after)
        if isinstance(target, InMemory) and target.tensor.is_pinned():
            with torch.cuda.stream(stream_index.stream):
                for head, values in zip(heads, tensor, strict=True):
                    into = target.rows_in_place(batch, head, rows)
                    into.copy_(values, non_blocking=True)
            stream_index.stream.synchronize()
            return
        waiting: list[tuple[int, range, Tensor, torch.cuda.Event]] = []
        for head, values in zip(heads, tensor, strict=True):
            for part in _cut(rows, values):
                piece = stream_index.take(part, values)
                first = part.start - rows.start
                with torch.cuda.stream(stream_index.stream):
                    piece.copy_(values[first : first + len(part)], non_blocking=True)
                waiting.append((head, part, piece, stream_index.give_back()))
                if len(waiting) == _NUM_PIECES - 1:
                    _write(target, batch, *waiting.pop(0))
        for each in waiting:
            _write(target, batch, *each)


class _CopyStream:
    """One way over the link: a stream, and pinned pieces that take turns."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._pieces = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_PIECES)
        ]
        self._used: list[torch.cuda.Event | None] = [None] * _NUM_PIECES
        self._next = 0

    def take(self, rows: range, like: Tensor) -> Tensor:
        """Return a piece that nothing uses, as ``[rows, dim]``."""
        if (event := self._used[self._next]) is not None:
            event.synchronize()
        num_bytes = len(rows) * like.shape[1] * like.element_size()
        piece = self._pieces[self._next][:num_bytes]
        return piece.view(like.dtype).view(len(rows), like.shape[1])

    def give_back(self) -> torch.cuda.Event:
        """Note that what the stream has to do is the last that uses the piece."""
        event: torch.cuda.Event = self.stream.record_event()
        self._used[self._next] = event
        self._next = (self._next + 1) % _NUM_PIECES
        return event


def make_transfers(device: torch.device) -> Transfers:
    """Return what copies to and from a device."""
    return OverLink(device) if device.type == "cuda" else SameMemory()


def _write(
    target: Target, batch: int, head: int, rows: range, piece: Tensor, event: torch.cuda.Event
) -> None:
    event.synchronize()
    target.write(batch, head, rows, piece)


def _cut(rows: range, like: Tensor) -> list[range]:
    """Cut rows into parts that fit a piece."""
    length = max(_PIECE_BYTES // (like.shape[1] * like.element_size()), 1)
    return [rows[i : i + length] for i in range(0, len(rows), length)]
