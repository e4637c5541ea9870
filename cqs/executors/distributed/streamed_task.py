"""Passes of a rank that receives the tokens of its task in batches and parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from cqs.executors.autograd import Kept
from cqs.executors.distributed.batches import Batch, Part
from cqs.executors.distributed.exchange import Exchange, by_heads
from cqs.executors.distributed.layout import HeadChunk
from cqs.executors.distributed.rank_task import AGREED, RankTask
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.transport.transfer import Pass, Transfer
from cqs.partial import Gradients, Partial, RunningMerge, lse_dtype
from cqs.problem import Problem
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import add_sinks
from cqs.scheduler.token_order import KEYS, QUERIES
from cqs.worker import HeldTokens, Worker

_NUM_TURNS = 2
"""Number of exchanges in transit in one direction."""


@dataclass(frozen=True)
class StreamedTask(RankTask):
    """Computes the task of one rank with few of its tokens at a time.

    For each head chunk and batch a rank receives the resident side, and then streams the other side
    past it: one part is received while it computes with the part before. The backward pass receives
    all tokens again, with gradient, output and LSE of the queries. Tensors are freed as soon as
    possible, in the order that :func:`cqs.scheduler.token_order.held_bytes` counts.
    """

    batches: tuple[Batch, ...] = ()
    """The batches of every head chunk."""
    resident: int = KEYS
    """The resident side."""

    def attend(
        self,
        problem: Problem,
        terms: ScoreTerms | None = None,
        *,
        with_lse: bool,
        keep: bool,
        of_pass: Pass = AGREED,
    ) -> tuple[Partial, Kept]:
        """Compute output and LSE of this rank's queries; see :meth:`RankTask.attend`.

        Keeps the shard, output and LSE for the backward pass.
        """
        shards = problem.query, problem.key, problem.value
        answer = problem.empty_answer()
        turns = count()
        with Exchange(self.transport, of_pass, _NUM_TURNS) as exchange:
            for chunk in self.layout.chunks:
                worker, merges = self._worker_of(chunk, terms), _Merges(answer, chunk)
                stream = _Stream(exchange, chunk, worker, self.resident, turns)
                for batch in self.batches:
                    stream.attend(batch, shards, merges)
                merges.finish()
        if problem.sinks is not None:
            add_sinks(answer, problem.sinks)
        return answer, (*shards, *answer) if keep else ()

    def differentiate(
        self,
        shapes: Sequence[torch.Size],
        kept: Kept,
        grad_output: Tensor,
        terms: ScoreTerms | None = None,
        of_pass: Pass = AGREED,
    ) -> Gradients:
        """Compute the gradients of this rank's shard; see :meth:`RankTask.differentiate`."""
        query, key, value, *answer = kept
        gradients = Gradients(*(grad_output.new_zeros(shape) for shape in shapes))
        turns = count()
        with Exchange(self.transport, of_pass, _NUM_TURNS) as exchange:
            for chunk in self.layout.chunks:
                worker, sums = self._worker_of(chunk, terms), _Sums(gradients, chunk)
                stream = _Stream(exchange, chunk, worker, self.resident, turns)
                for batch in self.batches:
                    stream.differentiate(batch, [query, grad_output, *answer], [key, value], sums)
                sums.finish()
        return gradients


class _Merges:
    """Sums of the partial outputs of a head chunk that other ranks return for this rank's shard."""

    def __init__(self, answer: Partial, chunk: HeadChunk) -> None:
        self._heads = chunk.query_heads
        self._merges = {
            heads: RunningMerge(Partial(*(part[:, heads.start : heads.stop] for part in answer)))
            for heads in dict.fromkeys(self._heads)
        }

    def add(self, received: Sequence[Tensor], route: Route) -> None:
        """Merge output and LSE that were sent back along a route."""
        outputs, lses = (by_heads(part, route, self._heads) for part in received)
        for heads, merge in self._merges.items():
            for (output, rows), (lse, _) in zip(outputs[heads], lses[heads], strict=True):
                merge.add_own(Partial(output, lse), rows)

    def finish(self) -> None:
        """Write output and LSE into the answer, and free the sums."""
        while self._merges:
            self._merges.popitem()[1].finish()


class _Sums:
    """Sums of the gradients of a head chunk that other ranks return for this rank's shard."""

    def __init__(self, gradients: Gradients, chunk: HeadChunk) -> None:
        self._heads, self._sums = chunk.heads, list[dict[range, tuple[Tensor, Tensor]]]()
        for gradient, of_ranks in zip(gradients, chunk.heads, strict=True):
            of_heads = {}
            for heads in dict.fromkeys(of_ranks):
                place = gradient[:, heads.start : heads.stop]
                dtype = lse_dtype(place.dtype)
                total = place if place.dtype == dtype else place.new_zeros(place.shape, dtype=dtype)
                of_heads[heads] = place, total
            self._sums.append(of_heads)

    def add(self, side: int, received: Sequence[Tensor], route: Route) -> None:
        """Add the gradients of queries, or of keys and values, that were sent back."""
        for number, tensor in enumerate(received, side):
            for heads, parts in by_heads(tensor, route, self._heads[number]).items():
                total = self._sums[number][heads][1]
                for part, rows in parts:
                    total[:, :, rows] += part

    def finish(self) -> None:
        """Write the sums into the gradients, and free them."""
        while self._sums:
            for place, total in self._sums.pop().values():
                if total is not place:
                    place.copy_(total)


class _Stream:
    """Streams the parts of a batch past its resident tokens, for one head chunk of a pass."""

    def __init__(
        self,
        exchange: Exchange,
        chunk: HeadChunk,
        worker: Worker,
        resident: int,
        turns: Iterator[int],
    ) -> None:
        self._exchange, self._chunk, self._worker = exchange, chunk, worker
        self._resident, self._streamed, self._turns = resident, 1 - resident, turns

    def attend(self, batch: Batch, shards: Sequence[Tensor], merges: _Merges) -> None:
        """Compute the partial outputs of a batch, and merge those of this rank's shard.

        Args:
            batch: Tokens and steps.
            shards: Query, key and value of this rank, all heads.
            merges: Sums of the results of this rank's queries.
        """
        sides = shards[:1], shards[1:]
        resident = self._fetch(self._resident, sides, batch.route).wait()
        if self._resident == QUERIES:
            results = self._attend_queries(batch, sides, resident)
            merges.add(self._return(batch.route, results).wait(), batch.route)
            return
        returning = None
        for part, held in self._receive(batch.parts, sides):
            found = self._compute(part, held, resident, batch.route)
            held.clear()
            if returning is not None:
                merges.add(returning[0].wait(), returning[1])
            returning = self._return(part.route, found), part.route
            del found
        if returning is not None:
            merges.add(returning[0].wait(), returning[1])

    def _attend_queries(
        self, batch: Batch, sides: Sequence[Sequence[Tensor]], resident: list[Tensor]
    ) -> Partial:
        """Return the partial outputs of resident queries over all keys that are streamed."""
        query, value = resident[0], sides[KEYS][1]
        output = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query.dtype))
        merge = RunningMerge(Partial(output, lse))
        for part, held in self._receive(batch.parts, sides):
            if part.steps:
                merge.add_own(self._compute(part, resident, held, batch.route))
            held.clear()
        resident.clear()
        return merge.finish()

    def _compute(
        self, part: Part, of_queries: list[Tensor], of_keys: list[Tensor], resident: Route
    ) -> Partial:
        """Return the partial outputs of a part for all queries held."""
        (query,), (key, value) = of_queries, of_keys
        if not part.steps:
            output = query.new_empty((*query.shape[:3], value.shape[3]))
            return Partial(output, query.new_empty(query.shape[:3], dtype=lse_dtype(query.dtype)))
        queries, keys = self._ranges(part.route, resident)
        held = map(HeldTokens.packed, (query, key, value), (queries, keys, keys))
        return self._worker.run_together(part.steps, *held)

    def differentiate(
        self,
        batch: Batch,
        of_queries: Sequence[Tensor],
        of_keys: Sequence[Tensor],
        sums: _Sums,
    ) -> None:
        """Compute the gradients of a batch, and add those of this rank's shard.

        Args:
            batch: Tokens and steps.
            of_queries: Query, gradient of the output, output and LSE of this rank, all heads.
            of_keys: Key and value of this rank, all heads.
            sums: Sums of the gradients of this rank's shard.
        """
        sides, side = (of_queries, of_keys), self._streamed
        resident = self._fetch(self._resident, sides, batch.route).wait()
        shapes = [each.shape for each in resident][: 1 if self._resident == QUERIES else None]
        dtype, returning, added = of_queries[0].dtype, None, list[Tensor]()
        for part, held in self._receive(batch.parts, sides):
            of_part, found = self._differentiate(part, held, resident, batch.route)
            held.clear()
            added = _added(added, found)
            found.clear()
            if returning is not None:
                sums.add(side, returning[0].wait(), returning[1])
            narrow = _narrowed(of_part, dtype)
            returning = self._return(part.route, narrow), part.route
            narrow.clear()
        if returning is not None:
            sums.add(side, returning[0].wait(), returning[1])
        resident.clear()
        narrow = _narrowed(added, dtype) or [of_queries[0].new_empty(shape) for shape in shapes]
        transfer = self._return(batch.route, narrow)
        narrow.clear()
        sums.add(self._resident, transfer.wait(), batch.route)

    def _differentiate(
        self, part: Part, held: list[Tensor], resident: list[Tensor], of_resident: Route
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the streamed side of a part, and its share of the resident side.

        They are float32 (float64 for float64 tensors). A part without steps has no share.
        """
        of_queries, of_keys = (held, resident) if self._resident == KEYS else (resident, held)
        (query, *others), (key, value) = of_queries, of_keys
        if not part.steps:
            like = [query] if self._streamed == QUERIES else of_keys
            return [each.new_empty(each.shape) for each in like], []
        queries, keys = self._ranges(part.route, of_resident)
        ranges = queries, keys, keys, *(queries for _ in others)
        tensors = map(HeldTokens.packed, (query, key, value, *others), ranges)
        of_query, *of_others = self._worker.run_backward(part.steps, *tensors)
        if self._streamed == QUERIES:
            return [of_query], of_others
        return of_others, [of_query]

    def _ranges(
        self, streamed: Route, resident: Route
    ) -> tuple[tuple[range, ...], tuple[range, ...]]:
        """Return the positions of the queries and of the keys held in a part."""
        if self._streamed == QUERIES:
            return streamed.held, resident.held
        return resident.held, streamed.held

    def _fetch(self, side: int, sides: Sequence[Sequence[Tensor]], route: Route) -> Transfer:
        tensors = sides[side]
        if route.is_local:  # views of the shard
            own = self._chunk.heads[side][route.rank]
            rows = next(iter(route.sends[route.rank]), range(0))
            chosen = slice(own.start, own.stop), slice(rows.start, rows.stop)
            return Transfer([tensor[:, *chosen] for tensor in tensors], [])
        heads, routes = [self._chunk.heads[side]] * len(tensors), [route] * len(tensors)
        return self._exchange.fetch(next(self._turns), tensors, heads, routes)

    def _return(self, route: Route, results: Sequence[Tensor]) -> Transfer:
        return self._exchange.send_back(next(self._turns), results, [route] * len(results))

    def _receive(
        self, parts: Sequence[Part], sides: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Part, list[Tensor]]]:
        """Yield the tensors of each part, which the caller frees; the next part is in transit."""
        coming = self._fetch(self._streamed, sides, parts[0].route) if parts else None
        for i, part in enumerate(parts, 1):
            assert coming is not None
            held = coming.wait()
            if i < len(parts):
                coming = self._fetch(self._streamed, sides, parts[i].route)
            yield part, held


def _added(sums: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Add tensors to sums in place, and return the sums; the first are the sums themselves."""
    if not sums:
        return [*found]
    for total, each in zip(sums, found, strict=False):
        total += each
    return sums


def _narrowed(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in a dtype, and free those of another."""
    narrow = [each.to(dtype) for each in tensors]
    tensors.clear()
    return narrow
