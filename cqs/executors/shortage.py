"""What to say, and to advise, when a GPU runs out of memory."""

from cqs.problem import Problem
from cqs.scheduler import Plan, predict_cost
from cqs.scheduler.difference_covers import singer_order

_FEWEST_TOKENS = (3, *(number for number in range(4, 1000) if singer_order(number)))
"""Numbers of tasks that hold the fewest tokens for their number: of perfect difference sets."""
_USABLE = 0.9
"""Share of a GPU's memory that tensors may fill: the rest is taken by kernels and fragments."""
_LESS = 0.8
"""Advice must save this much: what did not fit may have shared the GPU with others."""


def explain_shortage(
    problem: Problem, plan: Plan, backend: str | None, capacity: int, worker: int | None = None
) -> str:
    """Compare what was predicted with what a GPU has, and say how many tasks would fit.

    Args:
        problem: What was asked.
        plan: Its plan.
        backend: Name of the one that computed, if that was known.
        capacity: Bytes of the GPU.
        worker: The task that found too little memory, alone on its device; ``None`` means that all
            tasks share the device.
    """
    if worker is None:
        whole = problem.make_plan(1).predict_cost(0, problem.shape)
        needed = whole.bytes_in + whole.bytes_out + _beside(problem, plan, backend)
        what = "this call"
    else:
        needed = plan.predict_cost(worker, problem.shape, backend).peak_bytes
        what = f"task {worker} of {plan.num_workers}"
    by = "" if backend is None else f", backend {backend!r}"
    message = (
        f"out of memory: {what} needs {_gibibytes(needed)} by prediction (forward pass{by}) "
        f"and the GPU has {_gibibytes(capacity)}"
    )
    if needed < capacity / 2:
        message += ", of which other tensors or processes hold most"
    for num_workers in _FEWEST_TOKENS:
        finer = problem.make_plan(num_workers)
        each = max(predict_cost(task, problem.shape, backend).peak_bytes for task in finer.tasks)
        if each <= min(_USABLE * capacity, _LESS * needed):
            return (
                f"{message}. Cut into {num_workers} tasks, each would need {_gibibytes(each)}: "
                f"cqs.Cluster(...).attention(..., num_workers={num_workers}), whose actors hold a "
                "task at a time"
            )
    return f"{message}. No number of tasks up to {_FEWEST_TOKENS[-1]} would help"


def _beside(problem: Problem, plan: Plan, backend: str | None) -> int:
    """Return what the task that needs most holds beside inputs and results."""
    costs = (predict_cost(task, problem.shape, backend) for task in plan.tasks)
    return max(cost.peak_bytes - cost.bytes_in - cost.bytes_out for cost in costs)


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
