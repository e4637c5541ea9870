"""The thread in which the calls of a cluster execute, and waits that may be interrupted."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

from cqs.executors.ray.pool import ActorPool
from cqs.executors.ray.session import LOCK

_Result = TypeVar("_Result")

_THREAD = "cqs-dispatcher"
"""Prefix of the names of dispatcher threads."""


class Dispatcher:
    """Executes the calls of a cluster one after another, in a thread of its own.

    Everything that needs the workers refers to the dispatcher. The workers and a private Ray end
    with :meth:`close`, or when nothing refers to the dispatcher.
    """

    def __init__(self, pool: ActorPool, connection: ExitStack):
        """Start without calls.

        Args:
            pool: Actors, which may start later.
            connection: Disconnects from Ray, or shuts down a private Ray, when it is closed.
        """
        self.pool = pool
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        # Called when no call is left: calls refer to the dispatcher, and threads end before exit.
        self._end = weakref.finalize(self, _end, self._pid, self._thread, pool, connection)

    def close(self) -> None:
        """Close the cluster; see :meth:`cqs.Cluster.close`. A forked process closes nothing."""
        if os.getpid() != self._pid:
            return
        self.pool.closing.set()
        try:
            ended = self._thread.submit(self._end)  # KeyboardInterrupt does not reach the thread
        except RuntimeError:  # the cluster is closing already, or the interpreter shuts down
            self._thread.shutdown(wait=not _is_dispatcher())
            self._end()
        else:
            if not _is_dispatcher():  # the call of this thread must end first
                ended.result()

    def check_open(self) -> None:
        """Raise ValueError if the cluster is closed, disconnected or of another process."""
        if self.pool.closing.is_set():
            raise ValueError("this cluster is closed: open another cqs.Cluster")
        if os.getpid() != self._pid:
            raise ValueError(
                f"this cluster belongs to process {self._pid}, not {os.getpid()}: open a "
                "cqs.Cluster in this process"
            )
        self.pool.check_connected()

    def submit(self, work: Callable[[], _Result], future: "Future[_Result]") -> None:
        """Execute ``work`` in the dispatcher thread, without gradients; do not wait for it.

        Args:
            work: The work.
            future: Receives the result or the exception of the work; it is pending.
        """
        self.check_open()
        in_inference_mode, closing = torch.is_inference_mode_enabled(), self.pool.closing

        def execute() -> _Result:
            if closing.is_set():
                raise CancelledError
            with torch.inference_mode(in_inference_mode), torch.no_grad():  # modes of this thread
                return work()

        try:
            self._thread.submit(_fulfil, future, execute)
        except RuntimeError:  # another thread has closed the cluster
            self.check_open()
            raise

    def wait_for(self, work: Callable[[], _Result], cancelled: threading.Event) -> _Result:
        """Execute ``work`` in the dispatcher thread and wait for its result.

        Args:
            work: The work.
            cancelled: Event that makes the work stop; set if an exception interrupts the wait.

        Raises:
            ValueError: The cluster is closed.
            RuntimeError: The caller is a progress function of a cluster, which would wait forever.
            Exception: The work raised.
        """
        check_may_wait()
        future: Future[_Result] = Future()
        self.submit(work, future)
        try:
            return future.result()
        except BaseException:
            cancelled.set()
            future.cancel()
            raise


def _fulfil(future: "Future[_Result]", work: Callable[[], _Result]) -> None:
    """Execute work unless its future was cancelled, and store the result or the exception."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future  # tracebacks refer to this frame, and the future to a result or exception


def check_may_wait() -> None:
    """Raise RuntimeError in a dispatcher thread: it would wait for work of its own."""
    if _is_dispatcher():
        raise RuntimeError(
            "a progress function must not wait for another run of a cluster: wait after the run"
        )


def _is_dispatcher() -> bool:
    return threading.current_thread().name.startswith(_THREAD)


def _end(pid: int, thread: ThreadPoolExecutor, pool: ActorPool, connection: ExitStack) -> None:
    """End the actors and a private Ray; a forked process ends nothing."""
    if os.getpid() == pid:
        pool.closing.set()
        thread.shutdown(wait=False)
        try:
            pool.close()
        finally:
            with LOCK:
                connection.close()
