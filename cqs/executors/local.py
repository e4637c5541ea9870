"""The executor that computes all tasks of a plan in this process."""

from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Step
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, TaskBackend, Worker
from cqs.worker.memory import memory_of


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
        steps = _all_steps(plan)
        worker = Worker.of(problem, backend, steps)
        if not problem.query.numel():
            return into or problem.empty_answer()
        try:
            held = list(map(HeldTokens.whole, tensors))
            if problem.key.numel() and isinstance(worker.chosen, TaskBackend):
                partial = worker.run_together(_together(problem, plan), *held)
            elif len(steps) == 1 and len(steps[0].queries) == problem.query.shape[2]:
                (partial,) = worker.run_steps(steps, *held)
            else:
                tiler = Tiler(plan, *(into or problem.empty_answer()))
                for task in plan.tasks:
                    tiler.add(task.index, worker.run_steps(task.steps, *held))
                    if hooks.progress:
                        hooks.advance(problem, task.live_pairs)
                return tiler.finish()
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
        steps = _all_steps(plan)
        worker = Worker.of(problem, backend, steps)
        if isinstance(worker.chosen, TaskBackend):
            steps = _together(problem, plan)
        try:
            held = map(HeldTokens.whole, (*tensors, grad_output, *answer))
            return worker.run_backward(steps, *held, dtype=problem.query.dtype)
        except torch.OutOfMemoryError as error:
            raise _explained(problem, plan, worker) from error

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        chosen = Worker.of(part.problem, part.backend, _all_steps(part.plan)).chosen
        assert chosen is not None
        return chosen.name


def _all_steps(plan: Plan) -> list[Step]:
    return list(chain.from_iterable(map(attrgetter("steps"), plan.tasks)))


def _together(problem: Problem, plan: Plan) -> list[Step]:
    """Return steps that together cover all tasks; a pattern gets the steps of one task."""
    return _all_steps(plan if problem.pattern is None else problem.make_plan(1))


def _explained(problem: Problem, plan: Plan, worker: Worker) -> torch.OutOfMemoryError:
    name = None if worker.chosen is None else worker.chosen.name
    capacity = memory_of(problem.query.device)
    return torch.OutOfMemoryError(explain_shortage(problem, plan, name, capacity))
