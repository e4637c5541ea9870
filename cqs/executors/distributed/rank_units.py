"""Reproducible passes of a rank: it computes some units, and merges all parts of its own shard.

The units are those of every other executor (:mod:`cqs.worker.units`), and so is the order in which
their parts are merged. Nothing is merged before the owner of the tokens has all parts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, product
from operator import attrgetter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.layout import Lengths
from cqs.executors.distributed.route import cut_shards
from cqs.executors.distributed.transport.blocks import swap_blocks
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows, sum_rows
from cqs.problem import Problem
from cqs.problem.scores import merge_sinks
from cqs.ranges import overlap
from cqs.scheduler import Plan, Task
from cqs.worker import HeldTokens
from cqs.worker.units import Place, UnitWorker, at_place, places_of, run_in_threads, tokens_of_task

Unit = tuple[Place, Task]
Parts = defaultdict[Place, list[tuple[Tensor, slice]]]
"""For each place, parts of this rank's tokens in the order of their merge, and their rows."""


@lru_cache(maxsize=64)
def deal_units(plan: Plan, places: tuple[Place, ...], num_ranks: int) -> list[list[Unit]]:
    """Return the units of every rank: equal work, in which few ranks share a place.

    In rank order they are sorted by place and task.
    """
    units = [(place, task) for place, task in product(places, plan.tasks) if task.live_pairs]
    dealt: list[list[Unit]] = [[] for _ in range(num_ranks)]
    ends = accumulate(task.live_pairs for _, task in units)
    for unit, end in zip(units, ends, strict=True):
        middle = 2 * end - unit[1].live_pairs
        dealt[middle * num_ranks // (2 * plan.live_pairs * len(places))].append(unit)
    return dealt


@dataclass(frozen=True)
class RankUnits:
    """The units of all ranks of a group, and the exchanges around those of this rank."""

    group: Any
    """The process group; ``None`` means the default group."""
    rank: int
    """This rank."""
    plan: Plan
    """The plan of the whole sequence."""
    shards: tuple[Sequence[range], Sequence[range]]
    """Positions of the queries, and of the keys, of every rank."""
    dealt: list[list[Unit]]
    """The units of every rank."""
    worker: UnitWorker
    """Worker of all heads."""

    @classmethod
    def of(
        cls, group: Any, problem: Problem, lengths: Sequence[Lengths], backend: str | None
    ) -> Self:
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
                "functions: call cqs.attention, or Cluster.attention with tensors"
            )
        seqlens = sum(lengths[0]), sum(lengths[1])
        plan = problem.make_plan(problem.num_tasks or 1, seqlens=seqlens)
        pattern = None if problem.pattern is None else problem.pattern.bind(*seqlens)
        worker = replace(UnitWorker.of(replace(problem, pattern=None), backend), pattern=pattern)
        worker.choose_backend(problem.query, problem.key, problem.value)  # raises on all ranks
        places = tuple(places_of(problem.query, problem.key))
        shards = cut_shards(lengths[0]), cut_shards(lengths[1])
        dealt = deal_units(plan, places, len(lengths[0]))
        return cls(group, dist.get_rank(group), plan, shards, dealt, worker)

    def attend(self, problem: Problem) -> Partial:
        """Compute output and LSE of this rank's queries; every rank calls this."""
        tensors, answer = (problem.query, problem.key, problem.value), problem.empty_answer()
        parts = list(chain.from_iterable(self._compute(UnitWorker.run_steps, *tensors)))
        outputs, lses = (
            self._return([part[number] for part in parts], target, target.dtype, _step_queries)
            for number, target in enumerate(answer)
        )
        for place in places_of(problem.query, problem.key):
            own = [
                (Partial(output, lse), rows)
                for (output, rows), (lse, _) in zip(outputs[place], lses[place], strict=True)
            ]
            merge_rows(Partial(*(target[place.row, place.heads[0]] for target in answer)), own)
        return answer if problem.sinks is None else merge_sinks(answer, problem.sinks)

    def differentiate(self, problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients of this rank's shard; every rank calls this."""
        tensors = problem.query, problem.key, problem.value
        parts = self._compute(UnitWorker.run_backward, *tensors, grad_output, *answer)
        gradients = Gradients(*map(torch.empty_like, tensors))
        for number, gradient in enumerate(gradients):
            held = attrgetter("held_keys" if number else "held_queries")
            blocks = [
                block
                for (_, task), part in zip(self.dealt[self.rank], parts, strict=True)
                for block in part[number].split(list(map(len, held(task))), dim=2)
            ]
            dtype = lse_dtype(gradient.dtype)
            returned = self._return(blocks, gradient, dtype, held, has_keys=number > 0)
            for place in places_of(problem.query, problem.key):
                sum_rows(gradient[place.row, place.heads[number > 0]], returned[place])
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

    def _compute(self, run: Callable[..., Any], *tensors: Tensor) -> list[Any]:
        """Return what a method of the worker returns for each unit of this rank.

        Args:
            run: The method, which takes steps and held tokens.
            tensors: Query, key, value and others of the queries, of this rank's shard.
        """
        held = defaultdict[Place, list[HeldTokens]](list)
        for number, tensor in enumerate(tensors):
            for place, whole in self._gather(tensor, has_keys=number in (1, 2)).items():
                held[place].append(HeldTokens.whole(whole))

        def compute(unit: Unit) -> Any:
            place, task = unit
            tokens = tokens_of_task(task, held[place])
            return run(at_place(self.worker, place), task.steps, *tokens)

        return run_in_threads(compute, self.dealt[self.rank])

    def _gather(self, tensor: Tensor, *, has_keys: bool) -> dict[Place, Tensor]:
        """Return all tokens of the heads of which this rank computes units."""
        shards, (_, _, _, *dim) = self.shards[has_keys], tensor.shape
        places = [list(dict.fromkeys(place for place, _ in units)) for units in self.dealt]
        sent = [[tensor[p.row, p.heads[has_keys]] for p in peer_places] for peer_places in places]
        whole = {
            place: tensor.new_empty((1, block.shape[1], shards[-1].stop, *dim))
            for place, block in zip(places[self.rank], sent[self.rank], strict=True)
        }
        received = [[t[:, :, rows.start : rows.stop] for t in whole.values()] for rows in shards]
        swap_blocks(self.group, sent, received, tensor)
        return whole

    def _return(
        self,
        parts: Iterable[Tensor],
        target: Tensor,
        dtype: torch.dtype,
        tokens_of: Callable[[Task], Sequence[range]],
        *,
        has_keys: bool = False,
    ) -> Parts:
        """Send parts of this rank's units to the owners of their tokens.

        Args:
            parts: The parts: one for each range of ``tokens_of``.
            target: The result, with the shape of their rows and their device.
            dtype: Their dtype.
            tokens_of: Returns the tokens of each part of a task.
            has_keys: Whether they are keys.

        Returns:
            The parts of this rank's tokens.
        """
        shards, returned = self.shards[has_keys], Parts(list)
        spans = [
            [(place, tokens) for place, task in units for tokens in tokens_of(task)]
            for units in self.dealt
        ]
        sent: list[list[Tensor]] = [[] for _ in shards]
        for part, (_, tokens) in zip(parts, spans[self.rank], strict=True):
            for blocks, shard in zip(sent, shards, strict=True):
                if common := overlap(tokens, shard):
                    first = common.start - tokens.start
                    blocks.append(part[:, :, first : first + len(common)])
        received: list[list[Tensor]] = [[] for _ in shards]
        own = shards[self.rank]
        for blocks, peer_spans in zip(received, spans, strict=True):
            for place, tokens in peer_spans:
                if common := overlap(tokens, own):
                    rows = slice(common.start - own.start, common.stop - own.start)
                    place_rows = target[place.row, place.heads[has_keys], rows]
                    blocks.append(torch.empty_like(place_rows, dtype=dtype))
                    returned[place].append((blocks[-1], rows))
        swap_blocks(self.group, sent, received, target.new_empty(0, dtype=dtype))
        return returned


def _step_queries(task: Task) -> list[range]:
    return [step.queries for step in task.steps]
