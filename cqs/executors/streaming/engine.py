"""The streaming loop: uploads, computation and downloads that overlap."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cqs.executors.contract import Progress
from cqs.executors.streaming.plan import START, HeldBlock, Pass, Position, RowsOfHeads, StreamPlan
from cqs.executors.streaming.sources import Source, Target
from cqs.executors.streaming.transfers import DeviceCopies, GpuCopies
from cqs.partial import Partial, RunningMerge, lse_dtype
from cqs.problem import Problem
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import add_sinks
from cqs.worker import HeldTokens, Worker
from cqs.worker.units import Place, at_place

_COPIES = {"cpu": DeviceCopies, "cuda": GpuCopies}

Side = Sequence[Tensor | Source]
"""The tensors of the queries, or those of the keys and values, ``[batch, heads, tokens, ...]``."""
Chunks = Iterator[tuple[Worker, list[Any]]]
"""The chunks of a block: a worker, and the steps and held tokens that its methods take. The tensors
are overwritten after the next chunk was requested."""


def stream(
    plan: StreamPlan,
    device: torch.device,
    problem: Problem,
    backend: str | None,
    targets: Sequence[Target],
    *,
    backward_inputs: Sequence[Tensor] = (),
    start: Position = START,
    progress: Progress | None = None,
    finished: Callable[[HeldBlock], None] = lambda block: None,
) -> None:
    """Execute a plan: upload blocks and chunks, compute them, and download the results.

    On a GPU the upload of the next chunk and the download of the previous block overlap the
    computation. Autocast is disabled.

    Args:
        plan: The order of blocks and chunks, and their sizes.
        device: The device that computes.
        problem: The problem of the plan. Its tensors may be sources.
        backend: Name of the backend of all chunks; ``None`` means the preferred one.
        targets: Destinations of output and LSE ``[batch, heads, seqlen_q]``, or of the gradients of
            the side that is held.
        backward_inputs: For gradients dO, O and LSE ``[batch, heads, seqlen_q]``.
        start: The position up to which results are final already.
        progress: Advanced after the computation of a chunk has been launched.
        finished: Called with a block after all its results have been written.
    """
    with (
        torch.autocast(device.type, enabled=False),  # keep the dtypes of the sources
        closing(_COPIES[device.type](device)) as transfers,
    ):
        worker = Worker.of(problem, backend)
        queries: Side = [problem.query, *backward_inputs]
        held, streamed = plan.sides(queries, [problem.key, problem.value])
        blocks = _InputBuffers(transfers, plan, held, has_keys=plan.holds_keys)
        chunks = _InputBuffers(transfers, plan, streamed, has_keys=not plan.holds_keys)
        sinks = None if problem.sinks is None else problem.sinks.to(device)
        compute = partial(_attend, sinks) if plan.which == Pass.FORWARD else _differentiate
        downloading: list[Callable[[], None]] = []

        def finish_download() -> None:
            while downloading:
                downloading.pop(0)()

        def load_chunks(block: HeldBlock, own: list[Tensor]) -> Chunks:
            for tokens in block.chunks:
                prepared = _prepare(plan, worker, block, tokens, own, chunks.load(block, tokens))
                yield prepared
                if problem.terms is not None:
                    problem.terms.add_bias_sums(prepared[0].terms, block.batch, block.heads)
                chunks.release()
                if progress is not None:
                    progress.advance(plan.count(block.tokens, tokens) * len(block.heads))
            # The plan counts the memory of one download: finish it before results are allocated.
            finish_download()

        def download(block: HeldBlock, results: Sequence[Tensor]) -> None:
            event = transfers.record_event()
            place = block.place(block.tokens, has_keys=plan.holds_keys)
            for result, target in zip(results, targets, strict=True):
                downloading.append(transfers.download(result[0], event, target, place))
            downloading.append(partial(finished, block))

        for block in plan.blocks(start):
            own = blocks.load(block, block.tokens)
            download(block, compute(plan, block, own, load_chunks(block, own)))
            blocks.release()
        finish_download()


def _attend(
    sinks: Tensor | None,
    plan: StreamPlan,
    block: HeldBlock,
    held: Sequence[Tensor],
    chunks: Chunks,
) -> Partial:
    """Compute output and LSE of a block of queries, in memory of their own, from its chunks."""
    (query,) = held
    shape, sums = query.shape[:3], lse_dtype(query.dtype)
    output_shape = (*shape, plan.shape.value_columns)
    answer: Partial | None = None
    if len(block.chunks) > 1:
        empty = query.new_empty(output_shape, dtype=sums), query.new_empty(shape, dtype=sums)
        merge = RunningMerge(Partial(*empty))
        for worker, chunk in chunks:
            merge.add_own(worker.run_together(*chunk, dtype=sums))
        answer = merge.finish()
    for worker, chunk in chunks:  # one or none: nothing to merge, no buffer for sums
        answer = worker.run_together(*chunk, dtype=query.dtype)
    if answer is None:
        lse = query.new_full(shape, -torch.inf, dtype=sums)
        answer = Partial(query.new_zeros(output_shape), lse)
    if sinks is not None:
        add_sinks(answer, sinks[block.heads.start : block.heads.stop])
    return answer._replace(output=answer.output.to(query.dtype))


def _differentiate(
    plan: StreamPlan, block: HeldBlock, held: Sequence[Tensor], chunks: Chunks
) -> list[Tensor]:
    """Compute the gradients of a block's queries, or of its keys and values, from its chunks."""
    mine = held if plan.holds_keys else held[:1]
    sums = [torch.zeros_like(tensor, dtype=lse_dtype(tensor.dtype)) for tensor in mine]
    for worker, chunk in chunks:
        worker.add_gradients(sums, *chunk)
    return [total.to(held[0].dtype) for total in sums]


def _prepare(
    plan: StreamPlan,
    worker: Worker,
    block: HeldBlock,
    tokens: range,
    held: Sequence[Tensor],
    streamed: Sequence[Tensor],
) -> tuple[Worker, list[Any]]:
    """Return worker, steps and held tokens of one chunk, in the order that :class:`Worker` takes.

    If nothing depends on positions, they are counted from the first token of the block and of the
    chunk. Chunks of equal geometry then share cached tile lists.
    """
    shift = 0
    queries, keys = plan.sides(block.tokens, tokens)
    place = Place(block.batch, block.kv_heads.start, plan.group_size, plan.heads_at_once)
    worker = at_place(worker, place)
    if worker.terms is not None:
        worker = replace(worker, terms=_cut_terms(worker.terms, queries, keys, held[0].device))
    has_positions = worker.terms is not None and worker.terms.depends_on_positions
    if worker.dropout is worker.pattern is None and not has_positions:
        shift = queries.start - keys.start
        queries, keys = range(len(queries)), range(len(keys))
    query_tensors, key_tensors = plan.sides(held, streamed)
    query, *others = (HeldTokens(tensor, (queries,)) for tensor in query_tensors)
    key_and_value = (HeldTokens(tensor, (keys,)) for tensor in key_tensors)
    return worker, [plan.steps(queries, keys, shift), query, *key_and_value, *others]


def _cut_terms(terms: ScoreTerms, queries: range, keys: range, device: torch.device) -> ScoreTerms:
    """Return the score terms of a chunk on the device that computes, with sums of their own."""
    if terms.alibi_slopes is not None:
        terms = replace(terms, alibi_slopes=terms.alibi_slopes.to(device))
    if terms.bias is None:
        return terms
    bias = terms.cut(terms.bias, queries, keys).to(device)
    sums = terms.sums
    if terms.bias_requires_grad and sums:
        sums = torch.zeros_like(bias, dtype=sums[0].dtype), *sums[1:]
    return replace(terms, bias=bias, sums=sums, held=((queries,), (keys,)))


class _InputBuffers:
    """The device buffers of one side: one is filled while another is used."""

    def __init__(self, transfers: DeviceCopies, plan: StreamPlan, side: Side, *, has_keys: bool):
        """Allocate buffers for a block or chunk of a group of heads each."""
        self._transfers, self._sources, self._has_keys = transfers, side, has_keys
        num_heads = plan.heads_at_once * (1 if has_keys else plan.group_size)
        num_tokens = plan.visit[has_keys != plan.holds_keys]

        def allocate(source: Tensor | Source) -> Tensor:
            shape = num_heads, num_tokens, *source.shape[3:]
            return torch.empty(shape, dtype=source.dtype, device=transfers.device)

        self._buffers = [list(map(allocate, side)) for _ in range(plan.num_buffers)]
        self._contents: list[RowsOfHeads | None] = [None] * plan.num_buffers
        # The allocator may return memory that launched kernels still use: wait for these too.
        self._used: list[Any] = [transfers.record_event()] * plan.num_buffers
        self._current = 0

    def load(self, block: HeldBlock, tokens: range) -> list[Tensor]:
        """Return ``[1, heads, tokens, ...]``; upload them unless a buffer has them."""
        place = block.place(tokens, has_keys=self._has_keys)
        if place in self._contents:
            self._current = self._contents.index(place)
        else:
            self._current = (self._current + 1) % len(self._buffers)
            for source, buffer in zip(self._sources, self._buffers[self._current], strict=True):
                target = buffer[:, : len(tokens)]
                self._transfers.upload(source, place, target, self._used[self._current])
            self._contents[self._current] = place
        return [buffer[None, :, : len(tokens)] for buffer in self._buffers[self._current]]

    def release(self) -> None:
        """Let the buffer be overwritten once everything launched so far has completed."""
        self._used[self._current] = self._transfers.record_event()
