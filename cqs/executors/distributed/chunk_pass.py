"""One head chunk of a rank's task in a forward pass: receive, compute, return, merge, free."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.route import HeadsOfRanks, Route
from cqs.executors.distributed.transport.exchange import (
    CopySchedule,
    Exchange,
    RowCopy,
    Transfer,
    copy_rows,
)
from cqs.partial import Partial, RunningMerge, lse_dtype, merge_rows
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
        sent: Sides,
    ) -> None:
        """Prepare the pass.

        Args:
            layout: The rank's work and routing tables.
            exchange: The exchange of the pass.
            chunk: The heads to compute.
            worker: Worker for these heads.
            sent: Tensors of this rank's shard, all heads, that ranks send to each other.
        """
        super().__init__(layout.rounds)
        self.layout, self.chunk, self._worker = layout, chunk, worker
        self._exchange, self._sent = exchange, sent
        self._held: tuple[list[Tensor], list[Tensor]] = [], []
        """Tensors of all tokens that the rank holds, with the heads of the chunk."""

    def fetch(self, current: Round[Route], sides: tuple[int, ...]) -> Transfer:
        """Send this rank's tokens, and begin to receive those of others."""
        tensors, routes, heads = list[Tensor](), list[Route](), list[HeadsOfRanks]()
        for side in sides:
            number = len(self._sent[side])
            tensors += self._sent[side]
            routes += [current.routes[side]] * number
            heads += [self.chunk.heads[side]] * number
        if self.layout.is_bounded and (route := current.routes[sides[0]]).is_local:
            own = self.chunk.heads[sides[0]][route.rank]
            rows = next(iter(route.sends[route.rank]), range(0))
            return Transfer(
                [narrow(tensor, own)[:, :, rows.start : rows.stop] for tensor in tensors], []
            )
        return self._exchange.send(self.chunk.index, tensors, routes, heads)

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
        queries, keys = current.routes[QUERIES].held, current.routes[KEYS].held
        ranges = queries, keys, keys, *[queries] * len(others)
        return list(map(HeldTokens, (query, key, value, *others), ranges))


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
        self._merges: dict[range, RunningMerge] = {}
        if self.layout.is_bounded:
            for heads in dict.fromkeys(self.chunk.query_heads):
                self._merges[heads] = RunningMerge(self._place(heads))
        self._results: Partial | None = None
        self._merge: RunningMerge | None = None
        """Merges the results of a batch of queries, past which keys are streamed."""
        self._own: list[tuple[Partial, slice]] = []
        """Partial outputs of this rank's queries that it has computed itself, and their rows."""
        self._away: Transfer | None = None

    def compute_own(self) -> None:
        """Compute the steps that require no tokens of other ranks, if they are separate."""
        if steps := self.layout.split.own:
            own = self._worker.run_together(steps, *self._own_tokens)
            self._own.insert(0, (own, slice(None)))  # first in every chunk, so bits are the same

    def compute(self, current: Round[Route]) -> None:
        """Compute partial outputs of the queries held, and with keys held those of the shard."""
        if not self.layout.is_bounded:
            self._away = self.send_results()
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
        routes = [current.routes[QUERIES]] * 2
        results = results or self._empty_results(0)
        return self._exchange.send(self.chunk.index, results, routes)

    def add(self, received: list[Tensor], sides: tuple[int, ...], current: Round[Route]) -> None:
        """Merge partial outputs of this rank's queries, or place them if they are final."""
        heads, rank = self.chunk.query_heads, self.layout.rank
        route = current.routes[QUERIES] if self.layout.is_bounded else self.layout.result_route
        if self.layout.is_final:
            done = None if self._keep else rank
            for target, result, fill in zip(self._answer, received, (0, -torch.inf), strict=False):
                place_results([target], [result], [heads], route, fill, done=done)
            return
        output, lse = received
        for group, places in by_heads(route, heads).items():
            parts = []
            for part, rows in places:
                parts.append((Partial(output[:, :, part], lse[:, :, part]), rows))
            if not self.layout.is_bounded:
                merge_rows(self._place(group), parts + self._own * (group == heads[rank]))
                continue
            for partial, rows in parts:
                self._merges[group].add_own(partial, rows)

    def finish(self) -> None:
        """Write the answer, and free all other results."""
        super().finish()
        self._own.clear()
        while self._merges:
            self._merges.popitem()[1].finish()

    def _place(self, heads: range) -> Partial:
        """Return the answer of a range of heads."""
        if len(heads) == self._answer.lse.shape[1]:
            return self._answer
        return Partial(*(narrow(part, heads) for part in self._answer))

    def send_results(self) -> Transfer:
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
        routes, fill = [route] * len(sent), None if is_kept else self._fill
        return self._exchange.send(self.chunk.index, sent, routes, fill=fill)

    def _fill(self, places: list[Tensor]) -> None:
        """Compute results for other ranks in the send buffer, ``[rows, batch, heads, ...]``."""
        output = places[0].movedim(0, 2)
        if len(places) > 1:
            lse = places[1].movedim(0, 2)
        else:  # the kernel writes the LSE, which is not sent
            lse = output.new_empty(output.shape[:3], dtype=lse_dtype(output.dtype))
        self.compute_away(Partial(output, lse))

    def compute_away(self, results: Partial) -> None:
        """Write the results of the received queries to ``results``."""
        layout = self.layout
        query = HeldTokens(self._held[QUERIES][0], layout.query_route.held)
        held = query, *self._held_keys(layout.away_sees_own)
        self._worker.run_steps(layout.split.away, *held, sinks=self._sinks, into=results)

    def _compute_home(self) -> None:
        """Compute the shard's queries with keys of other ranks, if there are such steps.

        If the results are final and not kept, they are written into the answer.
        """
        steps, layout, into = self.layout.split.home, self.layout, None
        if not steps and (self._keep or not layout.is_final):
            return
        query, seeing = self._own_tokens[0], layout.queries
        if layout.is_final and not self._keep:
            into = self._place(self.chunk.query_heads[layout.rank])
        else:
            seeing = layout.home_queries
            query = HeldTokens(query.take([seeing]), (seeing,))
        held = query, *self._held_keys(layout.home_sees_own)
        results = self._worker.run_together(steps, *held, sinks=self._sinks, into=into)
        first = seeing.start - layout.queries.start
        self._own.append((results, slice(first, first + len(seeing))))

    @cached_property
    def _own_tokens(self) -> list[HeldTokens]:
        """Return query, key and value of the shard for the heads of the chunk."""
        layout, own = self.layout, list[HeldTokens]()
        ranges = layout.queries, layout.keys, layout.keys
        shards = *self._sent[QUERIES], *self._sent[KEYS]
        for shard, heads, tokens in zip(shards, self.chunk.heads, ranges, strict=True):
            own.append(HeldTokens(narrow(shard, heads[layout.rank]), (tokens,)))
        return own

    def _held_keys(self, is_own: bool) -> list[HeldTokens]:
        """Return keys and values of this rank's shard, or those received."""
        if is_own:
            return self._own_tokens[1:]
        return list(map(HeldTokens, self._held[KEYS], [self.layout.key_route.held] * 2))

    def _empty_results(self, num_rows: int) -> Partial:
        """Return uninitialised partial outputs of this rank's heads."""
        (query,), (_, value), width = *self._sent, len(self.chunk.query_heads[0])
        output = query.new_empty((query.shape[0], width, num_rows, value.shape[3]))
        return Partial(output, query.new_empty(output.shape[:3], dtype=lse_dtype(query.dtype)))


@lru_cache(maxsize=256)
def by_heads(route: Route, heads: HeadsOfRanks) -> dict[range, list[tuple[slice, slice]]]:
    """Split results that were sent back to this rank by heads, and by rank and row range.

    Args:
        route: The route by which this rank sent the tokens out.
        heads: The heads that every rank sent back.

    Returns:
        For each range of heads, rows of the results, and the rows of this rank's shard.
    """
    groups: dict[range, list[tuple[slice, slice]]] = {rank_heads: [] for rank_heads in heads}
    first = 0
    for rank_heads, ranges in zip(heads, route.sends, strict=True):
        for rows in ranges:
            received = slice(first, first + len(rows))
            groups[rank_heads].append((received, slice(rows.start, rows.stop)))
            first = received.stop
    return groups


@lru_cache(maxsize=256)
def schedule_back(route: Route, heads: tuple[HeadsOfRanks, ...]) -> CopySchedule:
    """Return the copies of results into shards, where at most one rank sent each row and head.

    Args:
        route: The route by which this rank sent the tokens out.
        heads: For each tensor, the heads that every rank sent back.
    """
    schedule, there = [], 0
    for rank, ranges in enumerate(route.sends):
        for rows in ranges:
            for i, head_ranges in enumerate(heads):
                first, width = head_ranges[rank].start, len(head_ranges[rank])
                schedule.append(RowCopy(i, there, rows.start, len(rows), 0, first, width))
            there += len(rows)
    return tuple(schedule)


def place_results(
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
                narrow(target, group).fill_(nothing)
    copy_rows(received, targets, schedule_back(route, tuple(heads)))


def narrow(tensor: Tensor, heads: range) -> Tensor:
    """Return a range of heads of a tensor ``[batch, heads, ...]``."""
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads.start : heads.stop]
