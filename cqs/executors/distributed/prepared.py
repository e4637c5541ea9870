"""Calls on a process group that share a signature: their plans and routing tables, made once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.autograd import Attended, Kept, attend_differentiably, keep_operands
from cqs.executors.distributed.agreement import Request, Shards, calls_on, control_group, swap
from cqs.executors.distributed.bounded import Limit, lay_out_within
from cqs.executors.distributed.layout import Layout, ShardedWork
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.distributed.rank_terms import RankTerms, has_own_rows
from cqs.executors.distributed.rank_units import RankUnits
from cqs.executors.distributed.route import cut_shards
from cqs.executors.distributed.transport.connections import (
    Links,
    probe_links,
    ranks_per_host,
    transport_of,
)
from cqs.executors.distributed.transport.exchange import Transport
from cqs.executors.distributed.verify import verify_shards
from cqs.executors.observe import observe
from cqs.partial import Gradients, Partial
from cqs.patterns import Pattern
from cqs.problem import GPU_TILE, Problem
from cqs.problem.masks import check_pattern
from cqs.problem.score_terms import ScoreTerms
from cqs.scheduler.machines import MACHINES, Machine
from cqs.worker import BACKENDS, Worker
from cqs.worker.memory import free_bytes

_MOST_SIGNATURES = 64
"""Number of signatures of a group that are kept."""
_MOST_PLACEMENTS = 16
"""Number of shard lengths of a signature that are kept."""
_prepared: "WeakKeyDictionary[Any, Callable[..., PreparedCalls]]" = WeakKeyDictionary()
"""For each process group, the function that returns the calls of a signature."""


def prepared_calls(group: Any, values: Mapping[str, Any]) -> "PreparedCalls":
    """Return the calls of a signature on a group; made on the first call.

    Args:
        group: The process group; ``None`` means the default group.
        values: Arguments of the call that must be equal on all ranks, by name.
    """
    group = group or dist.group.WORLD
    if (find := _prepared.get(group)) is None:
        find = _prepared[group] = lru_cache(_MOST_SIGNATURES)(PreparedCalls)
    calls: PreparedCalls = find(tuple(values.items()))
    return calls


class PreparedCalls:
    """Calls of one signature on one group, which differ in their tensors and shard lengths.

    A call compares its signature with those of all ranks and learns their shard lengths, before
    it does anything that other ranks can notice.
    """

    def __init__(self, signature: tuple[tuple[str, Any], ...]) -> None:
        """Take the arguments that must be equal on all ranks, each with its name."""
        self.values = dict(signature)
        self._request = Request(self.values)
        self._placements: dict[Shards, _Placement] = {}

    def prepare(self, group: Any, problem: Problem) -> None:
        """Lay out the shards of all ranks; every rank calls this."""
        request, calls = Request({**self.values, "call": "prepare"}), calls_on(group)
        with calls.call():
            shards = calls.compare(control_group(group), request, _own_numbers(problem))
            placement = self._place(group, problem, shards)
            placement.lay_out_parts(placement.bind(problem, shards.seed))
        calls.check()

    def attend(self, group: Any, problem: Problem) -> Partial:
        """Compute this rank's queries; every rank calls this.

        Args:
            group: The process group; ``None`` means the default group.
            problem: This rank's shards.

        Raises:
            ValueError: Another rank has other arguments, or an error.
            RuntimeError: A rank has failed, or threads have called on the group at the same time.
        """
        calls = calls_on(group)
        with calls.call():
            shards = calls.compare(control_group(group), self._request, _own_numbers(problem))
            number, calls.num_calls = calls.num_calls, calls.num_calls + 1
            placement = self._place(group, problem, shards)
            answer = placement.attend(group, placement.bind(problem, shards.seed), number)
        # With gradients the backward pass checks: other ranks wait for this one to run it.
        if not answer.output.requires_grad:
            calls.check()
        return answer

    def _place(self, group: Any, problem: Problem, shards: Shards) -> "_Placement":
        """Return what calls with these shard lengths share."""
        key = shards._replace(seed=0)
        if key not in self._placements:
            placement = _Placement.of(group, problem, shards, self.values)
            if len(self._placements) >= _MOST_PLACEMENTS:
                del self._placements[next(iter(self._placements))]
            self._placements[key] = placement
        return self._placements[key]


@dataclass(frozen=True)
class _Placement:
    """What the calls of one signature with equal shard lengths on all ranks share."""

    values: Mapping[str, Any]
    """The arguments that are equal on all ranks, by name."""
    rank: int
    shards: Shards
    machine: Machine
    transport: Transport
    limit: int | None
    """Most bytes that any rank may hold for exchanges: ``max_bytes``, or else on GPUs the memory
    that is free on every rank."""
    is_causal: bool
    """Whether attention over the whole sequence is dense and causal."""
    pattern: Pattern | None
    """Pattern of the whole sequence; ``None`` if it is dense."""
    tasks: dict[Any, RankTask] = field(default_factory=dict)
    """The tasks of this rank, by pattern, batch, numbers of heads and whether they are
    deterministic."""

    @classmethod
    def of(
        cls, group: Any, problem: Problem, shards: Shards, values: Mapping[str, Any]
    ) -> "_Placement":
        """Return the placement; every rank calls this, with arguments on which all have agreed."""
        device, links = problem.query.device, values["links"]
        per_host = ranks_per_host(group)
        has_one_host = per_host == len(shards.seqlens_q)
        if links is None and not has_one_host:
            links = probe_links(group, device)
        transport = transport_of(group, device)
        batch, num_heads, *_ = problem.query.shape
        lengths = sum(shards.seqlens_q), sum(shards.seqlens_kv)
        is_causal, pattern = values["is_causal"], values["pattern"]
        if pattern is not None:
            is_causal, pattern = check_pattern(pattern, is_causal, batch, num_heads, *lengths)
        machine, limit = _plan_for(shards, per_host, links), values["max_bytes"]
        if limit is None and not values["is_captured"] and device.type == "cuda":
            limit = min(swap(control_group(group), [free_bytes(device)]))
        return cls(
            values, dist.get_rank(group), shards, machine, transport, limit, is_causal, pattern
        )

    def bind(self, problem: Problem, seed: int) -> Problem:
        """Return a problem with the mask of the whole sequence and the seed of rank 0."""
        dropout = problem.dropout and replace(problem.dropout, seed=seed)
        terms = problem.terms
        if terms is not None:
            terms = self._bind_terms(terms)
        return replace(
            problem, is_causal=self.is_causal, pattern=self.pattern, dropout=dropout, terms=terms
        )

    def _bind_terms(self, terms: ScoreTerms) -> ScoreTerms:
        """Return score terms with the positions of the rows and columns of their bias."""
        num_queries, num_keys = sum(self.shards.seqlens_q), sum(self.shards.seqlens_kv)
        terms = replace(terms, distance=num_keys - num_queries)
        if terms.bias is None:
            return terms
        if terms.bias.shape[3] not in (1, num_keys):
            raise ValueError(
                "scores.bias must have the columns of the whole sequence, 1 or "
                f"{num_keys}, got {terms.bias.shape[3]}"
            )
        queries = cut_shards(self.shards.seqlens_q)[self.rank]
        return replace(terms, held=((queries,), (range(num_keys),)))

    def attend(self, group: Any, problem: Problem, number: int) -> Partial:
        """Compute this rank's queries, and compare sampled rows if that is asked for.

        Args:
            group: The process group; ``None`` means the default group.
            problem: This rank's shards, from :meth:`bind`.
            number: Number of the call.
        """
        if self.limit is not None and problem.differs_by_head:
            self.lay_out_parts(problem)
        if problem.terms is not None and (bias := problem.terms.bias) is not None:
            if not has_own_rows(group, bias, problem.query.shape[2]):
                # Every rank has all rows of such a bias, so none is exchanged.
                problem = replace(problem, terms=replace(problem.terms, held=None))
        answer = attend_differentiably(problem, partial(self._attend_part, group, number))
        if self.values["verify"]:
            verify_shards(group, problem, answer, self.shards)
        return answer

    def _attend_part(self, group: Any, number: int, part: Problem) -> Attended:
        """Compute a part of the problem with a single pattern."""
        if part.is_reproducible:
            return self._attend_units(group, number, part)
        task, terms = self._task_of(part), None
        shapes = part.query.shape, part.key.shape, part.value.shape
        if not part.query.shape[0]:  # no rank sends a row in either pass
            empty = part.empty_answer()
            return Attended(empty, (), lambda _, g, __: Gradients(*map(g.new_empty, shapes)))
        chosen = task.worker.chosen
        name = "several" if chosen is None else chosen.name
        observed = task.layout.plan, part.num_bytes, lambda: name
        if part.terms is not None:
            ranks = range(len(self.shards.seqlens_q)) if part.terms.held else ()
            layouts = [self._lay_out(part, rank) for rank in ranks]
            terms = RankTerms(group, part.terms, task.layout, layouts)
        with observe("forward", *observed):
            task_terms, bias = None, tuple[Tensor, ...]()
            if terms is not None and part.terms is not None:
                task_terms, bias = terms.gather(part.terms)
            answer, kept = task.attend(part, task_terms, number)
        num_bias = len(bias)

        def differentiate(kept: Kept, grad_output: Tensor, sums: Sequence[Tensor]) -> Gradients:
            kept, bias = kept[: len(kept) - num_bias], kept[len(kept) - num_bias :]
            task_terms = None if terms is None else terms.with_sums(bias, sums)
            with observe("backward", *observed), _backward_call(group, number):
                gradients = task.differentiate(shapes, kept, grad_output, task_terms, number)
                if terms is not None and task_terms is not None:
                    terms.return_sums(task_terms, sums)
            return gradients

        return Attended(answer, (*kept, *bias), differentiate)

    def _attend_units(self, group: Any, number: int, part: Problem) -> Attended:
        """Compute a reproducible part of the problem with a single pattern."""
        units = RankUnits(group, part, self.shards[:2], self.values["backend"])
        observed = units.plan, part.num_bytes, lambda: units.backend

        def forward(problem: Problem) -> Partial:
            with observe("forward", *observed):
                return units.attend(problem)

        def backward(problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
            with observe("backward", *observed), _backward_call(group, number):
                return units.differentiate(problem, answer, grad_output)

        return keep_operands(forward, backward, part)._replace(gather_rows=units.gather_rows)

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
        bound = None
        if pattern is not None:
            bound = pattern.bind(sum(self.shards.seqlens_q), sum(self.shards.seqlens_kv))
        worker = Worker(part.scale, values["backend"], None, bound)
        layout = self._lay_out(part, self.rank)
        # Calls add dropout and score terms. No steps stand for launches of several ones.
        complete = replace(worker, dropout=part.dropout, terms=part.terms)
        rounds = (current.steps for current in layout.rounds)
        groups = (), layout.own_steps, layout.home_steps, layout.away_steps, *rounds
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


@contextmanager
def _backward_call(group: Any, number: int) -> Iterator[None]:
    """Compare the backward pass of a call between the ranks, and check it at the end."""
    calls = calls_on(group)
    with calls.call():
        calls.compare(
            control_group(group), Request({"call": f"the backward pass of call {number}"})
        )
        yield
    calls.check()


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


def _plan_for(shards: Shards, per_host: int, links: Links | None) -> Machine:
    """Return the machine to plan for, which is the same on all ranks.

    CPUs of one host plan as GPUs do, so that programs which are tried on CPUs run the same plans.
    """
    name, has_one_host = list(MACHINES)[shards.machine], per_host == len(shards.seqlens_q)
    if name == "CPU" and has_one_host and links is None:
        name = "H200"
    machine = replace(MACHINES[name], devices_per_node=per_host)
    if links is None:
        return machine
    side = "bandwidth" if has_one_host else "between"
    return replace(machine, **{side: links.bandwidth, "latency": links.latency})
