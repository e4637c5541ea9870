"""The executor that computes all tasks of a plan in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Step
from cqs.tiler import Tiler
from cqs.worker import ATTEND_BLOCK_ROWS, HeldTokens, Worker
from cqs.worker.memory import memory_of


class LocalExecutor:
    """Computes all tasks on the device of the tensors, in one launch where the backend can."""

    num_tasks = 1

    def run(
        self,
        problem: Problem,
        plan: Plan,
        backend: str | None = None,
        hooks: Hooks = NO_HOOKS,
        into: Partial | None = None,
    ) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`.

        Raises:
            NotImplementedError: The named backend does not support the tensors.
            torch.OutOfMemoryError: The GPU has too little memory; the message names a number of
                tasks that would fit.
        """
        worker = Worker.of(problem, backend)
        tensors = problem.query, problem.key, problem.value
        name = worker.choose_backend(*tensors, _all_steps(plan))
        if not problem.query.numel():
            return into or problem.empty_answer()
        with _explaining_shortage(problem, plan, name):
            held = list(map(HeldTokens.whole, tensors))
            if problem.key.numel() and name in ATTEND_BLOCK_ROWS:
                partial = worker.run_together(_together(problem, plan), *held)
            elif [step.queries for step in _all_steps(plan)] == [*held[0].ranges]:
                (task,) = (task for task in plan.tasks if task.steps)
                (partial,) = worker.run(task, *held)
            else:
                tiler = Tiler(plan, *(into or problem.empty_answer()))
                for task in plan.tasks:
                    tiler.add(task.index, worker.run(task, *held))
                    hooks.advance(problem, task.live_pairs)
                return tiler.finish()
            if hooks.progress:
                hooks.advance(problem, plan.live_pairs)
            return partial if into is None else Partial(*map(Tensor.copy_, into, partial))

    def run_backward(
        self,
        problem: Problem,
        plan: Plan,
        answer: Partial,
        grad_output: Tensor,
        backend: str | None = None,
    ) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`.

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
