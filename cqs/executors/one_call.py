"""Problems that one call of a backend computes, and the work of all tasks of a plan at once."""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from cqs.partial import Partial
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem
from cqs.problem.options import ProblemOptions
from cqs.scheduler import Plan, Step
from cqs.worker import CallBackend, TaskBackend, Worker
from cqs.worker.backend import Backend
from cqs.worker.calls import Call, attend_call, is_one_call, make_calls
from cqs.worker.operands import Operands, TaskOperands
from cqs.worker.work import make_work


class Work(NamedTuple):
    """The work of all tasks of a plan."""

    steps: tuple[Step, ...]
    """The steps of all tasks."""
    is_square: bool | None
    """Whether the only rectangle of the steps is a causal square; ``None`` if they have several
    rectangles or a pattern."""


@lru_cache(maxsize=64)
def find_work(plan: Plan) -> Work:
    """Return the work of a plan."""
    steps = tuple(chain.from_iterable(map(attrgetter("steps"), plan.tasks)))
    if plan.pattern is not None or len(steps) != 1 or len(steps[0].blocks()) != 1:
        return Work(steps, None)
    is_whole = len(steps[0].queries) == plan.seqlen_q
    return Work(steps, steps[0].causal_keys is not None if is_whole else None)


@lru_cache(maxsize=64)
def _only_call(plan: Plan) -> Call | None:
    """Return the call that computes all tasks of a plan with a pattern, or None if several do."""
    steps = find_work(plan).steps
    queries, keys = range(plan.seqlen_q), range(plan.seqlen_kv)
    if len(steps) != 1:
        return None
    pattern = plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    (calls,) = make_calls(make_work(steps, pattern, (queries,), (keys,)), joins_calls=True)
    if not is_one_call(queries, calls):
        return None
    call, _ = calls[0]
    return call if call.view.keys == keys else None


Attend = Callable[[Tensor, Tensor, Tensor], Partial]
"""Computes output and LSE of query, key and value."""


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    pattern: Pattern | None,
    enable_gqa: bool,
    backend: str | None,
) -> Attend | None:
    """Return a function that computes problems in one call of a backend.

    It is None if several calls are needed, tensors are empty or must be expanded, gradients are
    required, or heads differ in their pattern.

    The arguments are those of :func:`cqs.attention`. Later problems may differ only in the values
    of their tensors. Gradients are not recorded.

    Raises:
        Exception: An argument is wrong; see :func:`cqs.attention`.
    """
    options: ProblemOptions = {"is_causal": is_causal, "scale": scale, "pattern": pattern}
    problem = check_problem(query, key, value, enable_gqa=enable_gqa, **options)
    sizes = problem.query.shape, problem.key.shape, problem.value.shape
    is_changed = sizes != (query.shape, key.shape, value.shape)
    is_empty = not query.numel() or not key.numel()
    if is_changed or is_empty or problem.requires_grad or problem.differs_by_head:
        return None
    plan = problem.make_plan(1)
    work, factor = find_work(plan), problem.scale
    chosen = Worker.of(problem, backend, work.steps).chosen
    if isinstance(chosen, TaskBackend):
        ranges = ((range(length),) for length in (sizes[0][2], sizes[1][2]))
        task = make_work(all_steps(problem, plan), problem.bound_pattern, *ranges)

        def launch(query: Tensor, key: Tensor, value: Tensor) -> Partial:
            return chosen.attend(TaskOperands(query, key, value, task, factor), is_united=True)

        return launch
    single = single_call(problem, plan, work, chosen)
    if single is None:
        return None
    kernel, (_, _, _, *operands) = single
    return lambda *tensors: attend_call(kernel, Operands._make((*tensors, *operands)))


def single_call(
    problem: Problem, plan: Plan, work: Work, chosen: Backend | None
) -> tuple[CallBackend, Operands] | None:
    """Return the backend and the operands if one call computes the problem, else None.

    Args:
        problem: The problem.
        plan: A plan of the problem.
        work: The work of the plan.
        chosen: The backend of all its steps.
    """
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


def all_steps(problem: Problem, plan: Plan) -> tuple[Step, ...]:
    """Return steps that together cover all tasks; a pattern gets the steps of one task."""
    return find_work(plan).steps if problem.pattern is None else whole_steps(problem)


def whole_steps(problem: Problem) -> tuple[Step, ...]:
    """Return the steps of a single task that is the whole problem."""
    return find_work(problem.make_plan(1)).steps
