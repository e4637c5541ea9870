"""The thread in which the calls of a cluster execute, and waits that may be interrupted."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from cqs.executors.ray.pool import ActorPool

_Found = TypeVar("_Found")

_THREAD = "cqs-dispatcher"
"""Prefix of the names of dispatcher threads."""


class Dispatcher:
    """Executes the calls of a cluster one after another, in a thread of its own.

    Everything that needs the workers refers to the dispatcher. The workers and a private Ray end
    with :meth:`close`, or when nothing refers to the dispatcher.
    """

    def __init__(self, pool: ActorPool, disconnect: Callable[[], None]):
        """Start without calls.

        Args:
            pool: Started actors.
            disconnect: Disconnects from Ray, or shuts down a private Ray.
        """
        self.pool = pool
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._close = weakref.finalize(self, _close, self._pid, self._thread, pool, disconnect)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the cluster; see :meth:`cqs.Cluster.close`."""
        if _is_dispatcher():  # the call of this thread must end first
            self._close()
        else:
            run_to_end(self._close_once)

    def _close_once(self) -> None:
        with self._lock:  # all callers wait until the first has closed the cluster
            self._close()

    def check_open(self) -> None:
        """Raise ValueError if the cluster is closed, disconnected or of another process."""
        if not self._close.alive:
            raise ValueError("this cluster is closed: open another cqs.Cluster")
        if os.getpid() != self._pid:
            raise ValueError(
                f"this cluster belongs to process {self._pid}, not {os.getpid()}: open a "
                "cqs.Cluster in this process"
            )
        self.pool.check_connected()

    def submit(self, work: Callable[[], _Found]) -> "Future[_Found]":
        """Execute ``work`` in the dispatcher thread, without gradients; do not wait for it."""
        self.check_open()
        in_inference_mode = torch.is_inference_mode_enabled()

        def execute() -> _Found:
            with torch.inference_mode(in_inference_mode), torch.no_grad():  # modes of this thread
                return work()

        try:
            return self._thread.submit(execute)
        except RuntimeError:  # another thread has closed the cluster
            self.check_open()
            raise

    def wait_for(self, work: Callable[[], _Found], cancelled: threading.Event) -> _Found:
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
        return wait_or_cancel(self.submit(work), cancelled)


def run_to_end(function: Callable[[], object]) -> None:
    """Call a function on a new thread, which KeyboardInterrupt does not reach, and wait for it.

    The function ends also if an exception interrupts the wait.

    Raises:
        Exception: The function raised.
    """
    thread = ThreadPoolExecutor(1)
    try:
        future = thread.submit(function)
    except RuntimeError:  # no thread can start while the interpreter shuts down
        function()
    else:
        with thread:
            future.result()


def wait_or_cancel(future: "Future[_Found]", cancelled: threading.Event) -> _Found:
    """Wait for a result; if an exception interrupts the wait, set ``cancelled``."""
    try:
        return future.result()
    except BaseException:
        cancelled.set()
        future.cancel()
        raise


def check_may_wait() -> None:
    """Raise RuntimeError in a dispatcher thread: it would wait for work of its own."""
    if _is_dispatcher():
        raise RuntimeError(
            "a progress function must not wait for another run of a cluster: wait after the run"
        )


def _is_dispatcher() -> bool:
    return threading.current_thread().name.startswith(_THREAD)


def _close(
    pid: int, thread: ThreadPoolExecutor, pool: ActorPool, disconnect: Callable[[], None]
) -> None:
    """End the calls of a cluster, its actors and a private Ray; a forked process closes nothing."""
    if os.getpid() != pid:
        return
    pool.closing.set()
    if _is_dispatcher():  # closed by a progress function: the call must end first
        threading.Thread(target=_close, args=(pid, thread, pool, disconnect)).start()
        return
    thread.shutdown(wait=True, cancel_futures=True)
    try:
        pool.close()
    finally:
        disconnect()
