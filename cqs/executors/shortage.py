"""What to say, and to advise, when a GPU runs out of memory."""

from cqs.problem import Problem
from cqs.scheduler import Plan

_SINGER = (3, 7, 13, 21, 31, 57, 73, 91, 133, 183, 273, 307, 381, 553, 871, 993)
"""Numbers of tasks that hold the fewest tokens for their number."""
_USABLE = 0.9
"""Share of a GPU's memory that tensors may fill: the rest is taken by kernels and fragments."""
_LESS = 0.8
"""Advice must save this much: what did not fit may have shared the GPU with others."""


def explain_shortage(
    problem: Problem, plan: Plan, backend: str, capacity: int, worker: int | None = None
) -> str:
    """Compare what was predicted with what a GPU has, and say how many tasks would fit.

    Args:
        problem: What was asked.
        plan: Its plan.
        backend: Name of the one that computed.
        capacity: Bytes of the GPU.
        worker: The task that found too little memory, alone on its device; ``None`` means that all
            tasks share the device.
    """
    if worker is None:
        whole = problem.make_plan(1).predict_cost(0, problem.shape)
        cost = plan.predict_cost(0, problem.shape, backend)
        beside = cost.peak_bytes - cost.bytes_in - cost.bytes_out
        needed, what = whole.bytes_in + whole.bytes_out + beside, "this call"
    else:
        needed = plan.predict_cost(worker, problem.shape, backend).peak_bytes
        what = f"task {worker} of {plan.num_workers}"
    message = (
        f"out of memory: the forward pass of {what} needs {_gibibytes(needed)} by prediction, "
        f"backend {backend!r}; the GPU has {_gibibytes(capacity)}, not all of it free"
    )
    for num_workers in _SINGER:
        cost = problem.make_plan(num_workers).predict_cost(0, problem.shape, backend)
        if cost.peak_bytes <= min(_USABLE * capacity, _LESS * needed):
            return (
                f"{message}. Cut into {num_workers} tasks, each would need "
                f"{_gibibytes(cost.peak_bytes)}: pass num_workers={num_workers} to a Cluster, "
                "whose actors hold a task at a time"
            )
    return f"{message}. No number of tasks up to {_SINGER[-1]} would fit"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
