"""The streaming loop: uploads, computation and downloads that overlap."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.executors.streaming.plan import START, HeldBlock, Position, StreamPlan
from cqs.executors.streaming.reduction import Chunks, Reduction
from cqs.executors.streaming.sources import Source, Target
from cqs.executors.streaming.transfers import DeviceCopies, RowsOfHeads, make_transfers
from cqs.worker import Worker


class Side(NamedTuple):
    """The tensors of the queries, or those of the keys and values, of a part of a problem."""

    sources: tuple[Source, ...]
    """Sources of ``[batch, heads, tokens, columns]`` each, of the whole problem."""
    has_kv_heads: bool
    """Whether the sources have KV heads; otherwise they have query heads."""
    batch: int = 0
    """First batch element of the part."""
    head: int = 0
    """First head of the part."""

    def rows(self, block: HeldBlock, tokens: range) -> RowsOfHeads:
        """Return the place of tokens of a block's heads in the sources."""
        heads = block.kv_heads if self.has_kv_heads else block.heads
        heads = range(self.head + heads.start, self.head + heads.stop)
        return RowsOfHeads(self.batch + block.batch, heads, tokens)


def stream(
    plan: StreamPlan,
    device: torch.device,
    worker: Worker,
    queries: Side,
    keys: Side,
    targets: Sequence[Target],
    *,
    start: Position = START,
    visited: Callable[[HeldBlock, range], None] = lambda block, tokens: None,
    finished: Callable[[HeldBlock, RowsOfHeads], None] = lambda block, place: None,
) -> None:
    """Execute a plan: upload blocks and chunks, reduce them, and download the results.

    On a GPU the upload of the next chunk and the download of the previous block overlap the
    computation. Autocast is disabled.

    Args:
        plan: The order of blocks and chunks, and their sizes.
        device: The device that computes.
        worker: Computes the chunks.
        queries: The query; for gradients also dO, O and LSE ``[batch, heads, seqlen_q, 1]``.
        keys: Key and value.
        targets: Destinations of output and LSE ``[batch, heads, seqlen_q, 1]``, or of the gradients
            of the side that is held.
        start: The position up to which results are final already.
        visited: Called with block and tokens after the computation of a chunk has been launched.
        finished: Called with block and place after all its results have been written.
    """
    with (
        torch.autocast(device.type, enabled=False),  # keep the dtypes of the sources
        closing(make_transfers(device)) as transfers,
    ):
        held, streamed = (keys, queries) if plan.holds_keys else (queries, keys)
        reduction = Reduction(plan, worker)
        blocks = _InputBuffers(transfers, plan, held, min(plan.rows, plan.num_held), device)
        chunks = _InputBuffers(
            transfers, plan, streamed, min(plan.chunk, plan.num_streamed), device
        )
        downloading: list[Callable[[], None]] = []

        def finish_download() -> None:
            while downloading:
                downloading.pop(0)()

        def load_chunks(block: HeldBlock) -> Chunks:
            for tokens in block.chunks:
                yield tokens, chunks.load(streamed.rows(block, tokens))
                chunks.release()
                visited(block, tokens)
            # The plan counts the memory of one download: finish it before results are allocated.
            finish_download()

        def download(block: HeldBlock, results: Sequence[Tensor]) -> None:
            event, place = transfers.record_event(), held.rows(block, block.tokens)
            for result, target in zip(results, targets, strict=True):
                downloading.append(transfers.download(result[0], event, target, place))
            downloading.append(partial(finished, block, place))

        for block in plan.blocks(start):
            own = blocks.load(held.rows(block, block.tokens))
            download(block, reduction.reduce(block, own, load_chunks(block)))
            blocks.release()
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
        self._transfers, self._sources = transfers, side.sources
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
        self._contents: list[RowsOfHeads | None] = [None] * plan.num_buffers
        # The allocator may return memory that launched kernels still use: wait for these too.
        self._used: list[Any] = [transfers.record_event()] * plan.num_buffers
        self._current = 0

    def load(self, rows: RowsOfHeads) -> list[Tensor]:
        """Return rows, ``[1, heads, tokens, columns]``; upload them unless a buffer has them."""
        if rows in self._contents:
            self._current = self._contents.index(rows)
        else:
            self._current = (self._current + 1) % len(self._buffers)
            for source, buffer in zip(self._sources, self._buffers[self._current], strict=True):
                target = buffer[:, : len(rows.rows)]
                self._transfers.upload(source, rows, target, self._used[self._current])
            self._contents[self._current] = rows
        return [buffer[None, :, : len(rows.rows)] for buffer in self._buffers[self._current]]

    def release(self) -> None:
        """Let the buffer be overwritten once everything launched so far has completed."""
        self._used[self._current] = self._transfers.record_event()
