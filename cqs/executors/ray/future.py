"""Waiting for a run of a cluster."""

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor

from cqs.executors.ray.report import RunReport
from cqs.executors.ray.run import Run
from cqs.partial import Partial

_Found = TypeVar("_Found")

DISPATCHER = "cqs-dispatcher"
"""What the names of the threads begin with that run the runs."""


class AttentionFuture:
    """The answer of :meth:`cqs.Cluster.submit`, now or later."""

    def __init__(self, cluster: object, future: "Future[Partial]", run: Run, return_lse: bool):
        """Wrap the run's future, and keep its cluster."""
        self._cluster = cluster
        self._future, self._run, self._return_lse = future, run, return_lse

    def result(self, timeout: float | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Wait for the answer: ``output``, or ``(output, lse)`` with ``return_lse``.

        Raises:
            TimeoutError: if it is not there after ``timeout`` seconds; the run goes on.
            concurrent.futures.CancelledError: if it was cancelled.
        """
        _check_may_wait_for(self._future)
        answer = self._future.result(timeout)
        return (answer.output, answer.lse) if self._return_lse else answer.output

    def wait(self) -> Partial:
        """Wait for output and lse; cancels the run if the wait is interrupted."""
        answer: Partial = wait_or_cancel(self._future, self._run.cancelled)
        return answer

    def cancel(self) -> bool:
        """Give up; False if it was too late. Tasks that are running finish unseen."""
        self._run.cancelled.set()
        return self._future.cancel() or not self._future.done()

    def done(self) -> bool:
        """Say whether the run has ended, in whatever way."""
        return self._future.done()

    @property
    def report(self) -> RunReport:
        """What the run took; waits for its end."""
        self._future.result()
        assert self._run.report is not None
        return self._run.report


def wait_or_cancel(future: "Future[_Found]", cancelled: threading.Event) -> _Found:
    """Wait for a result; if the wait is interrupted, set what makes the work end."""
    _check_may_wait_for(future)
    try:
        return future.result()
    except BaseException:
        cancelled.set()
        future.cancel()
        raise


def is_dispatcher() -> bool:
    """Say whether this thread runs the runs of a cluster."""
    return threading.current_thread().name.startswith(DISPATCHER)


def check_may_wait() -> None:
    """Raise RuntimeError in the thread that would have to do what is waited for."""
    if is_dispatcher():
        raise RuntimeError("a progress function cannot wait for another run of a cluster")


def _check_may_wait_for(future: "Future[Any]") -> None:
    if not future.done():
        check_may_wait()
