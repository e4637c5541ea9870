"""Computes all tasks of a plan in this process, in one kernel launch where the backend can."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Step
from cqs.tiler import Tiler
from cqs.worker import ATTEND_BLOCK_ROWS, HeldTokens, Worker
from cqs.worker.memory import memory_of


def run_local(
    problem: Problem,
    plan: Plan,
    *,
    backend: str | None = None,
    answer: Partial | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Partial:
    """Compute a problem by a plan on the device of its tensors.

    Args:
        problem: The checked problem.
        plan: A plan for the sequence lengths of the problem.
        backend: Name of a backend; ``None`` chooses the fastest for the call.
        answer: Tensors for output and LSE; ``None`` allocates them.
        progress: Called with (finished tasks, all tasks) after every task, or once if all tasks
            run in one launch.

    Returns:
        Output and LSE.

    Raises:
        NotImplementedError: The named backend does not support the tensors.
        torch.OutOfMemoryError: The GPU has too little memory; the message names a number of tasks
            that would fit.
    """
    worker = Worker.of(problem, backend)
    tensors = problem.query, problem.key, problem.value
    name = worker.choose_backend(*tensors, _all_steps(plan))
    if not problem.query.numel():
        return answer or problem.empty_answer()
    with _explaining_shortage(problem, plan, name):
        held = list(map(HeldTokens.whole, tensors))
        if problem.key.numel() and name in ATTEND_BLOCK_ROWS:
            partial = worker.run_together(_together(problem, plan), *held)
        elif [step.queries for step in _all_steps(plan)] == [*held[0].ranges]:
            (task,) = (task for task in plan.tasks if task.steps)
            (partial,) = worker.run(task, *held)
        else:
            tiler = Tiler(plan, *(answer or problem.empty_answer()))
            for task in plan.tasks:
                tiler.add(task.index, worker.run(task, *held))
                if progress:
                    progress(task.index + 1, plan.num_tasks)
            return tiler.finish()
        if progress:
            progress(plan.num_tasks, plan.num_tasks)
        return partial if answer is None else Partial(*map(Tensor.copy_, answer, partial))


def run_local_backward(
    problem: Problem,
    plan: Plan,
    answer: Partial,
    grad_output: Tensor,
    *,
    backend: str | None = None,
) -> Gradients:
    """Compute the gradients of a problem by the plan of its forward pass.

    Args:
        problem: The checked problem.
        plan: The plan of the forward pass.
        answer: Output and LSE of the forward pass.
        grad_output: Gradient of the output, of the same shape.
        backend: Name of a backend; ``None`` chooses the fastest.

    Returns:
        Gradients of query, key and value.

    Raises:
        NotImplementedError: The named backend does not support the tensors.
        torch.OutOfMemoryError: The GPU has too little memory.
    """
    if not answer.output.numel() or not problem.key.numel():
        return Gradients.zeros(problem.query, problem.key, problem.value)
    tensors = problem.query, problem.key, problem.value, grad_output, *answer
    worker = Worker.of(problem, backend)
    name = worker.choose_backend(*tensors[:3], _all_steps(plan))
    steps = _together(problem, plan) if name in ATTEND_BLOCK_ROWS else _all_steps(plan)
    with _explaining_shortage(problem, plan, name):
        held = map(HeldTokens.whole, tensors)
        return worker.run_backward(steps, *held, dtype=problem.query.dtype)


def _all_steps(plan: Plan) -> list[Step]:
    return [step for task in plan.tasks for step in task.steps]


def _together(problem: Problem, plan: Plan) -> list[Step]:
    """Return steps that together cover all tasks; a pattern gets the steps of one task."""
    return _all_steps(plan if problem.pattern is None else problem.make_plan(1))


@contextmanager
def _explaining_shortage(problem: Problem, plan: Plan, backend: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = explain_shortage(problem, plan, backend, memory_of(problem.query.device))
        raise torch.OutOfMemoryError(message) from error
