"""The future of an asynchronous call on a cluster, and interruptible waits."""

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor

from cqs.executors.ray.tasks.report import RunReport
from cqs.executors.ray.tasks.run import Run
from cqs.partial import AttentionOutput, Partial

_Found = TypeVar("_Found")

DISPATCHER = "cqs-dispatcher"
"""Prefix of the names of dispatcher threads, which execute the calls of clusters."""


class AttentionFuture:
    """The future result of :meth:`cqs.Cluster.submit`."""

    def __init__(self, cluster: object, future: "Future[Partial]", run: Run, return_lse: bool):
        """Wrap the future of a run; the reference to ``cluster`` keeps the cluster open."""
        self._cluster = cluster
        self._future, self._run, self._return_lse = future, run, return_lse

    def result(self, timeout: float | None = None) -> Tensor | AttentionOutput:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; ``None`` waits without limit.

        Returns:
            ``output``, or ``(output, lse)`` with ``return_lse``; see :meth:`cqs.Cluster.attention`.

        Raises:
            TimeoutError: The result is not ready after ``timeout`` seconds; the run continues.
            concurrent.futures.CancelledError: The run was cancelled or the cluster closed.
            RuntimeError: The caller is a progress function of a cluster, which would wait forever.
            Exception: The run failed; see :meth:`cqs.Cluster.attention`.
        """
        _check_may_wait_for(self._future)
        answer = self._future.result(timeout)
        return answer.to_result(self._return_lse)

    def wait(self) -> Partial:
        """Wait for output and LSE; cancel the run if an exception interrupts the wait."""
        answer: Partial = wait_or_cancel(self._future, self._run.cancelled)
        return answer

    def cancel(self) -> bool:
        """Cancel the run.

        Tasks that are running finish on their actors; the driver discards their results.

        Returns:
            False if the run had already ended.
        """
        self._run.cancelled.set()
        return self._future.cancel() or not self._future.done()

    def done(self) -> bool:
        """Return whether the run has finished, failed or was cancelled."""
        return self._future.done()

    @property
    def report(self) -> RunReport:
        """Timings of the run; waits for its end, and raises if the run failed."""
        self._future.result()
        assert self._run.report is not None
        return self._run.report


def wait_or_cancel(future: "Future[_Found]", cancelled: threading.Event) -> _Found:
    """Wait for a result; if an exception interrupts the wait, set ``cancelled``.

    Args:
        future: Future of work in the dispatcher thread.
        cancelled: Event that makes the work stop.

    Raises:
        RuntimeError: The caller is the dispatcher thread, and the work has not finished.
        Exception: The work failed.
    """
    _check_may_wait_for(future)
    try:
        return future.result()
    except BaseException:
        cancelled.set()
        future.cancel()
        raise


def is_dispatcher() -> bool:
    """Return whether this thread is the dispatcher of a cluster."""
    return threading.current_thread().name.startswith(DISPATCHER)


def check_may_wait() -> None:
    """Raise RuntimeError in a dispatcher thread: it would wait for work of its own."""
    if is_dispatcher():
        raise RuntimeError(
            "a progress function must not wait for another run of a cluster: wait after the run"
        )


def _check_may_wait_for(future: "Future[Any]") -> None:
    if not future.done():
        check_may_wait()
