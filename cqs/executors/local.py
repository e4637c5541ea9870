"""Every task of a plan in this process, one after another."""

from collections.abc import Callable, Iterator

from torch import Tensor

from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Task
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, Worker, choose_backend

_ROWS_OF_A_LAUNCH = 2**22
"""Queries times heads: so many tiles that the last ones of a launch leave no GPU idle for long."""


def run_local(
    problem: Problem,
    plan: Plan,
    *,
    backend: str | None = None,
    answer: Partial | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Partial:
    """Compute ``problem`` by ``plan`` on the device of its tensors.

    Args:
        problem: The checked problem.
        plan: A plan of its lengths.
        backend: Name of a backend, or ``None`` for the best of each call.
        answer: Where to write; ``None`` allocates it.
        progress: Called with (tasks done, tasks in all) after every task, or few.

    Raises:
        NotImplementedError: if the named backend cannot take the tensors.
    """
    choose_backend(problem.query, problem.key, problem.value, backend)
    whole_q, whole_kv = range(plan.seqlen_q), range(plan.seqlen_kv)
    query = HeldTokens([(whole_q, problem.query)])
    key = HeldTokens([(whole_kv, problem.key)])
    value = HeldTokens([(whole_kv, problem.value)])
    worker = Worker(backend)
    if not problem.query.numel():
        return answer or problem.empty_answer()
    if plan.num_workers == 1 and plan.task(0).held_queries == (whole_q,):
        (partial,) = worker.run(plan.task(0), query, key, value, scale=problem.scale)
        answer = partial if answer is None else Partial(*map(Tensor.copy_, answer, partial))
        if progress:
            progress(1, 1)
        return answer
    answer = answer or problem.empty_answer()
    tiler = Tiler(plan, *answer)
    done = 0
    for tasks in _launches(problem, plan):
        partials = worker.run_steps(
            [step for task in tasks for step in task.steps],
            query,
            key,
            value,
            scale=problem.scale,
            dtype=answer.lse.dtype,
        )
        for task in tasks:
            tiler.add(task.worker, partials[: len(task.steps)])
            del partials[: len(task.steps)]
        done += len(tasks)
        if progress:
            progress(done, plan.num_workers)
    return tiler.finish()


def run_local_backward(
    problem: Problem,
    plan: Plan,
    answer: Partial,
    grad_output: Tensor,
    *,
    backend: str | None = None,
) -> Gradients:
    """Compute the gradients of ``problem`` by the plan of its forward pass.

    Args:
        problem: The checked problem.
        plan: A plan of its lengths.
        answer: What the forward pass returned.
        grad_output: Gradient of the output.
        backend: Name of a backend, or ``None`` for the best.
    """
    whole_q, whole_kv = range(plan.seqlen_q), range(plan.seqlen_kv)
    held = [
        HeldTokens([(whole, tensor)])
        for whole, tensor in (
            (whole_q, problem.query),
            (whole_kv, problem.key),
            (whole_kv, problem.value),
            (whole_q, grad_output),
            (whole_q, answer.output),
            (whole_q, answer.lse),
        )
    ]
    gradients = Gradients.zeros(problem.query, problem.key, problem.value)
    if not answer.output.numel() or not problem.key.numel():
        return gradients
    worker = Worker(backend)
    for tasks in _launches(problem, plan):
        steps = [step for task in tasks for step in task.steps]
        worker.run_backward(steps, *held, scale=problem.scale, gradients=gradients)
    return gradients


def _launches(problem: Problem, plan: Plan) -> Iterator[list[Task]]:
    """Divide the tasks of a plan into those computed together: on a CPU, each alone."""
    width = problem.query.shape[0] * problem.query.shape[1]
    enough = _ROWS_OF_A_LAUNCH if problem.query.is_cuda else 0
    tasks: list[Task] = []
    rows = 0
    for task in plan.tasks:
        tasks.append(task)
        rows += width * sum(len(step.queries) for step in task.steps)
        if rows >= enough:
            yield tasks
            tasks, rows = [], 0
    if tasks:
        yield tasks
