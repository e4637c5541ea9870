"""The executor that computes all tasks of a plan in this process."""

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.one_call import all_steps, find_work, single_call, whole_steps
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.problem.scores import add_sinks
from cqs.scheduler import Plan
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, TaskBackend, Worker
from cqs.worker.calls import attend_call, lse_for_gradients
from cqs.worker.memory import memory_of


class LocalExecutor:
    """Computes all tasks on the device of the tensors, in one launch where the backend can."""

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`.

        Raises:
            NotImplementedError: The named backend does not support the tensors.
            torch.OutOfMemoryError: The GPU has too little memory; the message names a number of
                tasks that would fit.
        """
        problem, plan, backend = part
        tensors = problem.query, problem.key, problem.value
        steps = (work := find_work(plan)).steps
        worker = Worker.of(problem, backend, steps)
        if not problem.query.numel():
            return into or problem.empty_answer()
        try:
            call = single_call(problem, plan, work, worker.chosen)
            held = [] if call else list(map(HeldTokens.whole, tensors))
            if call is not None:
                partial = attend_call(*call)
                if problem.sinks is not None:
                    add_sinks(partial, problem.sinks)
            elif problem.key.numel() and isinstance(worker.chosen, TaskBackend):
                partial = worker.run_together(all_steps(problem, plan), *held, sinks=problem.sinks)
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
        steps = (work := find_work(plan)).steps
        worker = Worker.of(problem, backend, steps)
        try:
            if (call := single_call(problem, plan, work, worker.chosen)) is not None:
                chosen, operands = call
                lse = lse_for_gradients(answer.lse)
                return Gradients(*chosen.differentiate(operands, grad_output, answer.output, lse))
            if isinstance(worker.chosen, TaskBackend):
                steps = whole_steps(problem)  # one rectangle needs no list of visits
            held = map(HeldTokens.whole, (*tensors, grad_output, *answer))
            return worker.run_backward(steps, *held, dtype=problem.query.dtype)
        except torch.OutOfMemoryError as error:
            raise _explained(problem, plan, worker) from error

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        chosen = Worker.of(part.problem, part.backend, find_work(part.plan).steps).chosen
        assert chosen is not None
        return chosen.name


def _explained(problem: Problem, plan: Plan, worker: Worker) -> torch.OutOfMemoryError:
    name = None if worker.chosen is None else worker.chosen.name
    capacity = memory_of(problem.query.device)
    return torch.OutOfMemoryError(explain_shortage(problem, plan, name, capacity))
