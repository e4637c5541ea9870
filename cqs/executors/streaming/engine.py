"""The streaming loop: uploads, computation and downloads that overlap."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cqs.executors.streaming.plan import START, HeldBlock, Position, StreamPlan, Visit
from cqs.executors.streaming.sources import Source, Target
from cqs.executors.streaming.transfers import DeviceCopies, RowsOfHeads, make_transfers


class Side(NamedTuple):
    """The tensors of the queries, or those of the keys and values."""

    sources: tuple[Source, ...]
    """Sources of ``[batch, heads, tokens, columns]`` each."""
    has_kv_heads: bool
    """Whether the sources have KV heads; otherwise they have query heads."""


class Reduction(Protocol):
    """The computation of a block's results from the chunks that are streamed past it."""

    def add(self, visit: Visit, held: Sequence[Tensor], streamed: Sequence[Tensor]) -> None:
        """Launch the computation of one visit.

        Args:
            visit: The block and the chunk.
            held: Tensors of the block, ``[1, heads, tokens, columns]`` on the device.
            streamed: Tensors of the chunk, ``[1, heads, tokens, columns]`` on the device; empty if
                no live pair involves the block.
        """

    def finish(self, held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the block's results, ``[1, heads, tokens, columns]``, in memory of their own."""


def stream(
    plan: StreamPlan,
    device: torch.device,
    held: Side,
    streamed: Side,
    reduction: Reduction,
    targets: Sequence[Target],
    *,
    start: Position = START,
    visited: Callable[[Visit], None] = lambda visit: None,
    finished: Callable[[HeldBlock], None] = lambda block: None,
) -> None:
    """Execute a plan: upload blocks and chunks, reduce them, and download the results.

    On a GPU the upload of the next visit and the download of the previous block overlap the
    computation. Autocast is disabled.

    Args:
        plan: The order of blocks and chunks, and their sizes.
        device: The device that computes.
        held: The side that is divided into blocks, which stay on the device.
        streamed: The side that is divided into chunks, which are streamed past every block.
        reduction: The computation.
        targets: Destinations of the results of ``reduction.finish``, in its order.
        start: The position up to which results are final already.
        visited: Called after each visit has been launched.
        finished: Called after all results of a block have been written to the targets.
    """
    with (
        torch.autocast(device.type, enabled=False),  # keep the dtypes of the sources
        closing(make_transfers(device)) as transfers,
    ):
        blocks = _InputBuffers(transfers, plan, held, min(plan.rows, plan.num_held), device)
        chunks = _InputBuffers(
            transfers, plan, streamed, min(plan.chunk, plan.num_streamed), device
        )
        downloading: tuple[HeldBlock, list[Callable[[], None]]] | None = None

        def prefetch(visit: Visit) -> None:
            blocks.prefetch(visit.block, visit.block.tokens)
            if visit.tokens is not None:
                chunks.prefetch(visit.block, visit.tokens)

        def download(block: HeldBlock, results: Sequence[Tensor]) -> list[Callable[[], None]]:
            event, downloads = transfers.record_event(), []
            for result, target in zip(results, targets, strict=True):
                has_query_heads = result.shape[1] == len(block.heads)
                heads = block.heads if has_query_heads else block.kv_heads
                place = RowsOfHeads(block.batch, heads, block.tokens)
                downloads.append(transfers.download(result[0], event, target, place))
            return downloads

        def finish_download() -> None:
            nonlocal downloading
            if downloading is not None:
                (block, waits), downloading = downloading, None
                for wait in waits:
                    wait()
                finished(block)

        for current in plan.visits(start):
            prefetch(current)
            own, others = blocks.wait(), chunks.wait() if current.tokens is not None else []
            reduction.add(current, own, others)
            visited(current)
            if current.is_last:
                # The plan counts the memory of one download: finish it before the next starts.
                finish_download()
                downloading = current.block, download(current.block, reduction.finish(own))
            blocks.release()
            chunks.release()
        finish_download()


class _InputBuffers:
    """The device buffers of one side: one is filled while another is used."""

    def __init__(
        self,
        transfers: DeviceCopies,
        plan: StreamPlan,
        side: Side,
        num_tokens: int,
        device: torch.device,
    ):
        """Allocate buffers for ``num_tokens`` tokens of a group of heads each."""
        self._transfers, self._side = transfers, side
        num_heads = plan.heads_at_once * (1 if side.has_kv_heads else plan.group_size)
        self._buffers = [
            [
                torch.empty(
                    (num_heads, num_tokens, source.shape[3]), dtype=source.dtype, device=device
                )
                for source in side.sources
            ]
            for _ in range(plan.num_buffers)
        ]
        self._contents: list[Any] = [None] * plan.num_buffers
        self._uploaded: list[Any] = [None] * plan.num_buffers
        # The allocator may return memory that launched kernels still use: wait for these too.
        self._used: list[Any] = [transfers.record_event()] * plan.num_buffers
        self._current = 0

    def prefetch(self, block: HeldBlock, tokens: range) -> None:
        """Start the upload of tokens of a block's heads, unless a buffer contains them."""
        heads = block.kv_heads if self._side.has_kv_heads else block.heads
        wanted = RowsOfHeads(block.batch, heads, tokens)
        if wanted in self._contents:
            self._current = self._contents.index(wanted)
            return
        self._current = here = (self._current + 1) % len(self._contents)
        for source, buffer in zip(self._side.sources, self._buffers[here], strict=True):
            self._uploaded[here] = self._transfers.upload(
                source, wanted, buffer[:, : len(tokens)], self._used[here]
            )
        self._contents[here] = wanted

    def wait(self) -> list[Tensor]:
        """Wait for the last prefetch and return its tokens, ``[1, heads, tokens, columns]``."""
        self._transfers.wait(self._uploaded[self._current])
        _, _, tokens = self._contents[self._current]
        return [buffer[None, :, : len(tokens)] for buffer in self._buffers[self._current]]

    def release(self) -> None:
        """Let the buffer be overwritten once everything launched so far has completed."""
        self._used[self._current] = self._transfers.record_event()
