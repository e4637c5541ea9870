"""The executor that computes all tasks of a plan in this process."""

from dataclasses import replace

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.one_call import all_steps, find_work, single_call, whole_steps
from cqs.executors.shortage import explain_shortage
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.problem.scores import add_sinks, merge_sinks
from cqs.scheduler import Plan
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, TaskBackend, Worker
from cqs.worker.calls import attend_call, lse_for_gradients
from cqs.worker.memory import memory_of
from cqs.worker.units import WORKERS, add_parts, tokens_of_task


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
        worker = WORKERS[problem.is_reproducible].of(problem, backend, steps)
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
            elif len(steps) == 1 and worker.chosen and len(steps[0].queries) == plan.seqlen_q:
                (partial,) = worker.run_steps(steps, *held, sinks=problem.sinks)
            else:
                tiler = Tiler(plan, *(into or problem.empty_answer()))
                for task in plan.tasks:
                    tiler.add(task.index, worker.run_steps(task.steps, *held))
                    if hooks.progress:
                        hooks.advance(problem, task.live_pairs)
                answer = tiler.finish()
                if problem.sinks is None:
                    return answer
                add = merge_sinks if problem.is_reproducible else add_sinks
                return add(answer, problem.sinks)
        except torch.OutOfMemoryError as error:
            raise _explained(problem, plan, worker) from error
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
        worker = WORKERS[problem.is_reproducible].of(problem, backend, steps)
        try:
            if problem.is_reproducible:
                return _add_tasks(worker, problem, plan, grad_output, *answer)
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
        problem, steps = part.problem, find_work(part.plan).steps
        tensors = problem.query, problem.key, problem.value
        worker = WORKERS[problem.is_reproducible].of(problem, part.backend)
        return worker.choose_backend(*tensors, steps).name


def _add_tasks(worker: Worker, problem: Problem, plan: Plan, *output_tensors: Tensor) -> Gradients:
    """Return the gradients as sums of those of the tasks, in their order.

    Args:
        worker: Computes the tasks, and has the sums of the score terms.
        problem: The problem.
        plan: Its plan.
        output_tensors: Gradient of the output, output and LSE.
    """
    tensors, terms = (problem.query, problem.key, problem.value), problem.terms
    gradients = Gradients.zeros(*tensors)
    whole = list(map(HeldTokens.whole, (*tensors, *output_tensors)))
    for task in plan.tasks:
        if not task.steps:
            continue
        held = tokens_of_task(task, whole)
        task_terms = terms and terms.with_sums(gradients.query.dtype)
        parts = replace(worker, terms=task_terms).run_backward(task.steps, *held)
        add_parts(gradients, parts, held)
        if terms is not None and task_terms is not None:
            for total, part in zip(terms.sums, task_terms.sums, strict=True):
                total += part
    return gradients


def _explained(problem: Problem, plan: Plan, worker: Worker) -> torch.OutOfMemoryError:
    name = None if worker.chosen is None else worker.chosen.name
    capacity = memory_of(problem.query.device)
    return torch.OutOfMemoryError(explain_shortage(problem, plan, name, capacity))
