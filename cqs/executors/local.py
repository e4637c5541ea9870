"""The executor that computes all tasks of a plan in this process."""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.problem.scores import add_sinks
from cqs.scheduler import Plan, Step
from cqs.tiler import Tiler
from cqs.worker import CallBackend, HeldTokens, TaskBackend, Worker
from cqs.worker.backend import Backend
from cqs.worker.calls import (
    Call,
    attend_call,
    is_one_call,
    lse_for_gradients,
    make_calls,
    with_kept_mask,
)
from cqs.worker.memory import memory_of
from cqs.worker.operands import Operands, TaskOperands
from cqs.worker.work import make_work


class LocalExecutor:
    """Computes all tasks on the device of the tensors, in one launch where the backend can."""

    def choose_num_tasks(self, problem: Problem) -> int:
        """Return 1; see :meth:`cqs.executors.contract.PlanExecutor.choose_num_tasks`."""
        return 1

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`.

        Raises:
            NotImplementedError: The named backend does not support the tensors.
            torch.OutOfMemoryError: The GPU has too little memory; the message names a number of
                tasks that would fit.
        """
        problem, plan, backend = part
        tensors = problem.query, problem.key, problem.value
        steps = (work := _work_of(plan)).steps
        worker = Worker.of(problem, backend, steps)
        if not problem.query.numel():
            return into or problem.empty_answer()
        try:
            call = _single_call(problem, plan, work, worker.chosen)
            held = [] if call else list(map(HeldTokens.whole, tensors))
            if call is not None:
                partial = attend_call(*call)
                if problem.sinks is not None:
                    add_sinks(partial, problem.sinks)
            elif problem.key.numel() and isinstance(worker.chosen, TaskBackend):
                partial = worker.run_together(_together(problem, plan), *held, sinks=problem.sinks)
            elif len(steps) == 1 and len(steps[0].queries) == problem.query.shape[2]:
                (partial,) = worker.run_steps(steps, *held, sinks=problem.sinks)
            else:
                tiler = Tiler(plan, *(into or problem.empty_answer()))
                for task in plan.tasks:
                    tiler.add(task.index, worker.run_steps(task.steps, *held))
                    if hooks.progress:
                        hooks.advance(problem, task.live_pairs)
                answer = tiler.finish()
                return answer if problem.sinks is None else add_sinks(answer, problem.sinks)
        except torch.OutOfMemoryError as error:
            raise _explained(problem, plan, worker) from error
        if hooks.progress:
            hooks.advance(problem, plan.live_pairs)
        return partial if into is None else Partial(*map(Tensor.copy_, into, partial))

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`.

        Raises:
            NotImplementedError: The named backend does not support the tensors.
            torch.OutOfMemoryError: The GPU has too little memory.
        """
        problem, plan, backend = part
        if not answer.output.numel() or not problem.key.numel():
            return Gradients.zeros(problem.query, problem.key, problem.value)
        tensors = problem.query, problem.key, problem.value
        steps = (work := _work_of(plan)).steps
        worker = Worker.of(problem, backend, steps)
        try:
            if (call := _single_call(problem, plan, work, worker.chosen)) is not None:
                chosen, operands = call
                lse = lse_for_gradients(answer.lse)
                return Gradients(*chosen.differentiate(operands, grad_output, answer.output, lse))
            if isinstance(worker.chosen, TaskBackend):
                steps = _whole(problem)  # one rectangle needs no list of visits
            held = map(HeldTokens.whole, (*tensors, grad_output, *answer))
            return worker.run_backward(steps, *held, dtype=problem.query.dtype)
        except torch.OutOfMemoryError as error:
            raise _explained(problem, plan, worker) from error

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        chosen = Worker.of(part.problem, part.backend, _work_of(part.plan).steps).chosen
        assert chosen is not None
        return chosen.name


class _Work(NamedTuple):
    """The work of all tasks of a plan."""

    steps: tuple[Step, ...]
    """The steps of all tasks."""
    is_square: bool | None
    """Whether the only rectangle of the steps is a causal square; ``None`` if they have several
    rectangles or a pattern."""


@lru_cache(maxsize=64)
def _work_of(plan: Plan) -> _Work:
    steps = tuple(chain.from_iterable(map(attrgetter("steps"), plan.tasks)))
    if plan.pattern is not None or len(steps) != 1 or steps[0].num_blocks != 1:
        return _Work(steps, None)
    is_whole = len(steps[0].queries) == plan.seqlen_q
    return _Work(steps, steps[0].causal_keys is not None if is_whole else None)


@lru_cache(maxsize=64)
def _only_call(plan: Plan) -> Call | None:
    """Return the call that computes all tasks of a plan with a pattern, or None if several do."""
    steps = _work_of(plan).steps
    queries, keys = range(plan.seqlen_q), range(plan.seqlen_kv)
    if len(steps) != 1:
        return None
    pattern = plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    (calls,) = make_calls(make_work(steps, pattern, (queries,), (keys,)), joins_calls=True)
    if not is_one_call(queries, calls):
        return None
    call, _ = calls[0]
    return with_kept_mask(call) if call.view.keys == keys else None


Attend = Callable[[Tensor, Tensor, Tensor], Partial]
"""Computes output and LSE of query, key and value."""


def find_call(part: Planned) -> Attend | None:
    """Return a function that computes such problems in one call of a backend, or None.

    Args:
        part: A problem without dropout and score terms. Later problems may differ only in the
            values of their tensors.

    Raises:
        NotImplementedError: The named backend does not support the tensors.
    """
    problem, plan, backend = part
    work, scale = _work_of(plan), problem.scale
    chosen = Worker.of(problem, backend, work.steps).chosen
    if isinstance(chosen, TaskBackend):
        rows = ((range(each.shape[2]),) for each in (problem.query, problem.key))
        of_rows = make_work(_together(problem, plan), problem.bound_pattern, *rows)

        def launch(query: Tensor, key: Tensor, value: Tensor) -> Partial:
            return chosen.attend(TaskOperands(query, key, value, of_rows, scale), is_united=True)

        return launch
    single = _single_call(problem, plan, work, chosen)
    if single is None:
        return None
    of_kernel, (_, _, _, *options) = single
    return lambda *tensors: attend_call(of_kernel, Operands._make((*tensors, *options)))


def _single_call(
    problem: Problem, plan: Plan, work: _Work, chosen: Backend | None
) -> tuple[CallBackend, Operands] | None:
    """Return the backend and the operands if one call computes the problem, else None."""
    is_square, terms = work.is_square, None
    if (
        (is_square is None and plan.pattern is None)
        or problem.dropout is not None
        or not isinstance(chosen, CallBackend)
        or problem.key.shape[2] < chosen.least_keys
    ):
        return None
    tensors = problem.query, problem.key, problem.value
    if is_square is None:
        call = _only_call(plan) if chosen.joins_calls and problem.terms is None else None
        if call is None:
            return None
        return chosen, Operands(
            *tensors,
            is_causal=call.is_causal,
            scale=problem.scale,
            visible=call.visible(problem.query.device),
            addend=call.addend(problem.query.dtype),
        )
    if problem.terms is not None:
        lengths = problem.query.shape[2], problem.key.shape[2]
        terms = problem.terms.pair_terms(problem.query.device, *([range(n)] for n in lengths))
    return chosen, Operands(*tensors, is_square, problem.scale, terms=terms)


def _together(problem: Problem, plan: Plan) -> tuple[Step, ...]:
    """Return steps that together cover all tasks; a pattern gets the steps of one task."""
    return _work_of(plan).steps if problem.pattern is None else _whole(problem)


def _whole(problem: Problem) -> tuple[Step, ...]:
    """Return the steps of a single task that is the whole problem."""
    return _work_of(problem.make_plan(1)).steps


def _explained(problem: Problem, plan: Plan, worker: Worker) -> torch.OutOfMemoryError:
    name = None if worker.chosen is None else worker.chosen.name
    capacity = memory_of(problem.query.device)
    return torch.OutOfMemoryError(explain_shortage(problem, plan, name, capacity))
