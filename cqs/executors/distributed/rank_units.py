"""Reproducible passes of a rank: it computes some units, and merges all parts of its own shard.

The units are those of every other executor (:mod:`cqs.worker.units`), and so is the order in which
their parts are merged. Nothing is merged before the owner of the tokens has all parts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.autograd import Attended, keep_operands
from cqs.executors.distributed.layout import Lengths
from cqs.executors.distributed.route import cut_shards
from cqs.executors.distributed.transport.blocks import swap_blocks
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows, sum_rows
from cqs.problem import Problem
from cqs.problem.scores import merge_sinks
from cqs.ranges import overlap
from cqs.scheduler import Plan, Task
from cqs.worker import HeldTokens, TaskBackend
from cqs.worker.units import Place, UnitWorker, at_place, places_of, run_in_threads, tokens_of_task

Unit = tuple[Place, Task]
"""A unit, or on GPUs those of a task for several KV heads."""


@lru_cache(maxsize=64)
def deal_units(
    plan: Plan, places: tuple[Place, ...], num_ranks: int, *, unites_heads: bool
) -> list[list[Unit]]:
    """Return the units of every rank: equal work, in which few ranks share a KV head.

    Args:
        plan: The plan of the whole sequence.
        places: Batch elements and KV heads.
        num_ranks: Number of ranks.
        unites_heads: Whether KV heads of which a rank has all units are computed together.
    """
    tasks = [task for task in plan.tasks if task.live_pairs]
    dealt = [defaultdict[Place, list[Task]](list) for _ in range(num_ranks)]
    end = 0
    for place, task in product(places, tasks):
        middle, end = 2 * end + task.live_pairs, end + task.live_pairs
        dealt[middle * num_ranks // (2 * plan.live_pairs * len(places))][place].append(task)
    units = []
    for own in dealt:
        united: dict[Any, tuple[Place, list[Task]]] = {}
        for place, own_tasks in own.items():
            key = place.batch if unites_heads and len(own_tasks) == len(tasks) else place
            first, _ = united.setdefault(key, (place, own_tasks))
            united[key] = first._replace(num_kv_heads=place.kv_head + 1 - first.kv_head), own_tasks
        units.append([(place, task) for place, own in united.values() for task in own])
    return units


class RankUnits:
    """The units of all ranks of a group, and the exchanges around those of this rank.

    Attributes:
        plan: The plan of the whole sequence.
        backend: Name of the backend of all units.
    """

    def __init__(
        self, group: Any, problem: Problem, lengths: Sequence[Lengths], backend: str | None
    ) -> None:
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
        if problem.terms is not None and (problem.terms.bias is not None or problem.terms.leaves):
            raise NotImplementedError(
                "reproducible ranks support neither scores.bias nor gradients of slopes and score "
                "functions: call cqs.attention, or Cluster.attention with tensors"
            )
        self._group, self._rank = group, dist.get_rank(group)
        seqlens = sum(lengths[0]), sum(lengths[1])
        self.plan = problem.make_plan(problem.num_tasks or 1, seqlens=seqlens)
        pattern = None if problem.pattern is None else problem.pattern.bind(*seqlens)
        worker = replace(UnitWorker.of(replace(problem, pattern=None), backend), pattern=pattern)
        chosen = worker.choose_backend(problem.query, problem.key, problem.value)
        self.backend = chosen.name
        self._worker, self._on_gpu = replace(worker, chosen=chosen), isinstance(chosen, TaskBackend)
        self._shards = cut_shards(lengths[0]), cut_shards(lengths[1])
        """Positions of the queries, and of the keys, of every rank."""
        places = tuple(places_of(problem.query, problem.key))
        self._dealt = deal_units(self.plan, places, len(lengths[0]), unites_heads=self._on_gpu)
        """The units of every rank."""

    def attend_part(self, problem: Problem) -> Attended:
        """Compute this rank's queries, and keep what its backward pass needs."""
        attended = keep_operands(self.attend, self.differentiate, problem)
        return attended._replace(gather_rows=self.gather_rows)

    def attend(self, problem: Problem) -> Partial:
        """Compute output and LSE of this rank's queries; every rank calls this."""
        tensors, answer = (problem.query, problem.key, problem.value), problem.empty_answer()
        parts = list(chain.from_iterable(self._compute(UnitWorker.run_steps, *tensors)))
        outputs, lses = (
            self._return([part[number] for part in parts], target, target.dtype, _step_queries)
            for number, target in enumerate(answer)
        )
        own = self._shards[0][self._rank]
        for group in self.plan.token_groups:  # a GPU compiles a merge for each number of parts
            if common := overlap(group, own):
                first, stop = common.start - own.start, common.stop - own.start
                parts_of_group = [
                    (Partial(output, lse), slice(rows.start - first, rows.stop - first))
                    for (output, rows), (lse, _) in zip(outputs, lses, strict=True)
                    if first <= rows.start < stop
                ]
                merge_rows(Partial(*(part[:, :, first:stop] for part in answer)), parts_of_group)
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
                for (_, task), part in zip(self._dealt[self._rank], parts, strict=True)
                for block in part[number].split(list(map(len, held(task))), dim=2)
            ]
            dtype = lse_dtype(gradient.dtype)
            sum_rows(gradient, self._return(blocks, gradient, dtype, held, has_keys=number > 0))
        return gradients

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks on rank 0, and a tensor without rows on the others.

        Args:
            rows: ``[num_heads, batch, queries of this rank]``.
        """
        lengths = [len(queries) * (not self._rank) for queries in self._shards[0]]
        received = [rows.new_empty((*rows.shape[:2], length)) for length in lengths]
        sent = [[rows], *[[] for _ in lengths[1:]]]
        swap_blocks(self._group, sent, [[block] for block in received], rows)
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
            return run(at_place(self._worker, place), task.steps, *tokens)

        return run_in_threads(compute, self._dealt[self._rank], in_order=self._on_gpu)

    def _gather(self, tensor: Tensor, *, has_keys: bool) -> dict[Place, Tensor]:
        """Return all tokens of the heads of which this rank computes units."""
        shards, (_, _, _, *dim) = self._shards[has_keys], tensor.shape
        places = [list(dict.fromkeys(place for place, _ in units)) for units in self._dealt]
        sent = [[tensor[p.row, p.heads[has_keys]] for p in peer_places] for peer_places in places]
        whole = {
            place: tensor.new_empty((1, block.shape[1], shards[-1].stop, *dim))
            for place, block in zip(places[self._rank], sent[self._rank], strict=True)
        }
        received = [[t[:, :, rows.start : rows.stop] for t in whole.values()] for rows in shards]
        swap_blocks(self._group, sent, received, tensor)
        return whole

    def _return(
        self,
        parts: Sequence[Tensor],
        target: Tensor,
        dtype: torch.dtype,
        tokens_of: Callable[[Task], Sequence[range]],
        *,
        has_keys: bool = False,
    ) -> list[tuple[Tensor, slice]]:
        """Send parts of this rank's units to the owners of their tokens.

        Args:
            parts: The parts: one for each range of ``tokens_of``.
            target: A tensor of this rank's rows, with their shape and device.
            dtype: Their dtype.
            tokens_of: Returns the tokens of each part of a task.
            has_keys: Whether the tokens are keys.

        Returns:
            The parts of this rank's tokens, of all heads, in task order, and their rows.
        """
        shards, own = self._shards[has_keys], self._shards[has_keys][self._rank]
        spans = [
            [
                (place, (task.index, i), tokens)
                for place, task in units
                for i, tokens in enumerate(tokens_of(task))
            ]
            for units in self._dealt
        ]
        sent: list[list[Tensor]] = [[] for _ in shards]
        for part, (*_, tokens) in zip(parts, spans[self._rank], strict=True):
            for blocks, shard in zip(sent, shards, strict=True):
                if common := overlap(tokens, shard):
                    first = common.start - tokens.start
                    blocks.append(part[:, :, first : first + len(common)])
        received: list[list[Tensor]] = [[] for _ in shards]
        returned: dict[tuple[int, int], tuple[Tensor, slice]] = {}
        for blocks, peer_spans in zip(received, spans, strict=True):
            for place, number, tokens in peer_spans:
                if common := overlap(tokens, own):
                    rows = slice(common.start - own.start, common.stop - own.start)
                    if number not in returned:
                        returned[number] = torch.empty_like(target[:, :, rows], dtype=dtype), rows
                    blocks.append(returned[number][0][place.row, place.heads[has_keys]])
        swap_blocks(self._group, sent, received, target.new_empty(0, dtype=dtype))
        return [returned[number] for number in sorted(returned)]


def _step_queries(task: Task) -> list[range]:
    return [step.queries for step in task.steps]
