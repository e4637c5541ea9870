"""Forward and backward pass of one rank: its task of the plan and the exchanges around it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from itertools import islice

import torch
from torch import Tensor

from cqs.executors.autograd import Attended, Kept
from cqs.executors.distributed.exchange import (
    Exchange,
    HeadsOfRanks,
    ReturnedRows,
    by_route,
    pieces,
    schedule_back,
)
from cqs.executors.distributed.layout import HeadChunk, Layout, Route
from cqs.executors.distributed.locality import see_only
from cqs.executors.distributed.transport.row_copies import copy_rows
from cqs.executors.distributed.transport.streams import StreamPool
from cqs.executors.distributed.transport.transfer import Transfer, Transport
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows
from cqs.problem import Problem
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker

_MOST_AT_ONCE = 196_608
"""Number of keys of a rank above which the head chunks of a forward pass run one after another.
Keys and values of two concurrent chunks would exceed the L2 cache and make both slower."""


@dataclass(frozen=True)
class RankTask:
    """Computes the task of one rank and exchanges its inputs and results with other ranks."""

    transport: Transport
    """Transport of this rank's exchanges."""
    rank: int
    """Rank of this process in the group."""
    layout: Layout
    """The rank's work and routing tables."""
    worker: Worker
    """Worker for all heads; its dropout mask is that of the whole problem."""

    def attend(
        self, problem: Problem, exchange: Exchange, *, with_lse: bool, keep: bool
    ) -> Attended:
        """Send tokens out, compute this rank's task, and merge the results for its shard.

        Args:
            problem: This rank's shard: query, key and value ``[batch, heads, rows, head_dim]``.
            exchange: Exchange of this pass with ``in_place=False``, so that every rank keeps a
                copy of the tokens that it computes with.
            with_lse: Whether the LSE of the answer is required; otherwise it may stay
                uninitialised.
            keep: Whether to keep tensors for the backward pass.

        Returns:
            Output and LSE of this rank's queries, the kept tensors, and the backward function.

        Raises:
            LostError: Another rank has failed or does not answer (messages only).
        """
        layout, routes = self.layout, self._routes
        tensors = problem.query, problem.key, problem.value
        answer = problem.empty_answer()
        kept: list[Tensor] = []
        at_once = 1 if layout.num_keys > _MOST_AT_ONCE else self.transport.num_streams
        with StreamPool(problem.query.device, min(at_once, len(layout.chunks))) as streams:

            def send_out(i: int) -> Transfer:
                with streams.at(i):
                    return exchange.send_out(i, tensors, layout.chunks[i].heads, routes)

            incoming = self._in_turns(send_out)
            own: list[Partial | None] = []
            home: list[tuple[Partial, slice] | None] = []
            returning: list[Transfer] = []
            for i, (chunk, transfer) in enumerate(zip(layout.chunks, incoming, strict=True)):
                with streams.at(i):
                    if i == 0:  # overlaps the exchange of the first head chunk
                        own.append(self._compute_own(chunk, tensors))
                    held = transfer.wait()
                    back, results = self._send_results(
                        exchange, i, tensors, held, with_lse=with_lse, keep=keep
                    )
                    returning.append(back)
                    home.append(self._compute_home(answer, chunk, tensors, held, keep=keep))
                    kept += [*held, *results] if keep else []
                    del held  # frees its memory for later head chunks
            for i, chunk in enumerate(layout.chunks[1:], 1):  # overlaps the last results
                with streams.at(i):
                    own.append(self._compute_own(chunk, tensors))
            for i, chunk in enumerate(layout.chunks):
                with streams.at(i):
                    self._merge(answer, chunk, returning[i].wait(), own[i], home[i])
        if keep and not layout.is_final:
            kept += answer
        shapes = [tensor.shape for tensor in tensors]
        return Attended(answer, tuple(kept), bind(self._differentiate, shapes))

    def _differentiate(
        self, shapes: Sequence[torch.Size], kept: Kept, grad_output: Tensor
    ) -> Gradients:
        with Exchange(self.transport, len(self.layout.chunks), in_place=True) as exchange:
            return self._send_gradients(exchange, shapes, kept, grad_output)

    def _send_gradients(
        self, exchange: Exchange, shapes: Sequence[torch.Size], kept: Kept, grad_output: Tensor
    ) -> Gradients:
        """Send the gradient of the output out, and sum the gradients for this rank's shard.

        Args:
            exchange: Exchange of the backward pass.
            shapes: Shapes of this rank's query, key and value.
            kept: Tensors that :meth:`attend` kept.
            grad_output: Gradient of this rank's output, ``[batch, heads, rows, value_dim]``.
        """
        layout, of_shard = self.layout, [grad_output]
        if not layout.is_final:
            kept, answer = kept[:-2], kept[-2:]
            of_shard += answer
        each_kept = len(kept) // len(layout.chunks)
        at_once = min(self.transport.num_streams, len(layout.chunks))
        with StreamPool(grad_output.device, at_once) as streams:

            def send_out(i: int) -> Transfer:
                heads, route = layout.chunks[i].query_heads, layout.of_queries
                with streams.at(i):
                    return exchange.send_out(
                        i, of_shard, [heads] * len(of_shard), [route] * len(of_shard)
                    )

            returning = []
            for i, transfer in enumerate(self._in_turns(send_out)):
                with streams.at(i):
                    query, key, value, *own = kept[i * each_kept : (i + 1) * each_kept]
                    found = self._compute_gradients(
                        layout.chunks[i], query, key, value, *transfer.wait(), *own
                    )
                    returning.append(exchange.send_back(i, found, self._routes))
            gradients = Gradients(*map(grad_output.new_empty, shapes))
            for i, (chunk, transfer) in enumerate(zip(layout.chunks, returning, strict=True)):
                with streams.at(i):
                    received = transfer.wait()
                    for route, chosen in by_route(received, self._routes):
                        _add_up(
                            [gradients[n] for n in chosen],
                            [received[n] for n in chosen],
                            [chunk.heads[n] for n in chosen],
                            route,
                            [n == 0 and layout.is_final for n in chosen],
                        )
        return gradients

    def _in_turns(self, send: Callable[[int], Transfer]) -> Iterator[Transfer]:
        """Yield the transfers of all head chunks, with up to ``num_turns`` of them in transit."""
        chunks = iter(range(len(self.layout.chunks)))
        pending = deque(map(send, islice(chunks, self.transport.num_turns)))
        while pending:
            yield pending.popleft()
            pending += map(send, islice(chunks, 1))

    @property
    def _routes(self) -> tuple[Route, Route, Route]:
        """Routes of query, key and value."""
        return self.layout.of_queries, self.layout.of_keys, self.layout.of_keys

    def _compute_own(self, chunk: HeadChunk, shards: Sequence[Tensor]) -> Partial | None:
        """Compute the steps that require no tokens of other ranks, if there are any."""
        if not (steps := self.layout.own_steps):
            return None
        return self._worker_of(chunk).run_together(steps, *self._own_tokens(chunk, shards))

    def _send_results(
        self,
        exchange: Exchange,
        i: int,
        shards: Sequence[Tensor],
        held: Sequence[Tensor],
        *,
        with_lse: bool,
        keep: bool,
    ) -> tuple[Transfer, Sequence[Tensor]]:
        """Compute results for other ranks in the send buffer, or in new tensors if they are kept.

        Returns:
            The transfer of this rank's results, and the results to keep for the backward pass;
            those are kept only if they cover all keys of their queries.
        """
        chunk, route, is_final = self.layout.chunks[i], self.layout.of_results, self.layout.is_final
        is_kept = keep and is_final
        # Without rows, the results determine only dtype and shape.
        results = _new_results(held, sum(route.receives) if is_kept else 0)
        sent = results if with_lse or not is_final else results[:1]
        if is_kept:
            self._compute_away(results, chunk, shards, held)
            return exchange.send_back(i, sent, [route] * len(sent)), results

        def make(places: list[Tensor]) -> None:
            output, *lse = places
            if not lse:  # the kernel writes the LSE, which is not sent
                lse = [results.lse.new_empty(output.shape[:3])]
            self._compute_away(Partial(output, *lse), chunk, shards, held)

        return exchange.send_computed(i, sent, route, make), ()

    def _compute_home(
        self,
        answer: Partial,
        chunk: HeadChunk,
        shards: Sequence[Tensor],
        held: Sequence[Tensor],
        *,
        keep: bool,
    ) -> tuple[Partial, slice] | None:
        """Compute the shard's queries with keys of other ranks.

        If the results are final and not kept, they are written into ``answer``.

        Returns:
            The results and their rows of the shard, or ``None`` if there are no such steps.
        """
        steps, layout = self.layout.home_steps, self.layout
        query, into, rows = self._own_tokens(chunk, shards)[0], None, slice(None)
        if layout.is_final and not keep:
            heads = chunk.query_heads[self.rank]
            into = Partial(*(part[:, heads.start : heads.stop] for part in answer))
        elif not steps:
            return None
        else:
            seeing = range(steps[0].queries.start, steps[-1].queries.stop)
            query = HeldTokens([(seeing, query.take([seeing]))])
            first = seeing.start - layout.queries.start
            rows = slice(first, first + len(seeing))
        key, value = self._held_keys(steps, chunk, shards, held)
        return self._worker_of(chunk).run_together(steps, query, key, value, into=into), rows

    def _compute_away(
        self, results: Partial, chunk: HeadChunk, shards: Sequence[Tensor], held: Sequence[Tensor]
    ) -> None:
        """Write the results of the received queries to ``results``."""
        query = HeldTokens.packed(held[0], self.layout.of_queries.held)
        steps = self.layout.away_steps
        key, value = self._held_keys(steps, chunk, shards, held)
        self._worker_of(chunk).run_into(results, steps, query, key, value)

    def _compute_gradients(
        self, chunk: HeadChunk, query: Tensor, key: Tensor, value: Tensor, *of_queries: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the held tokens, in the dtype of the query."""
        dtype = query.dtype
        if not (steps := self.layout.steps):
            return tuple(map(torch.zeros_like, (query, key, value)))
        queries, keys = self.layout.of_queries.held, self.layout.of_keys.held
        ranges = queries, keys, keys, *(queries for _ in of_queries)
        held = map(HeldTokens.packed, (query, key, value, *of_queries), ranges)
        found = self._worker_of(chunk).run_backward(steps, *held, dtype=dtype)
        return tuple(gradient.to(dtype) for gradient in found)

    def _own_tokens(self, chunk: HeadChunk, shards: Sequence[Tensor]) -> list[HeldTokens]:
        """Return query, key and value of the shard for the heads of the chunk."""
        ranges = self.layout.queries, self.layout.keys, self.layout.keys
        return [
            HeldTokens([(tokens, shard[:, of_ranks[self.rank].start : of_ranks[self.rank].stop])])
            for shard, of_ranks, tokens in zip(shards, chunk.heads, ranges, strict=True)
        ]

    def _held_keys(
        self,
        steps: Sequence[Step],
        chunk: HeadChunk,
        shards: Sequence[Tensor],
        held: Sequence[Tensor],
    ) -> list[HeldTokens]:
        """Return keys and values for steps: this rank's shard if it has them all, else received."""
        if see_only(self.layout.keys, steps):
            return self._own_tokens(chunk, shards)[1:]
        return [HeldTokens.packed(tensor, self.layout.of_keys.held) for tensor in held[1:]]

    def _worker_of(self, chunk: HeadChunk) -> Worker:
        if self.worker.dropout is None:
            return self.worker
        first = chunk.query_heads[self.rank].start
        return replace(self.worker, dropout=self.worker.dropout.moved(0, first))

    def _merge(
        self,
        answer: Partial,
        chunk: HeadChunk,
        received: Sequence[Tensor],
        own: Partial | None,
        home: tuple[Partial, slice] | None,
    ) -> None:
        """Merge the partial outputs of a head chunk and write them into the answer.

        Args:
            answer: Output and LSE of this rank's queries, all heads; written to.
            chunk: The head chunk to merge.
            received: Output, and LSE unless it is not required, that other ranks sent back.
            own: Partial output of ``own_steps``, if any.
            home: Partial output of ``home_steps`` and its rows of the shard, if any. It is already
                in the answer if results are final.
        """
        heads, route = chunk.query_heads, self.layout.of_results
        if self.layout.is_final:
            done = None if home is None else self.rank
            for target, part, nothing in zip(answer, received, (0, -torch.inf), strict=False):
                _place([target], [part], [heads], route, nothing, done=done)
            return
        outputs, lses = (_by_heads(pieces(part, route), heads) for part in received)
        for of_heads in outputs:
            into = Partial(*(part[:, of_heads.start : of_heads.stop] for part in answer))
            parts = [
                (Partial(output.tensor, lse.tensor), slice(output.rows.start, output.rows.stop))
                for output, lse in zip(outputs[of_heads], lses[of_heads], strict=True)
            ]
            if of_heads == heads[self.rank]:
                parts += [] if own is None else [(own, slice(None))]
                parts += [] if home is None else [home]
            merge_rows(into, parts)


def _by_heads(
    found: Iterable[ReturnedRows], heads: Sequence[range]
) -> dict[range, list[ReturnedRows]]:
    """Group pieces by their heads, given the heads of every rank."""
    sorted_pieces: dict[range, list[ReturnedRows]] = {of_rank: [] for of_rank in heads}
    for piece in found:
        sorted_pieces[heads[piece.rank]].append(piece)
    return sorted_pieces


def _new_results(held: Sequence[Tensor], num_rows: int) -> Partial:
    """Allocate output and LSE of ``num_rows`` queries, with the heads and dtype of ``held``."""
    query, _, value = held
    output = query.new_empty((*query.shape[:2], num_rows, value.shape[3]))
    return Partial(output, output.new_empty(output.shape[:3], dtype=lse_dtype(query.dtype)))


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
        for of_heads, ranges in zip(of_ranks, route.sends, strict=True):
            num_rows[of_heads] += sum(map(len, ranges))
        if done is not None:
            del num_rows[of_ranks[done]]
        for of_heads, number in num_rows.items():
            if number < target.shape[2]:
                target[:, of_heads.start : of_heads.stop].fill_(nothing)
    copy_rows(received, targets, schedule_back(route, tuple(heads)))


def _add_up(
    targets: Sequence[Tensor],
    received: Sequence[Tensor],
    heads: Sequence[HeadsOfRanks],
    route: Route,
    are_single: Sequence[bool],
) -> None:
    """Write the sum of the received gradients of each row and head into ``targets``.

    Args:
        targets: This rank's gradients; written to.
        received: Gradients that other ranks sent back.
        heads: For each target, the heads of every rank.
        route: The route by which this rank sent the tokens out.
        are_single: For each target, whether one rank alone has a gradient of a row and head.
    """
    once = [
        n
        for n, of_ranks in enumerate(heads)
        if are_single[n] or len(set(of_ranks)) == len(of_ranks)
    ]
    if once:
        gradients = [received[n] for n in once]
        _place([targets[n] for n in once], gradients, [heads[n] for n in once], route, 0)
    for n, of_ranks in enumerate(heads):
        if n in once:
            continue
        for of_heads, parts in _by_heads(pieces(received[n], route), of_ranks).items():
            _write_sum(targets[n][:, of_heads.start : of_heads.stop], parts)


def _write_sum(target: Tensor, parts: Iterable[ReturnedRows]) -> None:
    total = target.new_zeros(target.shape, dtype=lse_dtype(target.dtype))
    for part in parts:
        total[:, :, part.rows.start : part.rows.stop] += part.tensor
    target.copy_(total)
