"""One head chunk of a rank's task in one pass: receive, compute, return, merge, free."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cqs.executors.distributed.exchange import (
    Exchange,
    HeadsOfRanks,
    by_heads,
    by_route,
    schedule_back,
)
from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.split_steps import see_only, span_of
from cqs.executors.distributed.transport.row_copies import copy_rows
from cqs.executors.distributed.transport.transfer import Transfer
from cqs.partial import Gradients, Partial, RunningMerge, lse_dtype, merge_rows, sum_rows
from cqs.scheduler import Step
from cqs.scheduler.rounds import KEYS, QUERIES, ChunkRounds, Round
from cqs.worker import HeldTokens, Worker

Sides = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors of queries, and of keys."""


class ChunkPass(ChunkRounds[Route]):
    """A head chunk in a pass of a rank."""

    def __init__(
        self,
        layout: Layout,
        exchange: Exchange,
        chunk: HeadChunk,
        worker: Worker,
        turns: Iterator[int],
        sent: Sides,
    ) -> None:
        """Prepare the pass.

        Args:
            layout: The rank's work and routing tables.
            exchange: The exchange of the pass.
            chunk: The heads to compute.
            worker: Worker for these heads.
            turns: Numbers of the chunk's exchanges.
            sent: Tensors of this rank's shard, all heads, that ranks send to each other.
        """
        super().__init__(layout.rounds)
        self.layout, self.chunk, self._worker = layout, chunk, worker
        self._exchange, self._turns, self._sent = exchange, turns, sent
        self._held: tuple[list[Tensor], list[Tensor]] = [], []
        """Tensors of all tokens that the rank holds, with the heads of the chunk."""

    def fetch(self, current: Round[Route], sides: tuple[int, ...]) -> Transfer:
        """Send this rank's tokens, and begin to receive those of others."""
        tensors = [tensor for side in sides for tensor in self._sent[side]]
        owners = [side for side in sides for _ in self._sent[side]]
        if self.layout.is_bounded and (route := current.routes[sides[0]]).is_local:
            own = self.chunk.heads[sides[0]][route.rank]
            rows = next(iter(route.sends[route.rank]), range(0))
            return Transfer(
                [_narrow(tensor, own)[:, :, rows.start : rows.stop] for tensor in tensors], []
            )
        heads = [self.chunk.heads[side] for side in owners]
        routes = [current.routes[side] for side in owners]
        return self._exchange.fetch(next(self._turns), tensors, heads, routes)

    def hold(self, sides: tuple[int, ...], transfer: Transfer) -> None:
        """Wait for tokens and hold them."""
        tensors = transfer.wait()
        for side in sides:
            number = len(self._sent[side])
            self._held[side].extend(tensors[:number])
            tensors = tensors[number:]

    def merge(self, transfer: Transfer, sides: tuple[int, ...], current: Round[Route]) -> None:
        """Wait for results for this rank's shard, and add them to others."""
        self.add(transfer.wait(), sides, current)

    def add(self, received: list[Tensor], sides: tuple[int, ...], current: Round[Route]) -> None:
        """Add results for this rank's shard to others."""
        raise NotImplementedError

    def _held_tokens(self, current: Round[Route]) -> list[HeldTokens]:
        """Return query, key, value and the other tensors of queries with their positions."""
        (query, *others), (key, value) = self._held
        queries, keys = (route.held for route in current.routes)
        ranges = queries, keys, keys, *(queries for _ in others)
        return list(map(HeldTokens.packed, (query, key, value, *others), ranges))


class ForwardPass(ChunkPass):
    """Computes output and LSE of this rank's queries."""

    def __init__(
        self,
        *fields: Any,
        answer: Partial,
        sinks: Tensor | None,
        with_lse: bool,
        keep: bool,
    ) -> None:
        """Prepare a forward pass.

        Args:
            *fields: Those of :class:`ChunkPass`.
            answer: Output and LSE of this rank's queries, all heads; written to.
            sinks: Sinks of the heads that this rank computes, if its results are final.
            with_lse: Whether the LSE of final results is required.
            keep: Whether to keep tensors for the backward pass.
        """
        super().__init__(*fields)
        self.kept: list[Tensor] = []
        """Query, key and value that were received, and final results."""
        self._answer, self._sinks, self._with_lse, self._keep = answer, sinks, with_lse, keep
        heads = dict.fromkeys(self.chunk.query_heads)
        self._places = {span: Partial(*(_narrow(part, span) for part in answer)) for span in heads}
        self._merges: dict[range, RunningMerge] = {}
        if self.layout.is_bounded:
            self._merges = {span: RunningMerge(place) for span, place in self._places.items()}
        self._results: Partial | None = None
        self._merge: RunningMerge | None = None
        """Merges the results of a batch of queries, past which keys are streamed."""
        self._own: list[tuple[Partial, slice]] = []
        """Partial outputs of this rank's queries that it has computed itself, and their rows."""
        self._away: Transfer | None = None

    def compute_own(self) -> None:
        """Compute the steps that require no tokens of other ranks, if they are separate."""
        if steps := self.layout.own_steps:
            own = self._worker.run_together(steps, *self._own_tokens)
            self._own.insert(0, (own, slice(None)))  # first in every chunk, so bits are the same

    def compute(self, current: Round[Route]) -> None:
        """Compute partial outputs of the queries held, and with keys held those of the shard."""
        if not self.layout.is_bounded:
            self._away = self._send_results()
            self._compute_home()
        elif current.steps:
            results = self._worker.run_together(current.steps, *self._held_tokens(current))
            if current.returns[0] == (QUERIES,):
                self._results = results
                return
            if self._merge is None:
                self._merge = RunningMerge(Partial(*map(torch.empty_like, results)))
            self._merge.add_own(results)

    def free(self, current: Round[Route], sides: tuple[int, ...]) -> Transfer | None:
        """Free tokens, and send partial outputs to the owners of their queries."""
        for side in sides:
            self._held[side].clear()
        if not self.layout.is_bounded:
            return self._away
        if QUERIES not in sides:
            return None
        results, self._results = self._results, None
        if self._merge is not None:
            results, self._merge = self._merge.finish(), None
        route = current.routes[QUERIES]
        return self._exchange.send_back(
            next(self._turns), results or self._empty_results(0), [route, route]
        )

    def add(self, received: list[Tensor], sides: tuple[int, ...], current: Round[Route]) -> None:
        """Merge partial outputs of this rank's queries, or place them if they are final."""
        heads, rank = self.chunk.query_heads, self.layout.rank
        route = current.routes[QUERIES] if self.layout.is_bounded else self.layout.result_route
        if self.layout.is_final:
            done = None if self._keep else rank
            for target, result, fill in zip(self._answer, received, (0, -torch.inf), strict=False):
                _place([target], [result], [heads], route, fill, done=done)
            return
        outputs, lses = (by_heads(part, route, heads) for part in received)
        for group, place in self._places.items():
            parts = [
                (Partial(output, lse), rows)
                for (output, rows), (lse, _) in zip(outputs[group], lses[group], strict=True)
            ]
            if self.layout.is_bounded:
                for part in parts:
                    self._merges[group].add_own(*part)
            else:
                merge_rows(place, parts + self._own * (group == heads[rank]))

    def finish(self) -> None:
        """Write the answer, and free all other results."""
        super().finish()
        self._own.clear()
        while self._merges:
            self._merges.popitem()[1].finish()

    def _send_results(self) -> Transfer:
        """Compute results for other ranks in the send buffer, or in new tensors if they are kept.

        They are kept only if they cover all keys of their queries.
        """
        layout, (query, *_), keys = self.layout, *self._held
        route, is_kept = layout.result_route, self._keep and layout.is_final
        # Without rows, the results determine only dtype and shape.
        results = self._empty_results(sum(route.receives) if is_kept else 0)
        sent = results if self._with_lse or not layout.is_final else results[:1]
        if self._keep:
            self.kept += [query, *keys, *(results if is_kept else ())]
        if is_kept:
            self.compute_away(results)
            return self._exchange.send_back(next(self._turns), sent, [route] * len(sent))

        def make(places: list[Tensor]) -> None:
            output, *lse = places
            if not lse:  # the kernel writes the LSE, which is not sent
                lse = [results.lse.new_empty(output.shape[:3])]
            self.compute_away(Partial(output, *lse))

        return self._exchange.send_computed(next(self._turns), sent, route, make)

    def compute_away(self, results: Partial) -> None:
        """Write the results of the received queries to ``results``."""
        query = HeldTokens.packed(self._held[QUERIES][0], self.layout.query_route.held)
        steps = self.layout.away_steps
        self._worker.run_steps(
            steps, query, *self._held_keys(steps), sinks=self._sinks, into=results
        )

    def _compute_home(self) -> None:
        """Compute the shard's queries with keys of other ranks, if there are such steps.

        If the results are final and not kept, they are written into the answer.
        """
        steps, layout, into = self.layout.home_steps, self.layout, None
        if not steps and (self._keep or not layout.is_final):
            return
        query, seeing = self._own_tokens[0], layout.queries
        if layout.is_final and not self._keep:
            into = self._places[self.chunk.query_heads[layout.rank]]
        else:
            seeing = span_of(steps)
            query = HeldTokens.packed(query.take([seeing]), (seeing,))
        held = query, *self._held_keys(steps)
        results = self._worker.run_together(steps, *held, sinks=self._sinks, into=into)
        first = seeing.start - layout.queries.start
        self._own.append((results, slice(first, first + len(seeing))))

    @cached_property
    def _own_tokens(self) -> list[HeldTokens]:
        """Return query, key and value of the shard for the heads of the chunk."""
        layout = self.layout
        ranges = layout.queries, layout.keys, layout.keys
        shards = [tensor for tensors in self._sent for tensor in tensors]
        return [
            HeldTokens.packed(_narrow(shard, heads[layout.rank]), (tokens,))
            for shard, heads, tokens in zip(shards, self.chunk.heads, ranges, strict=True)
        ]

    def _held_keys(self, steps: Sequence[Step]) -> list[HeldTokens]:
        """Return keys and values for steps: this rank's shard if it has them all, else received."""
        if see_only(self.layout.keys, steps):
            return self._own_tokens[1:]
        return [HeldTokens.packed(kv, self.layout.key_route.held) for kv in self._held[KEYS]]

    def _empty_results(self, num_rows: int) -> Partial:
        """Return uninitialised partial outputs of this rank's heads."""
        (query,), (_, value), width = *self._sent, len(self.chunk.query_heads[0])
        output = query.new_empty((query.shape[0], width, num_rows, value.shape[3]))
        return Partial(output, query.new_empty(output.shape[:3], dtype=lse_dtype(query.dtype)))


class BackwardPass(ChunkPass):
    """Computes the gradients of this rank's shard."""

    def __init__(
        self, *fields: Any, gradients: Callable[[], Gradients], kept: Sequence[Tensor]
    ) -> None:
        """Prepare a backward pass.

        Args:
            *fields: Those of :class:`ChunkPass`.
            gradients: Returns gradients of this rank's shard, all heads; written to. Its first call
                allocates them.
            kept: Tensors that the forward pass of the chunk kept.
        """
        super().__init__(*fields)
        self._held = [*kept[:1]], [*kept[1:3]]
        self._gradients, self._final = gradients, kept[3:]
        self._results: tuple[list[Tensor], list[Tensor]] = [], []
        """Gradients of the tokens held, of queries and of keys."""
        self._sums: list[dict[range, tuple[Tensor, Tensor]]] = []
        """For each gradient and range of heads, its place and its sum, if parts are added."""
        if self.layout.is_bounded:
            for gradient, heads in zip(gradients(), self.chunk.heads, strict=True):
                places = {group: _narrow(gradient, group) for group in dict.fromkeys(heads)}
                self._sums.append({group: (part, _sum_of(part)) for group, part in places.items()})

    def compute(self, current: Round[Route]) -> None:
        """Add the gradients of a round to those of the tokens held."""
        (query, *_), keys = self._held
        if not current.steps:
            for side in chain(*current.returns):
                if not self._results[side]:  # no rows
                    self._results[side].extend(map(torch.empty_like, ([query], keys)[side]))
            return
        self._held[QUERIES].extend(self._final)
        dtype = None if self.layout.is_bounded else query.dtype
        tokens = self._held_tokens(current)
        gradients = self._worker.run_backward(current.steps, *tokens, dtype=dtype)
        for results, tensors in zip(self._results, (gradients[:1], gradients[1:]), strict=True):
            for total, tensor in zip(results, tensors, strict=False):
                total += tensor
            results += tensors[len(results) :]

    def free(self, current: Round[Route], sides: tuple[int, ...]) -> Transfer:
        """Free tokens, and send their gradients to the owners in the dtype of the query."""
        results, routes, dtype = list[Tensor](), list[Route](), self._sent[QUERIES][0].dtype
        for side in sides:
            self._held[side].clear()
            results += [gradient.to(dtype) for gradient in self._results[side]]
            routes += [current.routes[side]] * len(self._results[side])
            self._results[side].clear()
        return self._exchange.send_back(next(self._turns), results, routes)

    def add(self, received: list[Tensor], sides: tuple[int, ...], current: Round[Route]) -> None:
        """Add gradients of this rank's shard, or write their sum if they are all there are."""
        if not self.layout.is_bounded:
            _add_up(self._gradients(), received, self.layout, self.chunk)
            return
        (side,) = sides  # of query, key and value, keys come after queries
        for number, tensor in enumerate(received, side):
            groups = by_heads(tensor, current.routes[side], self.chunk.heads[number])
            for heads, parts in groups.items():
                total = self._sums[number][heads][1]
                for part, rows in parts:
                    total[:, :, rows] += part

    def finish(self) -> None:
        """Write the gradients, and free their sums."""
        super().finish()
        while self._sums:
            for place, total in self._sums.pop().values():
                if total is not place:
                    place.copy_(total)


def _sum_of(place: Tensor) -> Tensor:
    """Return zeros to add gradients to: the place itself if its dtype is wide enough."""
    dtype = lse_dtype(place.dtype)
    return place if place.dtype == dtype else place.new_zeros(place.shape, dtype=dtype)


def _narrow(tensor: Tensor, heads: range) -> Tensor:
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads.start : heads.stop]


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
    for target, groups in zip(targets, heads, strict=True):
        num_rows = dict.fromkeys(groups, 0)
        for group, number in zip(groups, route.lengths, strict=True):
            num_rows[group] += number
        if done is not None:
            del num_rows[groups[done]]
        for group, number in num_rows.items():
            if number < target.shape[2]:
                _narrow(target, group).fill_(nothing)
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
            for group, parts in by_heads(received[n], route, heads[n]).items():
                sum_rows(_narrow(gradients[n], group), parts)
