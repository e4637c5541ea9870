"""The executor that starts a cluster for a call."""

from typing import Self

from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks
from cqs.executors.ray.cluster import Cluster
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan


class TemporaryCluster:
    """Computes tasks on a cluster of a ``with`` block; each backward pass starts another one."""

    num_tasks: int

    def __enter__(self) -> Self:
        """Start a cluster, for which :class:`cqs.Cluster` chooses the workers."""
        self._cluster = Cluster()
        self.num_tasks = len(self._cluster.pids)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cluster.close()

    def run(
        self,
        problem: Problem,
        plan: Plan,
        backend: str | None = None,
        hooks: Hooks = NO_HOOKS,
        into: Partial | None = None,
    ) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`."""
        return self._cluster.make_executor().run(problem, plan, backend, hooks, into)

    def run_backward(
        self,
        problem: Problem,
        plan: Plan,
        answer: Partial,
        grad_output: Tensor,
        backend: str | None = None,
    ) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        with Cluster() as cluster:
            return cluster.make_executor().run_backward(problem, plan, answer, grad_output, backend)
