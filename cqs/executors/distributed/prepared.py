"""Calls on a process group that share a signature: their plans and routing tables, made once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.autograd import Attended, Kept, attend_differentiably
from cqs.executors.distributed.agreement import Request, Shards, agreed, control_group, swap
from cqs.executors.distributed.bounded import Limit, lay_out_within
from cqs.executors.distributed.layout import Layout, ShardedWork
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.distributed.rank_terms import RankTerms, has_own_rows
from cqs.executors.distributed.rank_units import RankUnits
from cqs.executors.distributed.route import cut_shards
from cqs.executors.distributed.transport.connections import (
    probe_links,
    ranks_per_host,
    transport_of,
)
from cqs.executors.distributed.verify import verify_shards
from cqs.executors.observe import observe
from cqs.partial import Gradients, Partial
from cqs.problem import GPU_TILE, Problem
from cqs.problem.masks import check_pattern
from cqs.problem.score_terms import ScoreTerms
from cqs.scheduler.machines import MACHINES
from cqs.worker import BACKENDS, Worker
from cqs.worker.memory import free_bytes

_MOST_PLACEMENTS = 256
"""Number of signatures and shard lengths of a group that are kept."""
_placements: "WeakKeyDictionary[Any, dict[Any, _Placement]]" = WeakKeyDictionary()
"""For each process group, what calls with equal arguments and shard lengths share."""


def attend_shards(group: Any, problem: Problem, values: Mapping[str, Any]) -> Partial:
    """Compute this rank's queries; every rank calls this.

    Args:
        group: The process group.
        problem: This rank's shards.
        values: Arguments of the call that must be equal on all ranks, by name.

    Raises:
        ValueError: Another rank has other arguments, or an error.
        RuntimeError: A rank has failed, or threads have called on the group at the same time.
    """
    request, own = _request_of(tuple(values.items())), _own_numbers(problem)
    # With gradients the backward pass checks: other ranks wait for this one to run it.
    with agreed(group, request, own, checks=not values["requires_grad"]) as shards:
        placement = _place(group, problem, values, shards)
        return placement.attend(group, placement.bind(group, problem, shards.seed), shards.number)


def prepare_shards(group: Any, problem: Problem, values: Mapping[str, Any]) -> None:
    """Lay out the shards of all ranks for calls of :func:`attend_shards`; every rank calls this."""
    request = Request({**values, "call": "prepare"})
    with agreed(group, request, _own_numbers(problem)) as shards:
        placement = _place(group, problem, values, shards)
        placement.lay_out_parts(placement.bind(group, problem, shards.seed))


@lru_cache(maxsize=64)
def _request_of(values: tuple[tuple[str, Any], ...]) -> Request:
    return Request(dict(values))


def _place(group: Any, problem: Problem, values: Mapping[str, Any], shards: Shards) -> "_Placement":
    """Return what calls with these arguments and shard lengths share."""
    placements = _placements.setdefault(group, {})
    key = *values.items(), shards._replace(seed=0, number=0)
    if key not in placements:
        placement = _Placement(group, problem, shards, values)
        if len(placements) >= _MOST_PLACEMENTS:
            del placements[next(iter(placements))]
        placements[key] = placement
    return placements[key]


class _Placement:
    """What the calls of one signature with equal shard lengths on all ranks share."""

    def __init__(
        self, group: Any, problem: Problem, shards: Shards, values: Mapping[str, Any]
    ) -> None:
        """Choose machine, transport and limit; every rank calls this, with agreed arguments."""
        self.values, self.shards, self.rank = values, shards, dist.get_rank(group)
        self.lengths = sum(shards.seqlens_q), sum(shards.seqlens_kv)
        """Numbers of queries and keys of the whole sequence."""
        device, per_host, links = problem.query.device, ranks_per_host(group), values["links"]
        has_one_host = per_host == len(shards.seqlens_q)
        if links is None and not has_one_host:
            links = probe_links(group, device)
        name = list(MACHINES)[shards.machine]
        if name == "CPU" and has_one_host and links is None:
            name = "H200"  # so that programs which are tried on CPUs run the plans of GPUs
        self.machine = replace(MACHINES[name], devices_per_node=per_host)
        """The machine to plan for, which is the same on all ranks."""
        if links is not None:
            side = "bandwidth" if has_one_host else "between"
            rates = {side: links.bandwidth, "latency": links.latency}
            self.machine = replace(self.machine, **rates)
        self.transport = transport_of(group, device)
        self.is_causal, self.pattern = values["is_causal"], values["pattern"]
        """Whether attention over the whole sequence is dense and causal, and its pattern."""
        if self.pattern is not None:
            sizes = *problem.query.shape[:2], *self.lengths
            self.is_causal, self.pattern = check_pattern(self.pattern, self.is_causal, *sizes)
        self.limit: int | None = values["max_bytes"]
        """Most bytes that any rank may hold for exchanges: ``max_bytes``, or else on GPUs the
        memory that is free on every rank."""
        if self.limit is None and not values["is_captured"] and device.type == "cuda":
            self.limit = min(swap(control_group(group), [free_bytes(device)]))
        self.tasks: dict[Any, RankTask] = {}
        """The tasks of this rank, by pattern, batch, numbers of heads and whether they are
        deterministic."""

    def bind(self, group: Any, problem: Problem, seed: int) -> Problem:
        """Return a problem with the mask of the whole sequence and the seed of rank 0.

        Every rank calls this.
        """
        dropout, terms = problem.dropout and replace(problem.dropout, seed=seed), problem.terms
        if terms is not None:
            terms = self._bind_terms(group, terms, problem.query.shape[2])
        return replace(
            problem, is_causal=self.is_causal, pattern=self.pattern, dropout=dropout, terms=terms
        )

    def _bind_terms(self, group: Any, terms: ScoreTerms, num_rows: int) -> ScoreTerms:
        """Return score terms with the positions of the rows and columns of their bias."""
        num_queries, num_keys = self.lengths
        terms = replace(terms, distance=num_keys - num_queries)
        if terms.bias is None:
            return terms
        if terms.bias.shape[3] not in (1, num_keys):
            raise ValueError(
                "scores.bias must have the columns of the whole sequence, 1 or "
                f"{num_keys}, got {terms.bias.shape[3]}"
            )
        if not has_own_rows(group, terms.bias, num_rows):
            return terms  # every rank has all rows, so none is exchanged
        queries = cut_shards(self.shards.seqlens_q)[self.rank]
        return replace(terms, held=((queries,), (range(num_keys),)))

    def attend(self, group: Any, problem: Problem, number: int) -> Partial:
        """Compute this rank's queries, and compare sampled rows if that is asked for.

        Args:
            group: The process group.
            problem: This rank's shards, from :meth:`bind`.
            number: Number of the call.
        """
        if self.limit is not None and problem.differs_by_head:
            self.lay_out_parts(problem)
        answer = attend_differentiably(problem, partial(self._attend_part, group, number))
        if self.values["verify"]:
            verify_shards(group, problem, answer, self.shards)
        return answer

    def _attend_part(self, group: Any, number: int, part: Problem) -> Attended:
        """Compute a part of the problem with a single pattern."""
        if part.is_reproducible:
            units = RankUnits(group, part, self.shards[:2], self.values["backend"])
            plan, backend, attend = units.plan, units.backend, units.attend_part
        elif part.query.shape[0]:
            task = self._task_of(part)
            chosen, plan = task.worker.chosen, task.layout.plan
            backend = "several" if chosen is None else chosen.name
            attend = partial(self._attend_task, group, task)
        else:  # no rank sends a row in either pass
            shapes = part.query.shape, part.key.shape, part.value.shape
            empty = part.empty_answer()
            return Attended(empty, (), lambda _, g, __: Gradients(*map(g.new_empty, shapes)))
        observed = plan, part.num_bytes, lambda: backend
        with observe("forward", *observed):
            attended = attend(part)
        differentiate = attended.differentiate

        def compare_and_differentiate(*arguments: Any) -> Gradients:
            request = Request({"call": f"the backward pass of call {number}"})
            with observe("backward", *observed), agreed(group, request):
                return differentiate(*arguments)

        return attended._replace(differentiate=compare_and_differentiate)

    def _attend_task(self, group: Any, task: RankTask, part: Problem) -> Attended:
        """Compute the task of this rank for a part of the problem."""
        shapes, terms = (part.query.shape, part.key.shape, part.value.shape), None
        task_terms, bias = None, tuple[Tensor, ...]()
        if part.terms is not None:
            ranks = range(len(self.shards.seqlens_q)) if part.terms.held else ()
            layouts = [self._lay_out(part, rank) for rank in ranks]
            terms = RankTerms(group, part.terms, task.layout, layouts)
            task_terms, bias = terms.gather(part.terms)
        answer, kept = task.attend(part, task_terms)
        num_bias = len(bias)

        def differentiate(kept: Kept, grad_output: Tensor, sums: Sequence[Tensor]) -> Gradients:
            bias, kept = kept[:num_bias], kept[num_bias:]
            task_terms = None if terms is None else terms.with_sums(bias, sums)
            gradients = task.differentiate(shapes, kept, grad_output, task_terms)
            if terms is not None and task_terms is not None:
                terms.return_sums(task_terms, sums)
            return gradients

        return Attended(answer, (*bias, *kept), differentiate)

    def lay_out_parts(self, problem: Problem) -> None:
        """Lay out all parts of the problem; an error gives a limit that is enough for all."""
        errors = list[ValueError]()
        for _, part in problem.parts():
            try:
                if not part.is_reproducible:
                    self._task_of(part)
            except ValueError as error:
                errors.append(error)
        if errors:  # their texts differ in the limit alone, so the longest has the largest
            raise max(errors, key=lambda error: (len(str(error)), str(error)))

    def _task_of(self, part: Problem) -> RankTask:
        """Return the task of this rank for a part of the problem with a single pattern."""
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        key = part.pattern, *part.query.shape[:2], part.key.shape[1], is_deterministic
        if key not in self.tasks:
            self.tasks[key] = self._make_task(part)
        task = self.tasks[key]
        if part.dropout is None:
            return task
        return replace(task, worker=replace(task.worker, dropout=part.dropout))

    def _make_task(self, part: Problem) -> RankTask:
        """Return this rank's task of a part of the problem, without dropout and score terms."""
        pattern, values = part.pattern, self.values
        bound = None if pattern is None else pattern.bind(*self.lengths)
        worker = Worker(part.scale, values["backend"], None, bound)
        layout = self._lay_out(part, self.rank)
        # Calls add dropout and score terms. No steps stand for launches of several ones.
        complete = replace(worker, dropout=part.dropout, terms=part.terms)
        rounds = (current.steps for current in layout.rounds)
        groups = (), *layout.split, *rounds
        tensors = part.query, part.key, part.value  # raises on all ranks or on none
        chosen = {complete.choose_backend(*tensors, steps).name for steps in groups}
        if len(chosen) == 1:
            worker = replace(worker, chosen=BACKENDS[chosen.pop()])
        keeps = values["requires_grad"]
        return RankTask(self.transport, layout, worker, self._sends_lse(part), keeps)

    def _lay_out(self, part: Problem, rank: int) -> Layout:
        """Return the layout of a rank for a part of the problem."""
        values, (seqlens_q, seqlens_kv, *_) = self.values, self.shards
        is_given = values["max_bytes"] is not None
        transport = self.transport.has_buffer, self.transport.num_turns
        limit = Limit(self.limit, is_given, part.shape, *transport, self._sends_lse(part))
        work = ShardedWork(
            *(seqlens_q, seqlens_kv, replace(part.shape, batch=1, has_dropout=False)),
            *(part.is_causal, part.pattern, values["plan"]),
            head_parallel=values["head_parallel"],
            num_chunks=values["num_chunks"],
            tile=GPU_TILE if part.query.is_cuda else 1,
            chunk_rule=self.transport.chunk_rule,
            machine=self.machine,
            with_gradients=values["requires_grad"],
        )
        return lay_out_within(limit, work, rank)

    def _sends_lse(self, part: Problem) -> bool:
        """Return whether the LSE of final results is required."""
        values, has_sinks = self.values, part.sinks is not None
        is_kept = values["requires_grad"] and has_sinks
        return bool(values["return_lse"] or values["verify"] or is_kept)


def _own_numbers(problem: Problem) -> tuple[int, int, int, int]:
    """Return the numbers of this rank of which :class:`Shards` has those of all ranks."""
    query, seed = problem.query, 0 if problem.dropout is None else problem.dropout.seed
    return query.shape[2], problem.key.shape[2], seed, _machine_of(query.device)


@lru_cache
def _machine_of(device: torch.device) -> int:
    """Return the index in ``MACHINES`` of a device, of H100 for an unknown GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = (i for i, part in enumerate(MACHINES) if part in name.upper())
    return next(known, list(MACHINES).index("H100"))
