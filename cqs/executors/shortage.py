"""How many tasks fit a memory, and what to say when a GPU runs out of it."""

from cqs.problem import Problem
from cqs.scheduler import Plan, Task, TaskCost, predict_cost
from cqs.scheduler.difference_covers import moduli_of_small_covers
from cqs.worker import ATTEND_SHARES

_MOST_TASKS = 1000
_USABLE = 0.9
"""Share of a GPU's memory that tensors may fill: the rest is taken by kernels and fragments."""
_LESS = 0.8
"""Advice must save this much: what did not fit may have shared the GPU with others."""


def explain_shortage(
    problem: Problem, plan: Plan, backend: str | None, capacity: int, index: int | None = None
) -> str:
    """Compare what was predicted with what a GPU has, and say how many tasks would fit.

    Args:
        problem: What was asked.
        plan: Its plan.
        backend: Name of the one that computed, if that was known.
        capacity: Bytes of the GPU.
        index: The task that found too little memory, alone on its device; ``None`` means that all
            tasks share the device.
    """
    if index is not None:
        needed = _cost(problem, plan.task(index), backend).peak_bytes
        what = f"task {index} of {plan.num_tasks}"
    elif backend in ATTEND_SHARES:
        needed = _cost(problem, problem.make_plan(1).task(0), backend).peak_bytes
        what = "this call"
    else:
        costs = [_cost(problem, task, backend) for task in plan.tasks]
        beside = max(cost.peak_bytes - cost.bytes_in - cost.bytes_out for cost in costs)
        needed, what = _bytes_of_all(problem) + beside, "this call"
    by = "" if backend is None else f", backend {backend!r}"
    message = (
        f"out of memory: {what} needs {_gibibytes(needed)} by prediction (forward pass{by}) "
        f"and the GPU has {_gibibytes(capacity)}"
    )
    if needed < capacity / 2:
        message += ", of which other tensors or processes hold most"
    enough = min(_USABLE * capacity, _LESS * needed)
    if (found := fewest_tasks(problem, backend, enough, at_least=3)) is None:
        most = moduli_of_small_covers(_MOST_TASKS)[-1]
        return f"{message}. No number of tasks up to {most} would help"
    num_tasks, each = found
    return (
        f"{message}. Cut into {num_tasks} tasks, each would need {_gibibytes(each)}: "
        f"cqs.Cluster(...).attention(..., num_tasks={num_tasks}), whose actors hold a "
        "task at a time"
    )


def fewest_tasks(
    problem: Problem, backend: str | None, budget: float, *, at_least: int
) -> tuple[int, int] | None:
    """Return the fewest tasks of which each keeps a budget, and what the largest takes.

    Args:
        problem: What is to be computed.
        backend: Name of the one that will compute.
        budget: Bytes that the forward pass of a task may hold.
        at_least: So many tasks, or more: then a number for which they hold few tokens.
    """
    more = (number for number in moduli_of_small_covers(_MOST_TASKS) if number > at_least)
    for num_tasks in (at_least, *more):
        if _bytes_of_all(problem) > num_tasks * budget:
            continue  # some task holds that share of it, or more
        plan = problem.make_plan(num_tasks)
        each = max(_cost(problem, task, backend).peak_bytes for task in plan.tasks)
        if each <= budget:
            return num_tasks, each
    return None


def _cost(problem: Problem, task: Task, backend: str | None) -> TaskCost:
    return predict_cost(task, problem.shape, backend, problem.bound_pattern)


def _bytes_of_all(problem: Problem) -> int:
    """Return the bytes of all inputs and results that count."""
    cost = _cost(problem, problem.make_plan(1).task(0), None)
    return cost.bytes_in + cost.bytes_out


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
