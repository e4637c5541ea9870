"""Copies of rows between their source, the device and their target, overlapped with kernels."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from cqs.executors.streaming.plan import RowsOfHeads
from cqs.executors.streaming.sources import Source, Target, read_rows, write_rows

_STAGING_BYTES = 16 * 2**20
"""Bytes of one pinned staging buffer."""
_NUM_STAGING_BUFFERS = 4
"""Staging buffers of each direction."""


class DeviceCopies:
    """Copies to and from a device. An event completes after all work launched before it.

    This class copies synchronously, for computation on the CPU.
    """

    def record_event(self) -> Any:
        """Return an event that completes after everything launched so far."""

    def upload(
        self, source: Tensor | Source, place: RowsOfHeads, target: Tensor, after: Any
    ) -> None:
        """Copy rows to the device. Work that is launched later waits for the copy.

        Args:
            source: The tensor to read.
            place: The rows to copy.
            target: ``[heads, rows, ...]`` on the device, in the dtype of ``source``.
            after: The event after which ``target`` may be overwritten.
        """
        batch, heads, rows = place
        for head, into in zip(heads, target, strict=True):
            read_rows(source, batch, head, rows, into)

    def download(
        self, tensor: Tensor, after: Any, target: Target, place: RowsOfHeads
    ) -> Callable[[], None]:
        """Copy rows to a target. May return before the copy has completed.

        Args:
            tensor: ``[heads, rows, ...]`` on the device; must not be written to afterwards.
            after: The event after which ``tensor`` is complete.
            target: The tensor to write.
            place: The rows to write.

        Returns:
            A function that waits until the rows are written, and raises the error of the copy.
        """
        batch, heads, rows = place
        for head, values in zip(heads, tensor, strict=True):
            write_rows(target, batch, head, rows, values)
        return lambda: None

    def close(self) -> None:
        """Wait for all copies, including those whose results are unused."""


class GpuCopies(DeviceCopies):
    """Copies between host and GPU. Pageable memory is copied through pinned staging buffers.

    Downloads run on a separate thread, because the first write to newly allocated host memory (page
    faults) takes longer than the copy itself.
    """

    def __init__(self, device: torch.device):
        """Allocate staging buffers and create the CUDA streams and the download thread."""
        self._device = device
        self._upload_stream, self._download_stream = _CopyStream(device), _CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cqs-download")

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the current stream, which computes."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def upload(
        self, source: Tensor | Source, place: RowsOfHeads, target: Tensor, after: Any
    ) -> None:
        """Copy rows on the upload stream; the current stream waits for them."""
        batch, heads, rows = place
        copy_stream = self._upload_stream
        copy_stream.stream.wait_event(after)
        for head, into in zip(heads, target, strict=True):
            # A copy engine reads pinned memory directly. Pageable memory would make the copy
            # synchronous, so that it is read into pinned buffers first.
            if isinstance(source, Tensor) and source.is_pinned():
                with torch.cuda.stream(copy_stream.stream):
                    into.copy_(source[batch, head, rows.start : rows.stop], non_blocking=True)
                continue
            for part in _cut(rows, into):
                buffer = copy_stream.acquire(part, into)
                read_rows(source, batch, head, part, buffer)
                first = part.start - rows.start
                with torch.cuda.stream(copy_stream.stream):
                    into[first : first + len(part)].copy_(buffer, non_blocking=True)
                copy_stream.release()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copy_stream.stream.record_event())

    def download(
        self, tensor: Tensor, after: Any, target: Target, place: RowsOfHeads
    ) -> Callable[[], None]:
        """Copy rows on the download stream; copies overlap writes to the target."""
        # The thread pops the tensor, so that its memory is freed before the future completes.
        sent = [tensor]
        return self._thread.submit(self._download, sent, after, target, place).result

    def close(self) -> None:
        """Wait for the download thread and for both streams."""
        self._thread.shutdown()
        for copy_stream in (self._upload_stream, self._download_stream):
            copy_stream.stream.synchronize()

    def _download(self, sent: list[Tensor], after: Any, target: Target, place: RowsOfHeads) -> None:
        tensor, (batch, heads, rows) = sent.pop(), place
        copy_stream = self._download_stream
        copy_stream.stream.wait_event(after)
        if isinstance(target, Tensor) and target.is_pinned():
            with torch.cuda.stream(copy_stream.stream):
                for head, values in zip(heads, tensor, strict=True):
                    into = target[batch, head, rows.start : rows.stop]
                    into.copy_(values, non_blocking=True)
            copy_stream.stream.synchronize()  # the caller may read the target once this returns
            return
        waiting: list[tuple[int, range, Tensor, torch.cuda.Event]] = []
        for head, values in zip(heads, tensor, strict=True):
            for part in _cut(rows, values):
                buffer = copy_stream.acquire(part, values)
                first = part.start - rows.start
                with torch.cuda.stream(copy_stream.stream):
                    buffer.copy_(values[first : first + len(part)], non_blocking=True)
                waiting.append((head, part, buffer, copy_stream.release()))
                # acquire() reuses a buffer once its copy is done: write its rows before that.
                if len(waiting) == _NUM_STAGING_BUFFERS - 1:
                    _write(target, batch, *waiting.pop(0))
        for each in waiting:
            _write(target, batch, *each)


class _CopyStream:
    """A CUDA stream for copies in one direction, with a ring of pinned staging buffers."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._buffers = [
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_STAGING_BUFFERS)
        ]
        self._used: list[torch.cuda.Event | None] = [None] * _NUM_STAGING_BUFFERS
        self._next = 0

    def acquire(self, rows: range, like: Tensor) -> Tensor:
        """Wait for the next staging buffer of the ring and return it as ``[rows, ...]``."""
        if (event := self._used[self._next]) is not None:
            event.synchronize()
        buffer = self._buffers[self._next][: len(rows) * _row_bytes(like)]
        return buffer.view(like.dtype).view(len(rows), *like.shape[1:])

    def release(self) -> torch.cuda.Event:
        """Record an event after the copies of the buffer that was taken, and return it."""
        event: torch.cuda.Event = self.stream.record_event()
        self._used[self._next] = event
        self._next = (self._next + 1) % _NUM_STAGING_BUFFERS
        return event


def make_transfers(device: torch.device) -> DeviceCopies:
    """Return the copies for a device: asynchronous for a GPU, synchronous for the CPU."""
    return GpuCopies(device) if device.type == "cuda" else DeviceCopies()


def _write(
    target: Target, batch: int, head: int, rows: range, buffer: Tensor, event: torch.cuda.Event
) -> None:
    event.synchronize()
    write_rows(target, batch, head, rows, buffer)


def _cut(rows: range, like: Tensor) -> list[range]:
    """Cut rows into parts that fit a staging buffer."""
    length = max(_STAGING_BYTES // _row_bytes(like), 1)
    return [rows[i : i + length] for i in range(0, len(rows), length)]


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()
