"""The future of an asynchronous call on a cluster."""

import concurrent.futures
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future

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

    def __repr__(self) -> str:
        future = self._future
        if not future.done():
            state = "running" if future.running() else "pending"
        elif future.cancelled() or isinstance(error := future.exception(), CancelledError):
            state = "cancelled"
        elif error is not None:
            state = f"failed: {error!r}"
        else:
            state = f"done: output {list(future.result().output.shape)}"
        return f"<AttentionFuture {state}>"

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


def as_completed(
    futures: Iterable[AttentionFuture], timeout: float | None = None
) -> Iterator[AttentionFuture]:
    """Yield futures of :meth:`cqs.Cluster.submit`, of one or several clusters, as they finish.

    The function corresponds to :func:`concurrent.futures.as_completed`. A future that failed or was
    cancelled is yielded too; its method ``result`` raises.

    Args:
        futures: The futures; one that is passed twice is yielded once.
        timeout: Seconds from the first iteration to the end of the last call; ``None`` waits
            without limit.

    Returns:
        An iterator over the futures, those that are done already first.

    Raises:
        TypeError: An element of ``futures`` is not a future of a cluster.
        TimeoutError: A future is not done after ``timeout`` seconds; the calls continue. The
            iterator raises it.
        RuntimeError: The caller is a progress function of a cluster, which would wait forever.

    Example::

        futures = [cluster.submit(*tensors) for tensors in problems]
        for future in cqs.as_completed(futures, timeout=600):
            print(future.result().shape, future.report)
    """
    pending: dict[Future[Partial], AttentionFuture] = {}
    for future in futures:
        if not isinstance(future, AttentionFuture):
            raise TypeError(f"futures must be those of Cluster.submit, got {future!r}")
        pending[future._future] = future
    if not all(future.done() for future in pending):
        check_may_wait()
    return map(pending.pop, concurrent.futures.as_completed(pending, timeout))
