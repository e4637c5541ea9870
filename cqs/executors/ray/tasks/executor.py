"""The executor that computes the tasks of a plan on the actors of a cluster."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.pool import MemoryNotSharedError
from cqs.executors.ray.tasks.job import Job
from cqs.executors.ray.tasks.report import RunReport
from cqs.executors.ray.tasks.run import Run
from cqs.executors.shortage import choose_num_tasks
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.problem.scores import add_sinks, merge_sinks


class TaskExecutor:
    """Computes tasks on the actors of a cluster, which merge their results.

    One executor serves one call. Cancelled runs raise CancelledError; see also
    :meth:`cqs.Cluster.attention`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        rest: Callable[[threading.Event], None],
        *,
        is_in_dispatcher: bool,
    ):
        """Start without reports.

        Args:
            dispatcher: Thread that talks to the actors.
            rest: Waits until all actors are free for tasks, or an event is set.
            is_in_dispatcher: Whether the dispatcher thread calls this executor. Otherwise runs are
                passed to that thread.
        """
        self._dispatcher, self._rest = dispatcher, rest
        self._is_in_dispatcher = is_in_dispatcher
        self.reports: list[RunReport] = []
        """Measurements of each run, in order."""

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`."""
        answer = into or part.problem.empty_answer()
        job = Job.forward(part.problem, part.plan, answer)
        self._compute(job, part.backend, hooks)
        if part.problem.sinks is None:
            return answer
        add = merge_sinks if part.problem.is_reproducible else add_sinks
        return add(answer, part.problem.sinks)

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        problem = part.problem
        tensors = problem.query, problem.key, problem.value
        gradients = Gradients(*map(torch.zeros_like, tensors))
        job = Job.backward(problem, part.plan, answer, grad_output, gradients)
        self._compute(job, part.backend, NO_HOOKS)
        return gradients

    def choose_num_tasks(self, problem: Problem) -> int:
        """Return one per worker, or more if GPUs have too little memory for such large tasks."""
        pool = self._dispatcher.pool
        number = pool.num_workers
        memory = [info.memory for info in pool.infos if info.memory is not None]
        if not memory:
            return number
        return max(choose_num_tasks(part, number, min(memory)) for _, part in problem.parts())

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        return part.backend or "chosen by the workers"

    def _compute(self, job: Job, backend: str | None, hooks: Hooks) -> None:
        """Run a job; run it again without shared memory if that fails, or memory is short."""
        pool, cancelled = self._dispatcher.pool, hooks.cancelled or threading.Event()
        job.synchronize()  # actors do not wait for kernels of this thread

        def rest_and_run() -> None:
            self._rest(cancelled)
            arguments = pool, job, backend, hooks.advance, cancelled
            run, progress = Run(*arguments), hooks.progress
            done = 0 if progress is None else progress.done

            try:
                report = run()
            except (MemoryNotSharedError, torch.OutOfMemoryError) as error:
                if pool.obstacle:
                    raise
                pool.obstacle = str(error)
                pool.has_stale_memory = True
                if progress is not None:
                    progress.move(done)
                try:
                    report = (run := Run(*arguments))()
                finally:
                    if isinstance(error, torch.OutOfMemoryError):  # a later call may share again
                        pool.obstacle = ""
            self.reports.append(report)
            if job.problem.is_reproducible:
                pool.check_environments(run.environments)

        if self._is_in_dispatcher:
            rest_and_run()
        else:
            self._dispatcher.wait_for(rest_and_run, cancelled)
