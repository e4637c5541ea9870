"""Calls on actors: the wait for answers, and the detection of actors that fail or hang."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from cqs.executors.ray.pool import Actor, ActorPool

_POLL_SECONDS = 0.1
"""Longest wait for answers before the caller checks for cancellation and timeouts."""


class WorkersFailedError(RuntimeError):
    """No worker is left to compute the remaining tasks."""


class TaskFailedError(RuntimeError):
    """As many workers as ``max_attempts`` failed on the same task or shard operation."""


@dataclass(frozen=True)
class RetryPolicy:
    """After how many failures, and after how long a silence, a call gives up."""

    num_workers: int
    """Number of actors at the start of a call."""
    stall_timeout: float
    """Seconds after which an actor that has work and returns no result counts as hung."""
    start_timeout: float
    """Seconds that a new actor may take until it answers."""
    max_attempts: int
    """Number of actors that may fail on one task or operation before the call raises."""

    def count(
        self,
        attempts: "Counter[Any]",
        key: Any,
        describe: Callable[[int], str],
        cause: Exception | None = None,
    ) -> None:
        """Count a failure of an actor on a task or operation.

        Raises:
            TaskFailedError: ``max_attempts`` actors have failed on it. The message is that of
                ``describe``, which is called with the number of failures.
        """
        attempts[key] += 1
        if attempts[key] >= self.max_attempts:
            raise TaskFailedError(describe(attempts[key])) from cause


class Answer(NamedTuple):
    """The end of a call, or of all calls on an actor that has failed."""

    actor: Actor
    keys: list[Any]
    """Key of the call; of a failed actor, the keys of all its calls in their order."""
    value: Any = None
    """Return value of the method."""
    error: Exception | None = None
    """Exception that the method raised; its cause has the remote traceback."""
    failure: Exception | None = None
    """Failure of the actor, which has been removed from the pool."""
    seconds: float = 0.0
    """Time to get the value."""


class Calls:
    """Pending calls on actors. An actor executes its calls one after another."""

    def __init__(self, pool: ActorPool, is_cancelled: Callable[[], bool], closing: threading.Event):
        """Start without calls.

        Args:
            pool: The pool of the actors.
            is_cancelled: Returns whether waits must end with CancelledError.
            closing: Set when the cluster closes; waits then end with CancelledError too.
        """
        self._pool, self._ray = pool, pool.ray
        self._is_cancelled, self._closing = is_cancelled, closing
        self._actors: dict[Any, Actor] = {}
        self.queues: dict[int, dict[Any, Any]] = {}
        """By actor index, the keys of pending calls by their Ray references, in order."""
        self._last_sign: dict[int, float] = {}

    def __bool__(self) -> bool:
        """Return whether calls are pending."""
        return bool(self._actors)

    @property
    def actors(self) -> list[Actor]:
        """Actors with pending calls."""
        return list({actor.index: actor for actor in self._actors.values()}.values())

    def add(self, actor: Actor, key: Any, ref: Any) -> None:
        """Add a call, given its Ray reference; ``key`` identifies it in the answer."""
        queue = self.queues.setdefault(actor.index, {})
        if not queue:
            self._last_sign[actor.index] = time.monotonic()
        queue[ref] = key
        self._actors[ref] = actor

    def check(self) -> None:
        """Raise CancelledError or ValueError if the call must end; Ray may then be shut down."""
        if self._is_cancelled() or self._closing.is_set():
            raise CancelledError
        self._pool.check_connected()

    def collect(self, seconds: float = _POLL_SECONDS) -> Iterator[Answer]:
        """Wait for an answer or failure, and yield all that have arrived.

        Args:
            seconds: Longest wait, at most 0.1 s.

        Raises:
            CancelledError: The call was cancelled, or the cluster closed.
            ValueError: This process lost its connection to Ray.
        """
        self.check()
        refs = list(self._actors)
        timeout = min(seconds, _POLL_SECONDS)
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=timeout)
        if ready and len(refs) > 1:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            self.check()  # the caller of the previous answer may have run user code
            if ref in self._actors:
                yield self._get(ref)

    def _get(self, ref: Any) -> Answer:
        actor, start = self._actors[ref], time.perf_counter()
        value: Any = None
        raised: Exception | None = None
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raised = error.cause
            with suppress(Exception):  # some exceptions have read-only attributes
                raised.__cause__ = error
        except self._ray.exceptions.UnserializableException as error:
            raised = error
        except _actor_failures(self._ray) as error:
            return self.fail(actor, error)
        del self._actors[ref]
        self._last_sign[actor.index] = time.monotonic()
        key = self.queues[actor.index].pop(ref)
        return Answer(actor, [key], value, raised, seconds=time.perf_counter() - start)

    def fail(self, actor: Actor, failure: Exception, *, is_hung: bool = False) -> Answer:
        """Remove a failed or hung actor from the pool, and its calls."""
        queue = self.queues.pop(actor.index, {})
        for ref in queue:
            del self._actors[ref]
        if actor.index in self._pool.actors:
            self._pool.remove(actor, is_hung=is_hung)
        self._pool.abandon(list(queue))
        return Answer(actor, list(queue.values()), failure=failure)

    def find_hung(self, retry_policy: RetryPolicy) -> list[Actor]:
        """Return actors that have not answered since their timeout, or have not started in time."""
        now, stall = time.monotonic(), retry_policy.stall_timeout
        return [
            actor
            for actor in self.actors
            if now - self._last_sign[actor.index]
            > (max(stall, retry_policy.start_timeout) if actor.info is None else stall)
        ]

    def abandon(self) -> None:
        """Discard the answers of all calls, which may still be executed."""
        self._pool.abandon(list(self._actors))


def _actor_failures(ray: Any) -> tuple[type[Exception], ...]:
    """Return the exception types that mean a failed actor or host, not an error of the method."""
    errors = ray.exceptions
    return (
        errors.RayActorError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
        errors.NodeDiedError,
        errors.WorkerCrashedError,
    )
