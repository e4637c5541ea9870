"""The executor that computes the tasks of a plan on the actors of a cluster."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.failures import RetryPolicy
from cqs.executors.ray.tasks.job import Attend, Differentiate
from cqs.executors.ray.tasks.report import RunReport
from cqs.executors.ray.tasks.run import Run
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan
from cqs.worker import Worker


class TaskExecutor:
    """Computes tasks on the actors of a cluster, and merges their results on the driver.

    One executor serves one call. Cancelled runs raise CancelledError; see also
    :meth:`cqs.Cluster.attention`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        retry_policy: RetryPolicy,
        rest: Callable[[threading.Event], None],
        *,
        is_in_dispatcher: bool,
    ):
        """Start without reports.

        Args:
            dispatcher: Thread that talks to the actors.
            retry_policy: Timeouts and the number of attempts per task.
            rest: Waits until all actors are free for tasks, or an event is set.
            is_in_dispatcher: Whether the dispatcher thread calls this executor. Otherwise runs are
                passed to that thread.
        """
        self._dispatcher, self._retry_policy, self._rest = dispatcher, retry_policy, rest
        self._is_in_dispatcher = is_in_dispatcher
        self.num_tasks = retry_policy.num_workers
        self.reports: list[RunReport] = []
        """Measurements of each run, in order."""

    def run(
        self,
        problem: Problem,
        plan: Plan,
        backend: str | None = None,
        hooks: Hooks = NO_HOOKS,
        into: Partial | None = None,
    ) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`."""
        answer: Partial = self._compute(Attend(problem, plan, into), plan, backend, hooks)
        return answer

    def run_backward(
        self,
        problem: Problem,
        plan: Plan,
        answer: Partial,
        grad_output: Tensor,
        backend: str | None = None,
    ) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        job = Differentiate(problem, plan, answer, grad_output)
        gradients: Gradients = self._compute(job, plan, backend, NO_HOOKS)
        return gradients

    def _compute(
        self, job: Attend | Differentiate, plan: Plan, backend: str | None, hooks: Hooks
    ) -> Any:
        cancelled = hooks.cancelled or threading.Event()
        run = Run(
            self._dispatcher.pool,
            self._retry_policy,
            job,
            plan,
            worker=Worker.of(job.problem, backend),
            progress=hooks.advance,
            cancelled=cancelled,
            closing=self._dispatcher.closing,
        )

        def rest_and_run() -> Any:
            self._rest(cancelled)
            result, report = run()
            self.reports.append(report)
            return result

        if self._is_in_dispatcher:
            return rest_and_run()
        return self._dispatcher.wait_for(rest_and_run, cancelled)
