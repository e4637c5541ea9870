"""Attention on a cluster that autograd can differentiate."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from cqs.autograd import attend_differentiably, keeping_operands
from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.problem import Problem

if TYPE_CHECKING:
    from cqs.executors.ray.cluster import Cluster


def attend_on(
    scope: Callable[[], "AbstractContextManager[Cluster]"],
    problem: Problem,
    *,
    num_tasks: int | None,
    interest_set: Iterable[int] | None,
    backend: str | None,
    verify: bool,
    progress: bool | Callable[[int, int], None] = False,
) -> Partial:
    """Compute a problem differentiably on a cluster.

    Args:
        scope: Enters a cluster, once for each pass.
        problem: The checked problem.
        num_tasks: See :meth:`Cluster.attention`, as for the other options.
        interest_set: Likewise.
        backend: Likewise.
        verify: Likewise.
        progress: Likewise.
    """

    def forward(cluster: "Cluster", problem: Problem) -> Partial:
        plan = cluster.make_plan(problem, num_tasks, interest_set)
        return cluster.submit_plan(
            problem, plan, backend=backend, verify=verify, progress=progress
        ).wait()

    def backward(problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        with scope() as cluster:
            plan = cluster.make_plan(problem, num_tasks, interest_set)
            return cluster.differentiate_plan(problem, plan, answer, grad_output, backend=backend)

    with scope() as cluster:
        attend = keeping_operands(partial(forward, cluster), backward)
        return attend_differentiably(problem, attend)
