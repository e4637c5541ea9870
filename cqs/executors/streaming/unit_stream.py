"""Reproducible calls within a memory budget: one unit at a time is in memory.

The units and the order of merges are those of every other executor (:mod:`cqs.worker.units`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cqs.executors.contract import Progress
from cqs.executors.streaming.sources import Source, Target, read_rows, write_rows
from cqs.partial import Gradients, Partial, lse_dtype, merge_rows
from cqs.problem import Problem
from cqs.problem.scores import merge_sinks
from cqs.scheduler import Plan, Step
from cqs.scheduler.task import keys_of
from cqs.worker import HeldTokens
from cqs.worker.memory import predict_pattern_cost
from cqs.worker.units import Place, UnitWorker, add_parts, at_place, places_of

_MOST_TASKS = 256
"""Largest number of tasks that is proposed for a budget."""


class UnitStream:
    """Computes the units of a problem one after another; its tensors may be sources."""

    def __init__(self, problem: Problem, backend: str, device: torch.device, plan: Plan) -> None:
        """Prepare both passes.

        Args:
            problem: A problem with a single pattern.
            backend: Name of the backend.
            device: The device that computes.
            plan: The plan of the problem.

        Raises:
            NotImplementedError: Score terms require gradients, or a GPU computes and there is a
                bias.
        """
        terms, shape = problem.terms, problem.shape
        if terms is not None and (terms.leaves or device.type != "cpu" and terms.bias is not None):
            raise NotImplementedError(
                "reproducible streams support neither gradients of scores nor, on a GPU, a bias: "
                "call cqs.attention or Cluster.attention with them"
            )
        if terms is not None and terms.alibi_slopes is not None:
            terms = replace(terms, alibi_slopes=terms.alibi_slopes.to(device))
        self._problem, self._plan, self._device = problem, plan, device
        self._tensors: list[Tensor | Source] = [problem.query, problem.key, problem.value]
        self._worker = UnitWorker.of(replace(problem, terms=terms), backend)
        self._places = places_of(problem.query, problem.key)
        self._backend = backend
        size = shape.num_heads // shape.kv_heads
        self._shape = replace(shape, batch=1, num_heads=size, num_kv_heads=1)

    def check_budget(self, budget: int, *, with_gradients: bool) -> None:
        """Raise ValueError if a unit needs more memory, and name a number of tasks that fits.

        Args:
            budget: Memory budget in bytes.
            with_gradients: Whether there will be a backward pass.
        """
        needed, given = self._unit_bytes(self._plan, with_gradients), self._plan.num_tasks
        if needed <= budget:
            return
        numbers = (
            number
            for number in range(given + 1, _MOST_TASKS + 1)
            if self._unit_bytes(self._problem.make_plan(number), with_gradients) <= budget
        )
        advice = f"no number of tasks up to {_MOST_TASKS} fits it"
        if fitting := next(numbers, None):
            advice = f"pass num_tasks={fitting}, with which they fit it"
        raise ValueError(
            f"memory_budget must be at least {needed} bytes for units of {given} tasks, "
            f"got {budget}: {advice}"
        )

    def _unit_bytes(self, plan: Plan, with_gradients: bool) -> int:
        """Return the bytes of the largest unit: its tokens, their copies, parts and gradients."""
        shape, most, pattern = self._shape, 0, self._problem.bound_pattern
        for task in plan.tasks:
            cost = predict_pattern_cost(task, shape, self._backend, pattern)
            needed = cost.peak_bytes + cost.bytes_in + 2 * cost.bytes_out
            if with_gradients:
                gradients = cost.bytes_in // shape.itemsize * shape.sum_itemsize
                needed += 2 * (gradients + 2 * cost.bytes_out)
            most = max(most, needed)
        if with_gradients:  # the sums of a KV head
            whole = shape.query_bytes(plan.seqlen_q) + shape.key_bytes(plan.seqlen_kv)
            most += whole // shape.itemsize * shape.sum_itemsize
        return most

    def attend(self, targets: Sequence[Target], progress: Progress | None) -> None:
        """Write output and LSE, one token group of the queries of a KV head after another."""
        steps = defaultdict[int, list[Step]](list)
        for task in self._plan.tasks:
            for step in task.steps:
                steps[step.query_group].append(step)
        for place in self._places:
            for group, queries in enumerate(self._plan.token_groups):
                answer = self._attend_group(place, queries, steps[group], progress)
                heads = range(place.heads[0].start, place.heads[0].stop)
                for target, tensor in zip(targets, answer, strict=True):
                    write_rows(target, place.batch, heads, queries, tensor[0].cpu())

    def _attend_group(
        self, place: Place, queries: range, steps: Sequence[Step], progress: Progress | None
    ) -> Partial:
        """Return output and LSE of a token group of the queries of a KV head."""
        worker, parts = at_place(self._worker, place), list[tuple[Partial, slice]]()
        for step in steps:
            held = self._read(place, self._tensors, (step.queries,), keys_of([step]))
            first = step.queries.start - queries.start
            (part,) = worker.run_steps([step], *held)
            parts.append((part, slice(first, first + len(step.queries))))
            if progress is not None:
                progress.advance(step.live_pairs * place.group_size)
        problem, shape = self._problem, (1, place.group_size, len(queries))
        new, dtype = partial(torch.empty, device=self._device), problem.query.dtype
        output = new((*shape, problem.value.shape[3]), dtype=dtype)
        lse = new(shape, dtype=lse_dtype(dtype))
        merge_rows(Partial(output, lse), parts)
        if problem.sinks is not None:
            merge_sinks(Partial(output, lse), problem.sinks[place.heads[0]].to(self._device))
        return Partial(output, lse)

    def differentiate(self, answer: Partial, grad_output: Tensor) -> Gradients:
        """Return the gradients, one KV head after another.

        Args:
            answer: Output and LSE of the whole problem.
            grad_output: Gradient of the output.
        """
        gradients = Gradients(*(torch.empty(t.shape, dtype=t.dtype) for t in self._tensors))
        inputs = *self._tensors, grad_output, *answer
        for place in self._places:
            own = [part[place.row, place.heads[i > 0]] for i, part in enumerate(gradients)]
            sums, worker = Gradients.zeros(*own), at_place(self._worker, place)
            for task in self._plan.tasks:
                if task.steps:
                    held = self._read(place, inputs, task.held_queries, task.held_keys)
                    add_parts(sums, worker.run_backward(task.steps, *held), held)
            for gradient, total in zip(own, sums, strict=True):
                gradient.copy_(total)
        return gradients

    def _read(
        self,
        place: Place,
        tensors: Sequence[Tensor | Source],
        queries: tuple[range, ...],
        keys: tuple[range, ...],
    ) -> list[HeldTokens]:
        """Return tokens of query, key, value and other tensors of the queries on the device."""
        held = []
        for i, source in enumerate(tensors):
            ranges, heads = (keys if i in (1, 2) else queries), place.heads[i in (1, 2)]
            lengths = list(map(len, ranges))
            shape = (heads.stop - heads.start, sum(lengths), *source.shape[3:])
            rows = torch.empty(shape, dtype=source.dtype, device="cpu")
            for tokens, part in zip(ranges, rows.split(lengths, dim=1), strict=True):
                read_rows(source, place.batch, range(heads.start, heads.stop), tokens, part)
            held.append(HeldTokens(rows[None].to(self._device), ranges))
        return held
