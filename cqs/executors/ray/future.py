"""The future of an asynchronous call on a cluster."""

import threading
from concurrent.futures import Future

from torch import Tensor

from cqs.executors.ray.dispatcher import check_may_wait
from cqs.executors.ray.tasks.executor import TaskExecutor
from cqs.executors.ray.tasks.report import RunReport
from cqs.partial import AttentionOutput


class AttentionFuture(Future[Tensor | AttentionOutput]):
    """The future result of :meth:`cqs.Cluster.submit`. The cluster stays open for it.

    The functions of :mod:`concurrent.futures`, such as ``as_completed`` and ``wait``, accept it. A
    progress function must not call them, because it would wait forever.
    """

    def __init__(self, executor: TaskExecutor, cancelled: threading.Event):
        """Make the future of a call that has not started.

        Args:
            executor: The executor of the call, which has the reports of its runs.
            cancelled: Event that makes the call stop.
        """
        super().__init__()
        self._executor, self._cancelled = executor, cancelled

    def result(self, timeout: float | None = None) -> Tensor | AttentionOutput:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; ``None`` waits without limit.

        Returns:
            ``output``, or ``(output, lse)`` with ``return_lse``; see :meth:`cqs.Cluster.attention`.

        Raises:
            TimeoutError: The result is not ready after ``timeout`` seconds; the call continues.
            concurrent.futures.CancelledError: The call was cancelled or the cluster closed.
            RuntimeError: The caller is a progress function of a cluster, which would wait forever.
            Exception: The call failed; see :meth:`cqs.Cluster.attention`.
        """
        if not self.done():
            check_may_wait()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancel the call.

        Each actor finishes at most the two tasks that it has; the driver discards their results.

        Returns:
            False if the call had already ended.
        """
        self._cancelled.set()
        return super().cancel() or not self.done()

    @property
    def report(self) -> RunReport:
        """Timings of the call; waits for its end, and raises if it failed."""
        self.result()
        return RunReport.join(self._executor.reports)
