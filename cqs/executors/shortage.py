"""The number of tasks that fits a memory size, and the message of out-of-memory errors."""

import logging
import math

from cqs.problem import Problem
from cqs.scheduler import Plan, Task, TaskCost
from cqs.scheduler.interest_sets import PERFECT_MODULI
from cqs.worker import BACKENDS, TaskBackend
from cqs.worker.memory import predict_pattern_cost

_LOGGER = logging.getLogger("cqs")
_USABLE = 0.9
"""Fraction of a GPU's memory that tensors may fill, besides kernels and fragmentation."""
_LESS = 0.8
"""Largest memory of advised tasks, as a fraction of the failed call's prediction.

The failed call may have shared the GPU, so its prediction may be below the capacity.
"""


def explain_shortage(
    problem: Problem, plan: Plan, backend: str | None, capacity: int, index: int | None = None
) -> str:
    """Return the message of an out-of-memory error: predicted memory, and a sufficient task count.

    Args:
        problem: The problem that was computed.
        plan: Plan of the problem.
        backend: Name of the backend; ``None`` if it was not yet chosen.
        capacity: Memory of the GPU in bytes.
        index: Task that ran out of memory, alone on its device; ``None`` if all tasks share the
            device.
    """
    if index is not None:
        needed = _cost(problem, plan.task(index), backend).peak_bytes
        subject = f"task {index} of {plan.num_tasks}"
    elif backend is not None and isinstance(BACKENDS[backend], TaskBackend):
        needed = _cost(problem, problem.make_plan(1).task(0), backend).peak_bytes
        subject = "this call"
    else:
        costs = [_cost(problem, task, backend) for task in plan.tasks]
        beside = max(cost.peak_bytes - cost.bytes_in - cost.bytes_out for cost in costs)
        needed, subject = _bytes_of_all(problem) + beside, "this call"
    by = "" if backend is None else f", backend {backend!r}"
    message = (
        f"out of memory: {subject} requires {_gibibytes(needed)} by prediction (forward pass{by}) "
        f"and the GPU has {_gibibytes(capacity)}"
    )
    if needed < capacity / 2:
        message += ", most of which other tensors or processes occupy"
    enough = min(_USABLE * capacity, _LESS * needed)
    for num_tasks in PERFECT_MODULI[1:]:  # their interest sets are small, so tasks read few tokens
        largest = _largest_task(problem, num_tasks, backend, enough)
        if largest <= enough:
            return (
                f"{message}. With num_tasks={num_tasks} each task would require "
                f"{_gibibytes(largest)}: call cqs.Cluster(...).attention(..., "
                f"num_tasks={num_tasks}), whose actors compute one task at a time"
            )
    return f"{message}. No number of tasks up to {PERFECT_MODULI[-1]} would help"


def choose_num_tasks(problem: Problem, num_workers: int, capacity: int) -> int:
    """Return the number of workers, or a larger number if a task for each would be too large.

    Args:
        problem: The problem.
        num_workers: Number of workers, each with a GPU.
        capacity: Memory of a GPU in bytes.
    """
    enough = _USABLE * capacity
    for number in (num_workers, *(modulus for modulus in PERFECT_MODULI if modulus > num_workers)):
        if _largest_task(problem, number, None, enough) <= enough:
            if number > num_workers:
                text = "num_tasks=%d: the %d tasks of as many workers would not fit %s of a GPU"
                _LOGGER.info(text, number, num_workers, _gibibytes(capacity))
            return number
    return num_workers


def _largest_task(problem: Problem, num_tasks: int, backend: str | None, enough: float) -> float:
    """Return the bytes of the largest of ``num_tasks`` tasks; at once inf if more than enough."""
    if _bytes_of_all(problem) > num_tasks * enough:
        return math.inf  # some task holds that share of it, or more
    tasks = problem.make_plan(num_tasks).tasks
    return max(_cost(problem, task, backend).peak_bytes for task in tasks)


def _cost(problem: Problem, task: Task, backend: str | None) -> TaskCost:
    return predict_pattern_cost(task, problem.shape, backend, problem.bound_pattern)


def _bytes_of_all(problem: Problem) -> int:
    """Return the bytes of all inputs and results that the pattern uses."""
    cost = _cost(problem, problem.make_plan(1).task(0), None)
    return cost.bytes_in + cost.bytes_out


def _gibibytes(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
