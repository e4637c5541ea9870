"""The future of an asynchronous call on a cluster."""

import threading
from concurrent.futures import Future

from torch import Tensor

from cqs.executors.ray.dispatcher import check_may_wait
from cqs.executors.ray.tasks.executor import TaskExecutor
from cqs.executors.ray.tasks.report import RunReport
from cqs.partial import AttentionOutput, Partial


class AttentionFuture:
    """The future result of :meth:`cqs.Cluster.submit`. The cluster stays open for it."""

    def __init__(
        self,
        future: "Future[Partial]",
        executor: TaskExecutor,
        cancelled: threading.Event,
        return_lse: bool,
    ):
        """Wrap the future of a call.

        Args:
            future: Output and LSE.
            executor: The executor of the call, which has the reports of its runs.
            cancelled: Event that makes the call stop.
            return_lse: Whether :meth:`result` returns the LSE as well.
        """
        self._future, self._executor = future, executor
        self._cancelled, self._return_lse = cancelled, return_lse

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
        return self._wait(timeout).to_result(self._return_lse)

    def cancel(self) -> bool:
        """Cancel the call.

        Each actor finishes at most the two tasks that it has; the driver discards their results.

        Returns:
            False if the call had already ended.
        """
        self._cancelled.set()
        return self._future.cancel() or not self._future.done()

    def done(self) -> bool:
        """Return whether the call has finished, failed or was cancelled."""
        return self._future.done()

    @property
    def report(self) -> RunReport:
        """Timings of the call; waits for its end, and raises if it failed."""
        self._wait()
        return RunReport.join(self._executor.reports)

    def _wait(self, timeout: float | None = None) -> Partial:
        if not self._future.done():
            check_may_wait()
        return self._future.result(timeout)
