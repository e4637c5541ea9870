"""What one rank does: its task of the plan, both ways."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from itertools import islice

import torch
from torch import Tensor

from cqs.autograd import Attended, Kept
from cqs.distributed.exchange import (
    Exchange,
    HeadsOfRanks,
    Piece,
    by_way,
    pieces,
    schedule_back,
)
from cqs.distributed.layout import HeadChunk, Layout, Route
from cqs.distributed.locality import see_only
from cqs.distributed.row_copies import copy_rows
from cqs.distributed.streams import StreamPool
from cqs.distributed.transfer import Transfer, Transport
from cqs.gradients import Gradients
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.problem import Problem
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker

_MOST_AT_ONCE = 196_608
"""Keys that a rank sees. If there are more, two head chunks of a forward pass at one time take
longer than one after another: what both read is more than a GPU's cache takes."""


@dataclass(frozen=True)
class RankTask:
    """Computes for a rank, and exchanges with the others what that takes."""

    transport: Transport
    rank: int
    layout: Layout
    worker: Worker
    """Of all heads."""

    def attend(
        self, problem: Problem, exchange: Exchange, *, with_lse: bool, keep: bool
    ) -> Attended:
        """Send tokens out, compute this rank's task, and merge what comes back for its shard.

        Args:
            problem: The shard.
            exchange: Not in place: all ranks keep copies alike.
            with_lse: Whether the lse of the answer matters. If not, it may be left unwritten.
            keep: Whether gradients will be asked for.
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

            coming = self._in_turns(send_out)
            own: list[Partial | None] = []
            home: list[tuple[Partial, slice] | None] = []
            returning: list[Transfer] = []
            for i, (chunk, transfer) in enumerate(zip(layout.chunks, coming, strict=True)):
                with streams.at(i):
                    if i == 0:  # while the first head chunk travels
                        own.append(self._compute_own(chunk, tensors))
                    held = transfer.wait()
                    back, results = self._send_results(
                        exchange, i, tensors, held, with_lse=with_lse, keep=keep
                    )
                    returning.append(back)
                    home.append(self._compute_home(answer, chunk, tensors, held, keep=keep))
                    kept += [*held, *results] if keep else []
                    del held  # for what comes after
            for i, chunk in enumerate(layout.chunks[1:], 1):  # while the last results travel
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
        """Send the gradient out, and add up what comes back for this shard.

        Args:
            exchange: Of this pass.
            shapes: Of the shards of query, key and value.
            kept: By :meth:`attend`.
            grad_output: Gradient of the shard of the output.
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
                    for route, chosen in by_way(received, self._routes):
                        _add_up(
                            [gradients[n] for n in chosen],
                            [received[n] for n in chosen],
                            [chunk.heads[n] for n in chosen],
                            route,
                        )
        return gradients

    def _in_turns(self, send: Callable[[int], Transfer]) -> Iterator[Transfer]:
        """Yield the transfers of all head chunks; as many are pending as there are turns."""
        chunks = iter(range(len(self.layout.chunks)))
        pending = deque(map(send, islice(chunks, self.transport.num_turns)))
        while pending:
            yield pending.popleft()
            pending += map(send, islice(chunks, 1))

    @property
    def _routes(self) -> tuple[Route, Route, Route]:
        """Of query, key and value."""
        return self.layout.of_queries, self.layout.of_keys, self.layout.of_keys

    def _compute_own(self, chunk: HeadChunk, shards: Sequence[Tensor]) -> Partial | None:
        """Compute the pairs of the shard for which nothing has to travel, if there are any."""
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
        """Compute results for other ranks right where they leave from, unless they are kept.

        Returns:
            What comes, and results that are kept: those with all keys of a query.
        """
        chunk, route, is_final = self.layout.chunks[i], self.layout.of_results, self.layout.is_final
        is_kept = keep and is_final
        results = _new_results(held, sum(route.receives) if is_kept else 0)  # or what they are like
        travelling = results if with_lse or not is_final else results[:1]
        if is_kept:
            self._compute_away(results, chunk, shards, held)
            return exchange.send_back(i, travelling, [route] * len(travelling)), results

        def make(places: list[Tensor]) -> None:
            output, *lse = places
            if not lse:  # nobody asks for it
                lse = [results.lse.new_empty(output.shape[:3])]
            self._compute_away(Partial(output, *lse), chunk, shards, held)

        return exchange.send_made(i, travelling, route, make), ()

    def _compute_home(
        self,
        answer: Partial,
        chunk: HeadChunk,
        shards: Sequence[Tensor],
        held: Sequence[Tensor],
        *,
        keep: bool,
    ) -> tuple[Partial, slice] | None:
        """Compute the other pairs of the shard's queries; with all their keys into the answer.

        Returns:
            What is there, and for which rows of the shard; None if there is nothing.
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
        """Compute what the queries that came see."""
        query = HeldTokens.packed(held[0], self.layout.of_queries.held)
        steps = self.layout.away_steps
        key, value = self._held_keys(steps, chunk, shards, held)
        self._worker_of(chunk).run_into(results, steps, query, key, value)

    def _compute_gradients(
        self, chunk: HeadChunk, query: Tensor, key: Tensor, value: Tensor, *of_queries: Tensor
    ) -> tuple[Tensor, ...]:
        """Return gradients in the dtype of the query, as they travel."""
        dtype = query.dtype
        if not (steps := self.layout.steps):
            return tuple(map(torch.zeros_like, (query, key, value)))
        queries, keys = self.layout.of_queries.held, self.layout.of_keys.held
        ranges = queries, keys, keys, *(queries for _ in of_queries)
        held = map(HeldTokens.packed, (query, key, value, *of_queries), ranges)
        found = self._worker_of(chunk).run_backward(steps, *held, dtype=dtype)
        return tuple(gradient.to(dtype) for gradient in found)

    def _own_tokens(self, chunk: HeadChunk, shards: Sequence[Tensor]) -> list[HeldTokens]:
        """Return query, key and value of the shard, of the head chunk's heads."""
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
        """Return keys and values that steps see: of the shard if all are there."""
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
        """Write what there is of a head chunk into the answer.

        Args:
            answer: Of all head chunks.
            chunk: Which.
            received: What came back: the output and perhaps the lse.
            own: What was computed here with the shard alone, if anything.
            home: What else was computed here for its queries; already there if it is final.
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


def _by_heads(found: Iterable[Piece], heads: Sequence[range]) -> dict[range, list[Piece]]:
    """Sort pieces by the heads that they are of, given those of every rank."""
    sorted_pieces: dict[range, list[Piece]] = {of_rank: [] for of_rank in heads}
    for piece in found:
        sorted_pieces[heads[piece.rank]].append(piece)
    return sorted_pieces


def _new_results(held: Sequence[Tensor], num_rows: int) -> Partial:
    """Make room for results for some queries of the heads of query, key and value."""
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
    """Write what came, each row of a head at most once; ``nothing`` to rows that did not.

    Of the heads of rank ``done`` all rows are there.
    """
    for target, of_ranks in zip(targets, heads, strict=True):
        for rank, (of_heads, ranges) in enumerate(zip(of_ranks, route.sends, strict=True)):
            if rank != done and sum(map(len, ranges)) < target.shape[2]:
                target[:, of_heads.start : of_heads.stop].fill_(nothing)
    copy_rows(received, targets, schedule_back(route, tuple(heads)))


def _add_up(
    targets: Sequence[Tensor],
    received: Sequence[Tensor],
    heads: Sequence[HeadsOfRanks],
    route: Route,
) -> None:
    """Write the sums of what came for each row of a head."""
    once = [n for n, of_ranks in enumerate(heads) if len(set(of_ranks)) == len(of_ranks)]
    if once:
        came = [received[n] for n in once]
        _place([targets[n] for n in once], came, [heads[n] for n in once], route, 0)
    for n, of_ranks in enumerate(heads):
        if n in once:
            continue
        for of_heads, parts in _by_heads(pieces(received[n], route), of_ranks).items():
            _write_sum(targets[n][:, of_heads.start : of_heads.stop], parts)


def _write_sum(target: Tensor, parts: Iterable[Piece]) -> None:
    total = target.new_zeros(target.shape, dtype=lse_dtype(target.dtype))
    for part in parts:
        total[:, :, part.rows.start : part.rows.stop] += part.tensor
    target.copy_(total)
