"""Reproducible passes of a rank: it computes some units, and merges all parts of its own shard.

The units are those of every other executor (:mod:`cqs.worker.units`), and so is the order in which
their parts are merged. Nothing is merged before the owner of the tokens has all parts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby, product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.route import cut_shards
from cqs.executors.distributed.transport.blocks import swap_blocks
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows, sum_rows
from cqs.problem import Problem
from cqs.problem.scores import merge_sinks
from cqs.ranges import overlap, rows_of
from cqs.scheduler import Plan, Task
from cqs.scheduler.task import join_ranges
from cqs.worker import HeldTokens, Worker
from cqs.worker.units import Place, at_place, places_of, run_in_threads, tokens_of_task

Returned = dict[Place, list[tuple[Tensor, slice]]]
"""For each place, the parts of this rank's tokens in the order of their merge, and their rows."""


class HeadUnits(NamedTuple):
    """The units of one place that a rank computes."""

    place: Place
    """The batch element and heads."""
    tasks: tuple[Task, ...]
    """Their tasks, ascending."""

    def ranges(self, of_keys: bool) -> tuple[range, ...]:
        """Return the queries, or the keys, that the tasks hold."""
        return join_ranges(chain.from_iterable(map(_held_tokens(of_keys), self.tasks)))


@lru_cache(maxsize=64)
def deal_units(plan: Plan, places: tuple[Place, ...], num_ranks: int) -> list[list[HeadUnits]]:
    """Return the units of every rank: equal work, in which few ranks share a place.

    In rank order they are sorted by place and task.
    """
    units = [(place, task) for place, task in product(places, plan.tasks) if task.steps]
    ends = list(accumulate(task.live_pairs for _, task in units))
    middles = (2 * end - task.live_pairs for end, (_, task) in zip(ends, units, strict=True))
    owners = [middle * num_ranks // (2 * ends[-1]) for middle in middles]
    dealt: list[list[HeadUnits]] = [[] for _ in range(num_ranks)]
    owned = zip(owners, units, strict=True)
    for (rank, place), run in groupby(owned, key=lambda entry: (entry[0], entry[1][0])):
        dealt[rank].append(HeadUnits(place, tuple(task for _, (_, task) in run)))
    return dealt


@dataclass(frozen=True)
class RankUnits:
    """The units of all ranks of a group, and the exchanges around those of this rank."""

    group: Any
    """The process group; ``None`` means the default group."""
    plan: Plan
    """The plan of the whole sequence."""
    shards: tuple[Sequence[range], Sequence[range]]
    """Positions of the queries, and of the keys, of every rank."""
    dealt: list[list[HeadUnits]]
    """The units of every rank."""
    worker: Worker
    """Worker of all heads."""

    @classmethod
    def of(
        cls,
        group: Any,
        problem: Problem,
        lengths: tuple[Sequence[int], Sequence[int]],
        backend: str | None,
    ) -> "RankUnits":
        """Divide the units of a problem.

        Args:
            group: The process group.
            problem: This rank's shards, with the mask of the whole sequence.
            lengths: Number of queries, and of keys, of every rank.
            backend: Name of a backend; ``None`` means the preferred one.

        Raises:
            NotImplementedError: No reproducible backend supports the problem, or it has a bias, or
                slopes or a score function that require gradients.
        """
        terms = problem.terms
        if terms is not None and (terms.bias is not None or terms.leaves):
            raise NotImplementedError(
                "reproducible ranks support neither scores.bias nor gradients of slopes and score "
                "functions: call cqs.attention or Cluster.attention with them"
            )
        seqlens = sum(lengths[0]), sum(lengths[1])
        plan = problem.make_plan(problem.num_tasks or 1, seqlens=seqlens)
        pattern = problem.pattern and problem.pattern.bind(*seqlens)
        worker = replace(Worker.of(replace(problem, pattern=None), backend), pattern=pattern)
        worker.choose_backend(problem.query, problem.key, problem.value)  # raises on all ranks
        places = tuple(places_of(problem.query, problem.key))
        shards = cut_shards(lengths[0]), cut_shards(lengths[1])
        return cls(group, plan, shards, deal_units(plan, places, len(lengths[0])), worker)

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)

    def attend(self, problem: Problem) -> Partial:
        """Compute output and LSE of this rank's queries; every rank calls this."""
        tensors, answer = (problem.query, problem.key, problem.value), problem.empty_answer()
        parts = list(chain.from_iterable(self._compute(Worker.run_steps, *tensors)))
        outputs, lses = (
            self._return([part[number] for part in parts], target, _step_queries, target.dtype)
            for number, target in enumerate(answer)
        )
        for place in places_of(problem.query, problem.key):
            own = [
                (Partial(output, lse), rows)
                for (output, rows), (lse, _) in zip(outputs.get(place, ()), lses.get(place, ()), strict=True)
            ]
            merge_rows(Partial(*(target[place.row, place.heads[0]] for target in answer)), own)
        return answer if problem.sinks is None else merge_sinks(answer, problem.sinks)

    def differentiate(self, problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients of this rank's shard; every rank calls this."""
        tensors = problem.query, problem.key, problem.value
        parts = self._compute(Worker.run_backward, *tensors, grad_output, *answer)
        gradients = Gradients(*map(torch.empty_like, tensors))
        for number, gradient in enumerate(gradients):
            held = _held_tokens(number > 0)
            blocks = [
                block
                for (_, task), part in zip(self._own_units, parts, strict=True)
                for block in part[number].split(list(map(len, held(task))), dim=2)
            ]
            dtype = lse_dtype(gradient.dtype)
            returned = self._return(blocks, gradient, held, dtype, of_keys=number > 0)
            for place in places_of(problem.query, problem.key):
                sum_rows(gradient[place.row, place.heads[number > 0]], returned.get(place, ()))
        return gradients

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks on rank 0, and none on the others.

        Args:
            rows: ``[num_heads, batch, queries of this rank]``.
        """
        lengths = [len(queries) * (not self.rank) for queries in self.shards[0]]
        received = [rows.new_empty((*rows.shape[:2], length)) for length in lengths]
        sent = [[rows], *[[] for _ in lengths[1:]]]
        swap_blocks(self.group, sent, [[block] for block in received], rows)
        return torch.cat(received, dim=2)

    @property
    def _own_units(self) -> list[tuple[Place, Task]]:
        return _flat(self.dealt[self.rank])

    def _compute(self, run: Callable[..., Any], *tensors: Tensor) -> list[Any]:
        """Return what a method of the worker returns for each unit of this rank.

        Args:
            run: The method, which takes steps and held tokens.
            tensors: Query, key, value and others of the queries, of this rank's shard.
        """
        held = dict[Place, list[HeldTokens]]()
        for number, tensor in enumerate(tensors):
            for place, tokens in self._fetch(tensor, of_keys=number in (1, 2)).items():
                held.setdefault(place, []).append(tokens)

        def compute(unit: tuple[Place, Task]) -> Any:
            place, task = unit
            tokens = tokens_of_task(task, held[place])
            return run(at_place(self.worker, place), task.steps, *tokens)

        return run_in_threads(compute, self._own_units)

    def _fetch(self, tensor: Tensor, *, of_keys: bool) -> dict[Place, HeldTokens]:
        """Return the tokens of a tensor that the units of this rank hold, for each place."""
        held, own = dict[Place, HeldTokens](), self.shards[of_keys][self.rank]
        for place, tasks in self.dealt[self.rank]:
            ranges = HeadUnits(place, tasks).ranges(of_keys)
            rows = tensor[:1, place.heads[of_keys], :0]
            shape = (*rows.shape[:2], sum(map(len, ranges)), *rows.shape[3:])
            held[place] = HeldTokens(rows.new_empty(shape), ranges)
        sent = [
            [
                _rows(tensor[units.place.row, units.place.heads[of_keys]], tokens, [own])
                for units in dealt
                for tokens in self._of_shard(units.ranges(of_keys), self.rank, of_keys)
            ]
            for dealt in self.dealt
        ]
        received = [
            [
                _rows(tokens.joined(), common, tokens.ranges)
                for tokens in held.values()
                for common in self._of_shard(tokens.ranges, rank, of_keys)
            ]
            for rank in range(len(self.dealt))
        ]
        swap_blocks(self.group, sent, received, tensor)
        return held

    def _return(
        self,
        parts: Sequence[Tensor],
        target: Tensor,
        tokens_of: Callable[[Task], Sequence[range]],
        dtype: torch.dtype,
        *,
        of_keys: bool = False,
    ) -> Returned:
        """Send parts of the units to the owners of their tokens; return those of this rank's.

        Args:
            parts: The parts of this rank's units: one for each of ``tokens_of``.
            target: The result, whose shape of a row and device they have.
            tokens_of: Returns the tokens of each part of a task.
            dtype: Their dtype.
            of_keys: Whether they are keys.
        """
        num_ranks, own = len(self.dealt), self.shards[of_keys][self.rank]
        spans = [
            [(place, tokens) for place, task in _flat(dealt) for tokens in tokens_of(task)]
            for dealt in self.dealt
        ]
        sent = [
            [
                _rows(part, common, [tokens])
                for part, (_, tokens) in zip(parts, spans[self.rank], strict=True)
                for common in self._of_shard([tokens], rank, of_keys)
            ]
            for rank in range(num_ranks)
        ]
        returned, received = Returned(), list[list[Tensor]]()
        for rank in range(num_ranks):
            received.append([])
            for place, tokens in spans[rank]:
                for common in self._of_shard([tokens], self.rank, of_keys):
                    rows = target[:1, place.heads[of_keys], : len(common)]
                    received[rank].append(torch.empty_like(rows, dtype=dtype))
                    first = common.start - own.start
                    part = received[rank][-1], slice(first, first + len(common))
                    returned.setdefault(place, []).append(part)
        swap_blocks(self.group, sent, received, target.new_empty(0, dtype=dtype))
        return returned

    def _of_shard(self, ranges: Iterable[range], rank: int, of_keys: bool) -> list[range]:
        """Return the tokens of a rank's shard among some ranges."""
        shard = self.shards[of_keys][rank]
        return [common for tokens in ranges if (common := overlap(tokens, shard))]


def _flat(dealt: Iterable[HeadUnits]) -> list[tuple[Place, Task]]:
    return [(place, task) for place, tasks in dealt for task in tasks]


def _rows(tensor: Tensor, tokens: range, ranges: Sequence[range]) -> Tensor:
    """Return the rows of ``tokens`` of a tensor that holds ``ranges``, as a view."""
    rows = rows_of(tokens, ranges)
    return tensor[:, :, rows.start : rows.stop]


def _step_queries(task: Task) -> list[range]:
    return [step.queries for step in task.steps]


def _held_tokens(of_keys: bool) -> Callable[[Task], tuple[range, ...]]:
    return attrgetter("held_keys" if of_keys else "held_queries")
