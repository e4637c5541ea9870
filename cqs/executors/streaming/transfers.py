"""Copies of rows between their source, the device and their target, overlapped with kernels."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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

    def __init__(self, device: torch.device):
        """Prepare for copies to and from ``device``."""
        self.device = device

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
        read_rows(source, *place, target)

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
        write_rows(target, *place, tensor)
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
        super().__init__(device)
        self._uploads, self._downloads = _CopyStream(device), _CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cqs-download")

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the current stream, which computes."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def upload(
        self, source: Tensor | Source, place: RowsOfHeads, target: Tensor, after: Any
    ) -> None:
        """Copy rows on the upload stream; the current stream waits for them."""
        self._uploads.stream.wait_event(after)
        # A copy engine reads pinned memory directly. Pageable memory would make the copy
        # synchronous, so that it is read into pinned buffers first.
        if isinstance(source, Tensor) and source.is_pinned():
            self._uploads.copy(target, _slice(source, *place))
        else:
            for heads, rows, into in _cut(place, target):
                buffer = self._uploads.acquire(into)
                read_rows(source, place.batch, heads, rows, buffer)
                self._uploads.copy(into, buffer)
                self._uploads.release(buffer)
        copied = self._uploads.stream.record_event()
        torch.cuda.current_stream(self.device).wait_event(copied)

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
        for copies in (self._uploads, self._downloads):
            copies.stream.synchronize()

    def _download(self, sent: list[Tensor], after: Any, target: Target, place: RowsOfHeads) -> None:
        """Copy a tensor of the GPU to rows of a target, through buffers if it is not pinned."""
        tensor, copies = sent.pop(), self._downloads
        copies.stream.wait_event(after)
        if isinstance(target, Tensor) and target.is_pinned():
            copies.copy(_slice(target, *place), tensor)
        else:
            for heads, rows, values in _cut(place, tensor):
                buffer = copies.acquire(values)
                copies.copy(buffer, values)
                copies.release(buffer, partial(write_rows, target, place.batch, heads, rows))
            copies.finish()
        copies.stream.synchronize()  # the caller may read the target once this returns


class _CopyStream:
    """A CUDA stream for copies in one direction, with few pinned staging buffers at a time.

    PyTorch's host allocator keeps the memory of staging buffers for the next ones.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._copies: list[tuple[torch.cuda.Event, Tensor, Callable[[Tensor], object]]] = []
        """Copies of staging buffers, oldest first: event, buffer, and what to do with it then."""

    def copy(self, into: Tensor, values: Tensor) -> None:
        """Launch copies of ``[heads, rows, ...]`` on the stream, whose heads may lie apart."""
        with torch.cuda.stream(self.stream):
            for head_rows, new in zip(into, values, strict=True):
                head_rows.copy_(new, non_blocking=True)

    def acquire(self, like: Tensor) -> Tensor:
        """Return a staging buffer in the shape and dtype of ``like``; may wait for others."""
        self.finish(_NUM_STAGING_BUFFERS - 1)
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def release(self, buffer: Tensor, use: Callable[[Tensor], object] = lambda _: None) -> None:
        """Free a staging buffer after all copies launched so far and then ``use`` of it."""
        self._copies.append((self.stream.record_event(), buffer, use))

    def finish(self, num_left: int = 0) -> None:
        """Wait for the oldest copies, and use their buffers, until so many are left."""
        while len(self._copies) > num_left:
            event, buffer, use = self._copies.pop(0)
            event.synchronize()
            use(buffer)


def _cut(place: RowsOfHeads, tensor: Tensor) -> Iterator[tuple[range, range, Tensor]]:
    """Yield heads, rows and the part of ``tensor`` ``[heads, rows, ...]`` of every staged copy.

    Copies fit a staging buffer: several heads with all rows, or some rows of a head.
    """
    row_bytes = tensor.shape[2:].numel() * tensor.element_size()
    length = min(max(_STAGING_BYTES // row_bytes, 1), len(place.rows))
    number = max(_STAGING_BYTES // (row_bytes * max(length, 1)), 1)
    for head in range(0, len(place.heads), number):
        for first in range(0, len(place.rows), max(length, 1)):
            part = tensor[head : head + number, first : first + length]
            yield place.heads[head : head + number], place.rows[first : first + length], part


def _slice(tensor: Tensor, batch: int, heads: range, rows: range) -> Tensor:
    return tensor[batch, heads.start : heads.stop, rows.start : rows.stop]
