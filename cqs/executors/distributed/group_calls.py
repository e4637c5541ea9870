"""Serialization of this process's calls on a process group, in one order on every rank."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist


class GroupCalls:
    """Serializes this process's calls on one process group, and rejects concurrent ones.

    Ranks pair up their calls by order, and concurrent calls have no order that ranks could share: a
    thread's call may be paired with another thread's on the next rank. The lock keeps both calls
    intact, so that no rank waits in vain. The error stays, because earlier calls may have been
    paired wrongly without an overlap: every later call fails on every rank of the group.
    """

    def __init__(self) -> None:
        """Track the calls of a new process group."""
        self._lock = threading.RLock()
        self._overlap = ""
        self.num_calls = 0
        """Number of calls whose arguments all ranks have found equal."""

    @contextmanager
    def call(self, *, waits: bool = True) -> Iterator[None]:
        """Hold the group for a call, or for a part of one; reentrant within a thread.

        Args:
            waits: Whether a call that overlaps another thread's call waits for its end. It runs
                without the lock otherwise. The overlap is recorded in both cases.
        """
        locked = self._lock.acquire(blocking=False)
        if not locked:
            self._overlap = f"a call of {threading.current_thread().name} during another"
            locked = waits and self._lock.acquire()
        try:
            yield
        finally:
            if locked:
                self._lock.release()

    @property
    def error(self) -> RuntimeError | None:
        """Error of all calls after two threads called on the group at the same time, or None."""
        if not self._overlap:
            return None
        return RuntimeError(
            f"group must be used by one thread at a time, got {self._overlap}: make a process "
            "group for each thread with torch.distributed.new_group. This group cannot be used "
            "again, and its results may be wrong since threads have shared it"
        )

    def check(self) -> None:
        """Raise :attr:`error`, if there is one."""
        if self.error is not None:
            raise self.error


_calls: "WeakKeyDictionary[Any, GroupCalls]" = WeakKeyDictionary()


def calls_on(group: Any) -> GroupCalls:
    """Return the calls of this process on a group; ``None`` means the default group."""
    return _calls.setdefault(group or dist.group.WORLD, GroupCalls())
