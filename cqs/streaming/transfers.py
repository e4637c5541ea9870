"""Copies of rows between their source, the device and their target, overlapped with kernels."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from cqs.streaming.sources import InMemory, Source, Target

_PIECE_BYTES = 16 * 2**20
"""Bytes of one pinned staging buffer."""
_NUM_PIECES = 4
"""Staging buffers of each direction."""


class DeviceCopies(Protocol):
    """Copies to and from a device. A mark is passed when the work launched before it is done."""

    def mark(self) -> Any:
        """Return a mark that is passed when everything launched so far has completed."""

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> Any:
        """Copy rows to the device. May return before the copy has completed.

        Args:
            source: The tensor to read.
            batch: Batch element.
            heads: Heads to copy.
            rows: Tokens to copy.
            target: ``[heads, rows, dim]`` on the device, in the dtype of ``source``.
            after: The mark after which ``target`` may be overwritten, or None.

        Returns:
            A mark that is passed when the copy has completed.
        """

    def wait(self, mark: Any) -> None:
        """Make work that is launched from now on wait for a mark."""

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Copy rows to a target. May return before the copy has completed.

        Args:
            tensor: ``[heads, rows, dim]`` on the device; must not be written to afterwards.
            after: The mark after which ``tensor`` is complete.
            target: The tensor to write.
            batch: Batch element.
            heads: Heads to write.
            rows: Tokens to write.

        Returns:
            A function that waits until the rows are written, and raises the error of the copy.
        """

    def close(self) -> None:
        """Wait for all copies, including those whose results are unused."""


class SameMemory:
    """Synchronous copies, for computation on the CPU."""

    def mark(self) -> None:
        """Return None, because every operation has completed when it returns."""

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> None:
        """Read rows into the tensor."""
        for head, into in zip(heads, target, strict=True):
            source.read(batch, head, rows, into)

    def wait(self, mark: Any) -> None:
        """Do nothing."""

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Write rows to the target."""
        for head, values in zip(heads, tensor, strict=True):
            target.write(batch, head, rows, values)
        return lambda: None

    def close(self) -> None:
        """Do nothing."""


class OverLink:
    """Copies between host and GPU. Pageable memory is copied through pinned staging buffers.

    Downloads run on a separate thread, because the first write to newly allocated host memory (page
    faults) takes longer than the copy itself.
    """

    def __init__(self, device: torch.device):
        """Allocate staging buffers and create the CUDA streams and the download thread."""
        self._device = device
        self._up, self._down = _CopyStream(device), _CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cqs-download")

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream, which computes."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def upload(
        self, source: Source, batch: int, heads: range, rows: range, target: Tensor, after: Any
    ) -> torch.cuda.Event:
        """Copy rows on the upload stream."""
        copies = self._up
        if after is not None:
            copies.stream.wait_event(after)
        for head, into in zip(heads, target, strict=True):
            if isinstance(source, InMemory) and source.tensor.is_pinned():
                with torch.cuda.stream(copies.stream):
                    into.copy_(source.rows_in_place(batch, head, rows), non_blocking=True)
                continue
            for part in _cut(rows, into):
                piece = copies.take(part, into)
                source.read(batch, head, part, piece)
                first = part.start - rows.start
                with torch.cuda.stream(copies.stream):
                    into[first : first + len(part)].copy_(piece, non_blocking=True)
                copies.give_back()
        arrived: torch.cuda.Event = copies.stream.record_event()
        return arrived

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def download(
        self, tensor: Tensor, after: Any, target: Target, batch: int, heads: range, rows: range
    ) -> Callable[[], None]:
        """Copy rows on the download stream; copies overlap writes to the target."""
        # The thread pops the tensor, so that its memory is freed before the future completes.
        leaving = [tensor]
        return self._thread.submit(
            self._download, leaving, after, target, batch, heads, rows
        ).result

    def close(self) -> None:
        """Wait for the download thread and for both streams."""
        self._thread.shutdown()
        for copies in (self._up, self._down):
            copies.stream.synchronize()

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
        copies = self._down
        copies.stream.wait_event(after)
        if isinstance(target, InMemory) and target.tensor.is_pinned():
            with torch.cuda.stream(copies.stream):
                for head, values in zip(heads, tensor, strict=True):
                    into = target.rows_in_place(batch, head, rows)
                    into.copy_(values, non_blocking=True)
            copies.stream.synchronize()
            return
        waiting: list[tuple[int, range, Tensor, torch.cuda.Event]] = []
        for head, values in zip(heads, tensor, strict=True):
            for part in _cut(rows, values):
                piece = copies.take(part, values)
                first = part.start - rows.start
                with torch.cuda.stream(copies.stream):
                    piece.copy_(values[first : first + len(part)], non_blocking=True)
                waiting.append((head, part, piece, copies.give_back()))
                # take() reuses a buffer once its copy is done: write its rows before that.
                if len(waiting) == _NUM_PIECES - 1:
                    _write(target, batch, *waiting.pop(0))
        for each in waiting:
            _write(target, batch, *each)


class _CopyStream:
    """A CUDA stream for copies in one direction, with a ring of pinned staging buffers."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._pieces = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_PIECES)
        ]
        self._used: list[torch.cuda.Event | None] = [None] * _NUM_PIECES
        self._next = 0

    def take(self, rows: range, like: Tensor) -> Tensor:
        """Wait for the next staging buffer of the ring and return it as ``[rows, dim]``."""
        if (event := self._used[self._next]) is not None:
            event.synchronize()
        num_bytes = len(rows) * like.shape[1] * like.element_size()
        piece = self._pieces[self._next][:num_bytes]
        return piece.view(like.dtype).view(len(rows), like.shape[1])

    def give_back(self) -> torch.cuda.Event:
        """Record an event after the copies of the buffer that was taken, and return it."""
        event: torch.cuda.Event = self.stream.record_event()
        self._used[self._next] = event
        self._next = (self._next + 1) % _NUM_PIECES
        return event


def make_transfers(device: torch.device) -> DeviceCopies:
    """Return the copies for a device: asynchronous for a GPU, synchronous for the CPU."""
    return OverLink(device) if device.type == "cuda" else SameMemory()


def _write(
    target: Target, batch: int, head: int, rows: range, piece: Tensor, event: torch.cuda.Event
) -> None:
    event.synchronize()
    target.write(batch, head, rows, piece)


def _cut(rows: range, like: Tensor) -> list[range]:
    """Cut rows into parts that fit a staging buffer."""
    length = max(_PIECE_BYTES // (like.shape[1] * like.element_size()), 1)
    return [rows[i : i + length] for i in range(0, len(rows), length)]
