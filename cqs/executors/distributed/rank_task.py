"""Forward and backward pass of one rank: its task of the plan and the exchanges around it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cqs.executors.autograd import Kept
from cqs.executors.distributed.exchange import (
    Exchange,
    HeadsOfRanks,
    by_heads,
    by_route,
    schedule_back,
)
from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.split_steps import see_only
from cqs.executors.distributed.transport.row_copies import copy_rows
from cqs.executors.distributed.transport.streams import open_streams
from cqs.executors.distributed.transport.transfer import Pass, Transfer, Transport
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows, sum_rows
from cqs.problem import Problem
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import add_sinks
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker

_MOST_AT_ONCE = 196_608
"""Number of keys of a rank above which the head chunks of a forward pass run one after another.
Keys and values of two concurrent chunks would exceed the L2 cache and make both slower."""
AGREED = Pass()


@dataclass(frozen=True)
class RankTask:
    """Computes the task of one rank and exchanges its inputs and results with other ranks."""

    transport: Transport
    """Transport of this rank's exchanges."""
    layout: Layout
    """The rank's work and routing tables."""
    worker: Worker
    """Worker for all heads; its dropout mask is that of the whole problem."""

    def attend(
        self,
        problem: Problem,
        terms: ScoreTerms | None = None,
        *,
        with_lse: bool,
        keep: bool,
        of_pass: Pass = AGREED,
    ) -> tuple[Partial, Kept]:
        """Send tokens out, compute this rank's task, and merge the results for its shard.

        Args:
            problem: This rank's shard: query, key and value ``[batch, heads, rows, head_dim]``.
            terms: Score terms of the heads and tokens of this rank's task, of all head chunks.
            with_lse: Whether the LSE of the answer is required; otherwise it may stay
                uninitialised.
            keep: Whether to keep tensors for the backward pass.
            of_pass: The pass; by default one on which the ranks have agreed.

        Returns:
            Output and LSE of this rank's queries, and the kept tensors.

        Raises:
            LostError: Another rank has failed or does not answer (messages only).
        """
        layout = self.layout
        shards = problem.query, problem.key, problem.value
        answer = problem.empty_answer()
        kept: list[Tensor] = []
        at_once = 1 if layout.num_keys > _MOST_AT_ONCE else self.transport.num_streams
        with (
            # Every rank keeps a copy of the tokens that it computes with.
            Exchange(self.transport, of_pass, len(layout.chunks)) as exchange,
            open_streams(problem.query.device, min(at_once, len(layout.chunks))) as on_stream,
        ):
            heads = [chunk.heads for chunk in layout.chunks]
            incoming = exchange.send_out(on_stream, shards, heads, layout.routes)
            tasks = [
                ChunkTask(
                    layout,
                    each,
                    self._worker_of(each, terms),
                    shards,
                    sinks=self._sinks_of(problem, each),
                )
                for each in layout.chunks
            ]
            returning: list[Transfer] = []
            for i, (task, transfer) in enumerate(zip(tasks, incoming, strict=True)):
                with on_stream(i):
                    if i == 0:  # overlaps the exchange of the first head chunk
                        task.compute_own()
                    task.held = transfer.wait()
                    back, results = task.send_results(exchange, with_lse=with_lse, keep=keep)
                    returning.append(back)
                    task.compute_home(answer, keep=keep)
                    kept += [*task.held, *results] if keep else []
                    task.held = []  # frees its memory for later head chunks
            for i, task in enumerate(tasks[1:], 1):  # overlaps the last results
                with on_stream(i):
                    task.compute_own()
            for i, task in enumerate(tasks):
                with on_stream(i):
                    task.merge(answer, returning[i].wait())
        if problem.sinks is not None and layout.is_final:  # computed with sinks, where with keys
            of_rows = problem.sinks.detach().to(answer.lse.dtype).unsqueeze(-1)
            torch.maximum(answer.lse, of_rows, out=answer.lse)
        elif problem.sinks is not None:
            add_sinks(answer, problem.sinks)
        if keep and not layout.is_final:
            kept += answer
        return answer, tuple(kept)

    def differentiate(
        self,
        shapes: Sequence[torch.Size],
        kept: Kept,
        grad_output: Tensor,
        terms: ScoreTerms | None = None,
        of_pass: Pass = AGREED,
    ) -> Gradients:
        """Send the gradient of the output out, and sum the gradients for this rank's shard.

        Args:
            shapes: Shapes of this rank's query, key and value.
            kept: Tensors that :meth:`attend` kept.
            grad_output: Gradient of this rank's output, ``[batch, heads, rows, value_dim]``.
            terms: Score terms of this rank's task, with sums.
            of_pass: The pass.
        """
        layout, of_shard = self.layout, [grad_output]
        if not layout.is_final:
            kept, answer = kept[:-2], kept[-2:]
            of_shard += answer
        each_kept = len(kept) // len(layout.chunks)
        at_once = min(self.transport.num_streams, len(layout.chunks))
        with (
            Exchange(self.transport, of_pass, len(layout.chunks)) as exchange,
            open_streams(grad_output.device, at_once) as on_stream,
        ):
            returning, routes = [], [layout.of_queries] * len(of_shard)
            heads = [[chunk.query_heads] * len(of_shard) for chunk in layout.chunks]
            incoming = exchange.send_out(on_stream, of_shard, heads, routes)
            for i, (chunk, transfer) in enumerate(zip(layout.chunks, incoming, strict=True)):
                with on_stream(i):
                    query, key, value, *own = kept[i * each_kept : (i + 1) * each_kept]
                    worker, held = self._worker_of(chunk, terms), [query, key, value]
                    task = ChunkTask(layout, chunk, worker, held=held)
                    found = task.compute_gradients(*transfer.wait(), *own)
                    returning.append(exchange.send_back(i, found, layout.routes))
            gradients = Gradients(*map(grad_output.new_empty, shapes))
            for i, transfer in enumerate(returning):
                with on_stream(i):
                    _add_up(gradients, transfer.wait(), layout, layout.chunks[i])
        return gradients

    def _sinks_of(self, problem: Problem, chunk: HeadChunk) -> Tensor | None:
        """Return the sinks of the heads that this rank computes, if its results are final."""
        if problem.sinks is None or not self.layout.is_final:
            return None
        heads = chunk.query_heads[self.layout.rank]
        return problem.sinks[heads.start : heads.stop]

    def _worker_of(self, chunk: HeadChunk, terms: ScoreTerms | None) -> Worker:
        heads, worker = chunk.query_heads[self.layout.rank], self.worker
        if worker.dropout is not None:
            worker = replace(worker, dropout=worker.dropout.moved(0, heads.start))
        if terms is None:
            return worker
        first = self.layout.chunks[0].query_heads[self.layout.rank].start
        of_chunk = terms.part(slice(None), slice(heads.start - first, heads.stop - first))
        return replace(worker, terms=of_chunk)


@dataclass
class ChunkTask:
    """Computes one head chunk of a rank's task in one pass."""

    layout: Layout
    """The rank's work and routing tables."""
    chunk: HeadChunk
    """The heads to compute."""
    worker: Worker
    """Worker for the heads of the chunk."""
    shards: Sequence[Tensor] = ()
    """This rank's query, key and value, all heads, in a forward pass."""
    held: Sequence[Tensor] = ()
    """Query, key and value of the heads of the chunk that this rank has received."""
    sinks: Tensor | None = None
    """Sinks of the heads that this rank computes, if its results are final."""
    own: Partial | None = None
    """Partial output of ``own_steps``, if any."""
    home: tuple[Partial, slice] | None = None
    """Partial output of ``home_steps`` and its rows of the shard, if any. It is already in the
    answer if results are final."""

    def compute_own(self) -> None:
        """Compute the steps that require no tokens of other ranks, if there are any."""
        if steps := self.layout.own_steps:
            self.own = self.worker.run_together(steps, *self._own_tokens)

    def send_results(
        self, exchange: Exchange, *, with_lse: bool, keep: bool
    ) -> tuple[Transfer, Sequence[Tensor]]:
        """Compute results for other ranks in the send buffer, or in new tensors if they are kept.

        Returns:
            The transfer of this rank's results, and the results to keep for the backward pass;
            those are kept only if they cover all keys of their queries.
        """
        route, is_final = self.layout.of_results, self.layout.is_final
        is_kept, (query, _, value) = keep and is_final, self.held
        # Without rows, the results determine only dtype and shape.
        num_rows = sum(route.receives) if is_kept else 0
        output = query.new_empty((*query.shape[:2], num_rows, value.shape[3]))
        lse = output.new_empty(output.shape[:3], dtype=lse_dtype(query.dtype))
        results = Partial(output, lse)
        sent = results if with_lse or not is_final else results[:1]
        if is_kept:
            self.compute_away(results)
            return exchange.send_back(self.chunk.index, sent, [route] * len(sent)), results

        def make(places: list[Tensor]) -> None:
            output, *of_lse = places
            if not of_lse:  # the kernel writes the LSE, which is not sent
                of_lse = [lse.new_empty(output.shape[:3])]
            self.compute_away(Partial(output, *of_lse))

        return exchange.send_computed(self.chunk.index, sent, route, make), ()

    def compute_home(self, answer: Partial, *, keep: bool) -> None:
        """Compute the shard's queries with keys of other ranks, if there are such steps.

        If the results are final and not kept, they are written into ``answer``.
        """
        steps, layout = self.layout.home_steps, self.layout
        into, rows = None, slice(None)
        if not steps and (keep or not layout.is_final):
            return
        query = self._own_tokens[0]
        if layout.is_final and not keep:
            into = _of_heads(answer, self.chunk.query_heads[layout.rank])
        else:
            seeing = range(steps[0].queries.start, steps[-1].queries.stop)
            query = HeldTokens.packed(query.take([seeing]), (seeing,))
            first = seeing.start - layout.queries.start
            rows = slice(first, first + len(seeing))
        held = query, *self._held_keys(steps)
        self.home = self.worker.run_together(steps, *held, sinks=self.sinks, into=into), rows

    def compute_away(self, results: Partial) -> None:
        """Write the results of the received queries to ``results``."""
        query = HeldTokens.packed(self.held[0], self.layout.of_queries.held)
        steps = self.layout.away_steps
        held = query, *self._held_keys(steps)
        self.worker.run_steps(steps, *held, sinks=self.sinks, into=results)

    def compute_gradients(self, *of_queries: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the held tokens, in the dtype of the query.

        Args:
            *of_queries: Gradient of the output, output and LSE of the received queries.
        """
        dtype = self.held[0].dtype
        if not (steps := self.layout.steps):
            return tuple(map(torch.zeros_like, self.held))
        queries, keys = self.layout.of_queries.held, self.layout.of_keys.held
        ranges = queries, keys, keys, *(queries for _ in of_queries)
        held = map(HeldTokens.packed, (*self.held, *of_queries), ranges)
        found = self.worker.run_backward(steps, *held, dtype=dtype)
        return tuple(gradient.to(dtype) for gradient in found)

    def merge(self, answer: Partial, received: Sequence[Tensor]) -> None:
        """Merge the partial outputs of the head chunk and write them into the answer.

        Args:
            answer: Output and LSE of this rank's queries, all heads; written to.
            received: Output, and LSE unless it is not required, that other ranks sent back.
        """
        heads, route, rank = self.chunk.query_heads, self.layout.of_results, self.layout.rank
        if self.layout.is_final:
            done = None if self.home is None else rank
            for target, part, nothing in zip(answer, received, (0, -torch.inf), strict=False):
                _place([target], [part], [heads], route, nothing, done=done)
            return
        outputs, lses = (by_heads(part, route, heads) for part in received)
        for of_heads in outputs:
            parts = [
                (Partial(output, lse), rows)
                for (output, rows), (lse, _) in zip(outputs[of_heads], lses[of_heads], strict=True)
            ]
            if of_heads == heads[rank]:
                parts += [] if self.own is None else [(self.own, slice(None))]
                parts += [] if self.home is None else [self.home]
            merge_rows(_of_heads(answer, of_heads), parts)

    @cached_property
    def _own_tokens(self) -> list[HeldTokens]:
        """Return query, key and value of the shard for the heads of the chunk."""
        layout = self.layout
        ranges = layout.queries, layout.keys, layout.keys
        return [
            HeldTokens.packed(_select(shard, of_ranks[layout.rank]), (tokens,))
            for shard, of_ranks, tokens in zip(self.shards, self.chunk.heads, ranges, strict=True)
        ]

    def _held_keys(self, steps: Sequence[Step]) -> list[HeldTokens]:
        """Return keys and values for steps: this rank's shard if it has them all, else received."""
        if see_only(self.layout.keys, steps):
            return self._own_tokens[1:]
        return [HeldTokens.packed(tensor, self.layout.of_keys.held) for tensor in self.held[1:]]


def _select(tensor: Tensor, heads: range) -> Tensor:
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads.start : heads.stop]


def _of_heads(answer: Partial, heads: range) -> Partial:
    return Partial(*(_select(part, heads) for part in answer))


def _place(
    targets: Sequence[Tensor],
    received: Sequence[Tensor],
    heads: Sequence[HeadsOfRanks],
    route: Route,
    nothing: float,
    *,
    done: int | None = None,
) -> None:
    """Copy results of which each row and head was received at most once into the shards.

    Args:
        targets: This rank's tensors, each ``[batch, heads, rows, ...]``; written to.
        received: Results of other ranks, each ``[batch, heads of a rank, rows, ...]``.
        heads: For each target, the heads of every rank.
        route: The route by which this rank sent the tokens out.
        nothing: Value for rows that no rank sent.
        done: Rank whose heads are in the targets already, except the rows received, if any.
    """
    for target, of_ranks in zip(targets, heads, strict=True):
        num_rows = dict.fromkeys(of_ranks, 0)
        for of_heads, number in zip(of_ranks, route.lengths, strict=True):
            num_rows[of_heads] += number
        if done is not None:
            del num_rows[of_ranks[done]]
        for of_heads, number in num_rows.items():
            if number < target.shape[2]:
                _select(target, of_heads).fill_(nothing)
    copy_rows(received, targets, schedule_back(route, tuple(heads)))


def _add_up(
    gradients: Gradients, received: Sequence[Tensor], layout: Layout, chunk: HeadChunk
) -> None:
    """Write the sum of the received gradients of each row and head into this rank's gradients.

    Args:
        gradients: This rank's gradients; written to.
        received: Gradients that other ranks sent back.
        layout: The rank's work and routing tables.
        chunk: The heads of the gradients.
    """
    heads = chunk.heads
    for route, chosen in by_route(received, layout.routes):
        # One rank alone has the gradient of a row and head: of final queries, or of its own heads.
        once = [
            n for n in chosen if layout.is_final and n == 0 or len({*heads[n]}) == len(heads[n])
        ]
        targets, sent = [gradients[n] for n in once], [received[n] for n in once]
        _place(targets, sent, [heads[n] for n in once], route, 0)
        for n in set(chosen).difference(once):
            for of_heads, parts in by_heads(received[n], route, heads[n]).items():
                sum_rows(_select(gradients[n], of_heads), parts)
