"""Forward and backward pass of one rank: its task of the plan and the exchanges around it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from cqs.executors.autograd import Kept
from cqs.executors.distributed.backward_pass import BackwardPass
from cqs.executors.distributed.chunk_pass import ChunkPass, ForwardPass, Sides
from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.transport.exchange import Exchange, Transport
from cqs.executors.distributed.transport.streams import open_streams
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import add_sinks
from cqs.scheduler.rounds import QUERIES, run_chunks
from cqs.worker import Worker

_MOST_AT_ONCE = 196_608
"""Number of keys of a rank above which the head chunks of a forward pass run one after another.
Keys and values of two concurrent chunks would exceed the L2 cache and make both slower."""
_ChunkPass = TypeVar("_ChunkPass", bound=ChunkPass)


@dataclass(frozen=True)
class RankTask:
    """Computes the task of one rank and exchanges its inputs and results with other ranks.

    Every head chunk is a :class:`ChunkPass`. Without a limit of memory it has one round, and the
    chunks overlap: the tokens of some are in transit while others are computed, and results are
    merged at the end. With a limit the chunks follow one another, and their tensors are freed as
    soon as possible.
    """

    transport: Transport
    """Transport of this rank's exchanges."""
    layout: Layout
    """The rank's work and routing tables."""
    worker: Worker
    """Worker for all heads; its dropout mask is that of the whole problem."""
    with_lse: bool
    """Whether the LSE of the answer is required; otherwise it may stay uninitialised."""
    keeps: bool
    """Whether to keep tensors for the backward pass."""

    def attend(self, problem: Problem, terms: ScoreTerms | None = None) -> tuple[Partial, Kept]:
        """Send tokens out, compute this rank's task, and merge the results for its shard.

        Args:
            problem: This rank's shard: query, key and value ``[batch, heads, rows, head_dim]``.
            terms: Score terms of the heads and tokens of this rank's task, of all head chunks.

        Returns:
            Output and LSE of this rank's queries, and the kept tensors.

        Raises:
            LostError: Another rank has failed or does not answer (messages only).
        """
        layout, sinks = self.layout, problem.sinks
        shards, answer = (problem.query, problem.key, problem.value), problem.empty_answer()
        most = 1 if layout.num_keys > _MOST_AT_ONCE else self.transport.num_streams
        final_sinks = sinks if layout.is_final else None

        def make(exchange: Exchange, chunk: HeadChunk) -> ForwardPass:
            heads, worker = chunk.query_heads[layout.rank], self._worker_of(chunk, terms)
            return ForwardPass(
                *(layout, exchange, chunk, worker, (shards[:1], shards[1:])),
                answer=answer,
                sinks=None if final_sinks is None else final_sinks[heads.start : heads.stop],
                with_lse=self.with_lse,
                keep=self.keeps,
            )

        passes = self._run(make, problem.query.device, most)
        if final_sinks is not None:  # rows with keys were computed with them
            row_sinks = final_sinks.detach().to(answer.lse.dtype).unsqueeze(-1)
            torch.maximum(answer.lse, row_sinks, out=answer.lse)
        elif sinks is not None:
            add_sinks(answer, sinks)
        if not self.keeps:
            return answer, ()
        kept = shards if layout.is_bounded else [tensor for one in passes for tensor in one.kept]
        return answer, (*kept, *(() if layout.is_final else answer))

    def differentiate(
        self,
        shapes: Sequence[torch.Size],
        kept: Kept,
        grad_output: Tensor,
        terms: ScoreTerms | None = None,
    ) -> Gradients:
        """Send the gradient of the output out, and sum the gradients for this rank's shard.

        Args:
            shapes: Shapes of this rank's query, key and value.
            kept: Tensors that :meth:`attend` kept.
            grad_output: Gradient of this rank's output, ``[batch, heads, rows, value_dim]``.
            terms: Score terms of this rank's task, with sums.
        """
        layout, answer = self.layout, Kept()
        gradients = cache(partial(self.new_gradients, grad_output, shapes))
        if not layout.is_final:
            kept, answer = kept[:-2], kept[-2:]
        sent: Sides = (grad_output, *answer), ()
        if layout.is_bounded:
            (query, *keys), kept = kept, ()
            sent = (query, *sent[QUERIES]), keys
        num_kept = len(kept) // len(layout.chunks)

        def make(exchange: Exchange, chunk: HeadChunk) -> BackwardPass:
            held = kept[chunk.index * num_kept :][:num_kept]
            worker = self._worker_of(chunk, terms)
            fields = layout, exchange, chunk, worker, sent
            return BackwardPass(*fields, gradients=gradients, kept=held)

        streams = self.transport.num_streams
        self._run(make, grad_output.device, streams, allocate=gradients)
        return gradients()

    def new_gradients(self, like: Tensor, shapes: Sequence[torch.Size]) -> Gradients:
        """Allocate gradients; with a limit of memory they are zeros to which parts are added."""
        new = like.new_zeros if self.layout.is_bounded else like.new_empty
        return Gradients(*map(new, shapes))

    def _run(
        self,
        make: Callable[[Exchange, HeadChunk], _ChunkPass],
        device: torch.device,
        most: int,
        allocate: Callable[[], object] | None = None,
    ) -> list[_ChunkPass]:
        """Run the passes of all head chunks, and return them unless memory is limited.

        Args:
            make: Makes the pass of a head chunk.
            device: Device of the tensors.
            most: Most head chunks that may be computed at the same time.
            allocate: See :func:`cqs.scheduler.rounds.run_chunks`.
        """
        chunks, is_bounded = self.layout.chunks, self.layout.is_bounded
        num_chunks = None if is_bounded else len(chunks)
        num_turns = None if is_bounded else self.transport.num_turns
        at_once = 1 if is_bounded else min(most, len(chunks))
        streams = nullcontext(nullcontext) if at_once == 1 else open_streams(device, at_once)
        with Exchange(self.transport, num_chunks) as exchange, streams as on_stream:
            passes = map(partial(make, exchange), chunks)
            return run_chunks(passes, num_turns, on_stream, allocate)

    def _worker_of(self, chunk: HeadChunk, terms: ScoreTerms | None) -> Worker:
        """Return the worker for the heads of a chunk, on which dropout and terms depend."""
        heads, worker = chunk.query_heads[self.layout.rank], self.worker
        if worker.dropout is not None:
            worker = replace(worker, dropout=worker.dropout.moved(0, heads.start))
        if terms is None:
            return worker
        first = self.layout.chunks[0].query_heads[self.layout.rank].start
        chunk_terms = terms.part(slice(None), slice(heads.start - first, heads.stop - first))
        return replace(worker, terms=chunk_terms)
