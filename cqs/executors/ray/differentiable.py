"""Differentiable attention on a cluster."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from cqs.executors.autograd import attend_differentiably, keep_operands
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Kind

if TYPE_CHECKING:
    from cqs.executors.ray.cluster import Cluster


def attend_on(
    scope: Callable[[], "AbstractContextManager[Cluster]"],
    problem: Problem,
    *,
    num_tasks: int | None,
    plan: Kind | str | None,
    backend: str | None,
    verify: bool,
    progress: bool | Callable[[int, int], None] = False,
) -> Partial:
    """Compute a problem on a cluster, with gradients by autograd.

    Args:
        scope: Returns a context manager of a cluster; it is entered once for each pass.
        problem: The checked problem.
        num_tasks: Number of tasks; ``None`` means one per worker.
        plan: Kind of the plan; ``None`` means quorums.
        backend: Name of a backend; ``None`` lets each worker choose its fastest.
        verify: Recompute sampled rows in float64 and raise if they deviate.
        progress: True draws a progress bar of the forward pass; a function is called with
            (finished tasks, all tasks).

    Returns:
        Output and LSE; errors are those of :meth:`cqs.Cluster.attention`.
    """

    def forward(cluster: "Cluster", problem: Problem) -> Partial:
        made = cluster.make_plan(problem, num_tasks, plan)
        return cluster.submit_plan(
            problem, made, backend=backend, verify=verify, progress=progress
        ).wait()

    def backward(problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        with scope() as cluster:
            made = cluster.make_plan(problem, num_tasks, plan)
            return cluster.differentiate_plan(problem, made, answer, grad_output, backend=backend)

    with scope() as cluster:
        attend = partial(keep_operands, partial(forward, cluster), backward)
        return attend_differentiably(problem, attend)
