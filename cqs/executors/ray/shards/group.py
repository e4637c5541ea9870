"""The actors of a cluster as ranks: shards, process groups and re-execution of lost shards."""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from cqs.executors.distributed.transport.connections import Links
from cqs.executors.ray.blob import Blob
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.pool import CONTROL, Answer, Calls, TaskFailedError, WorkersFailedError
from cqs.executors.ray.shards.operation import ShardOperation, ShardProducer, Split

_Result = TypeVar("_Result")

_GRACE_SECONDS = 1.0
"""Seconds in which the other ranks of a group report errors after the first error."""
_ABORT_SECONDS = 5.0
"""Seconds in which an actor must answer an abort; otherwise it counts as hung and is killed."""


class _BrokenError(Exception):
    """A call must be repeated: an actor failed or hung, or connections between ranks broke."""


class WorkerGroup:
    """Makes the shards of sequences on the actors of a pool, whose places are ranks 0 to n - 1.

    The methods run in the dispatcher thread of the cluster, except :meth:`call`.
    No failure leaves an actor in the middle of a call. Each actor has answered, or it is removed
    and replaced before the next call. Cancelled calls are aborted.
    """

    def __init__(self, dispatcher: Dispatcher):
        """Start without shards and without a process group.

        Args:
            dispatcher: Thread that talks to the actors.
        """
        self._dispatcher, self._pool = dispatcher, dispatcher.pool
        self._ray = self._pool.ray
        self._members = self._pool.actors
        """The actor of each rank."""
        self._numbers = itertools.count()
        self._generation = 0
        self._links: Links | None = None
        self._is_formed = False
        self._unsettled: ShardOperation | None = None
        """The last collective operation; its shards are lost if a rank fails before it is done."""
        self._cancelled = threading.Event()
        self.num_ranks = self._pool.num_workers
        """Number of ranks, equal to the number of shards of every sequence."""
        self.sequences: WeakSet[Any] = WeakSet()
        """The sharded sequences that exist."""
        self._held: set[ShardOperation] = set()
        """Operations of which actors may hold shards."""

    def resize(self) -> None:
        """Start or kill actors, so that there are as many as the pool should have.

        A sequence that was made since the caller has checked keeps its ranks, and all workers.
        """
        self._pool.check_connected()
        self._sweep()
        if self.sequences:
            self._pool.num_workers = self.num_ranks
            return
        self.num_ranks, self._is_formed, self._links = self._pool.num_workers, False, None
        self._pool.grow()
        self._pool.shrink(self.num_ranks)
        with Calls(self._pool, threading.Event()) as calls:
            calls.refill()

    def call(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Execute ``work(*arguments)`` in the dispatcher thread, and wait for its result.

        Shards to which nothing refers are freed first. If an exception interrupts the wait, the
        work is cancelled.
        """
        cancelled = threading.Event()

        def sweep_and_work() -> _Result:
            self._cancelled = cancelled
            self._sweep()
            return work(*arguments)

        return self._dispatcher.wait_for(sweep_and_work, cancelled)

    def make(
        self,
        producer: ShardProducer,
        sources: tuple[ShardOperation, ...],
        parts: Split | None,
    ) -> ShardOperation:
        """Make the shards of a new operation; raises as :meth:`restore` does.

        Args:
            producer: Makes the shard of each rank.
            sources: Operations whose shards are the first inputs of the producer.
            parts: Returns additional input tensors of each rank, which are copied to the object
                store, given the number of ranks; ``None`` means none.

        Returns:
            The operation, with a number above those of all earlier operations.
        """
        given = [()] * self.num_ranks if parts is None else parts(self.num_ranks)
        stored = [tuple(self._ray.put(Blob(tensor)) for tensor in part) for part in given]
        operation = ShardOperation(
            next(self._numbers),
            producer,
            self._ray.cloudpickle.dumps(producer),
            sources,
            stored,
        )
        self.restore(operation, lambda: None)
        return operation

    def _sweep(self, *needed: ShardOperation) -> None:
        """Free the shards of all operations that are neither wanted nor needed."""
        wanted = {sequence.operation for sequence in self.sequences}
        self._free([*self._held.difference(needed, wanted)])

    def restore(self, operation: ShardOperation, use: Callable[[], _Result]) -> _Result:
        """Make the missing shards of an operation, and first the missing shards of its sources.

        Args:
            operation: Operation of this group; shards that its ranks hold are not made again.
            use: Called when all shards exist, and again if an actor failed in the meantime.

        Returns:
            The result of ``use``.

        Raises:
            CancelledError: The call was cancelled, or the cluster was closed.
            WorkersFailedError: No replacement for a failed actor could be started.
            TaskFailedError: Actors or connections failed ``max_attempts`` times in one operation.
            ValueError: Shards differ in their number of tensors, or a repeated shard in its shapes.
            Exception: A producer raised; a note on the exception names the rank.
        """
        attempts: Counter[ShardOperation] = Counter()
        try:
            while True:
                current = operation
                try:
                    self._mend()
                    todo = self._missing(operation)
                    while todo:
                        (current, ranks), *todo = todo
                        self._compute(current, ranks)
                        self._sweep(
                            operation, *(source for later, _ in todo for source in later.sources)
                        )
                    return use()
                except _BrokenError as error:
                    name, most = current.producer.name, self._pool.retry_policy.max_attempts
                    attempts[current] += 1
                    if attempts[current] == most:
                        message = f"{name} failed {most} times; the last failure: {error}"
                        raise TaskFailedError(message) from error
        except BaseException:
            self._sweep()
            raise

    def finish(self, operation: ShardOperation) -> None:
        """Make the shards and wait until all GPUs have finished; raises as :meth:`restore` does."""
        self.restore(operation, lambda: self._call_settled("settle"))

    def fetch(self, operation: ShardOperation) -> list[tuple[Blob, ...]]:
        """Return the shards as blobs, in rank order; raises as :meth:`restore` does."""
        blobs = self.restore(operation, lambda: self._call_settled("fetch", operation.number))
        return [blobs[rank] for rank in range(self.num_ranks)]

    def rest(self, cancelled: threading.Event) -> None:
        """Wait until every actor is free for other work: none waits for a failed rank.

        Args:
            cancelled: Event that makes the wait end with CancelledError.
        """
        self._cancelled = cancelled
        self._sweep()
        try:
            self._settle()
        except CancelledError:
            raise
        except Exception:
            pass  # lost shards are made again when they are needed; errors are raised there

    def _missing(self, operation: ShardOperation) -> list[tuple[ShardOperation, list[int]]]:
        """Return the operations to execute, in order, each with the ranks that lack its shard."""
        needed = {operation: set(range(self.num_ranks))}
        todo = []
        while needed:
            last = max(needed, key=lambda operation: operation.number)
            wanted = needed.pop(last)
            ranks = [rank for rank in sorted(wanted) if not self._has(rank, last)]
            if ranks:
                todo.append((last, ranks))
                for source in last.sources:
                    on_ranks = range(self.num_ranks) if last.producer.is_collective else ranks
                    needed.setdefault(source, set()).update(on_ranks)
        return todo[::-1]

    def _has(self, rank: int, operation: ShardOperation) -> bool:
        return operation.holders.get(rank) is self._members[rank]

    def _compute(self, operation: ShardOperation, ranks: list[int]) -> None:
        """Make the shards of an operation on some ranks; all of its source shards must exist."""
        producer = operation.producer
        if not producer.is_early:
            self._settle()
        if producer.is_collective and not self._is_formed:
            self._form()
        sources = tuple(source.number for source in operation.sources)

        def arguments(rank: int) -> tuple[Any, ...]:
            place, keep, stored = (rank, self.num_ranks), rank in ranks, operation.stored[rank]
            return operation.number, operation.pickled, place, sources, keep, *stored

        self._held.add(operation)
        for rank in ranks:
            operation.holders[rank] = self._members[rank]
        try:
            on = None if producer.is_collective else ranks
            shapes = self._call("compute", arguments, on, is_collective=producer.is_collective)
            operation.add_shapes({rank: shapes[rank] for rank in ranks})
        except BaseException:
            self._free([operation], ranks)  # they may hold invalid data
            raise
        if producer.is_collective:
            self._unsettled = operation

    def _settle(self) -> None:
        """Wait until all GPUs have finished the last collective operation."""
        if self._unsettled is not None and self._is_formed:
            self._call("settle", is_collective=True)
            self._unsettled = None

    def _call_settled(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method with equal arguments on all ranks when all shards are valid."""
        self._settle()
        return self._call(method, lambda rank: arguments)

    def _form(self) -> None:
        """Initialise a process group of all ranks, under a new generation number."""
        self._generation += 1
        self._call("describe")  # waits for tasks of a cancelled run
        policy = self._pool.retry_policy
        timeouts = policy.start_timeout, 2 * policy.stall_timeout
        address = self._call("bind", lambda rank: timeouts[:1], [0])[0]

        def arguments(rank: int) -> tuple[Any, ...]:
            return self._generation, (rank, self.num_ranks), address, timeouts, self._links

        self._links = self._call("join", arguments, is_collective=True)[0]

    def _mend(self) -> None:
        """Replace failed actors, and free shards that a broken group has made.

        Raises:
            WorkersFailedError: No replacement answered within ``start_timeout``, or
                ``max_attempts`` replacements failed.
        """
        failure: Exception | None = None
        for _ in range(self._pool.retry_policy.max_attempts):
            if all(actor.info for actor in self._members) or isinstance(failure, TimeoutError):
                break
            self._is_formed = False
            failure = self._pool.fill(self._cancelled)
        if vacant := [rank for rank, actor in enumerate(self._members) if actor.info is None]:
            raise WorkersFailedError(
                f"rank {', '.join(map(str, vacant))} has no worker, and none started within "
                f"start_timeout={self._pool.retry_policy.start_timeout:g} s: {failure}"
            ) from failure
        if self._unsettled is not None and not self._is_formed:
            self._free([self._unsettled])
            self._unsettled = None

    def _call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]] = lambda rank: (),
        ranks: Iterable[int] | None = None,
        *,
        is_collective: bool = False,
    ) -> dict[int, Any]:
        """Call a method on ranks, and kill ranks that do not answer in time.

        In a collective call, ranks wait for each other. After any failure, or ``stall_timeout``,
        the process group is aborted and all return values are discarded; only ranks that still do
        not answer are killed.

        Args:
            method: Name of a method of the actor.
            arguments: Returns the arguments of a rank.
            ranks: Ranks to call; ``None`` means all.
            is_collective: Whether the ranks wait for each other.

        Returns:
            The return values by rank.

        Raises:
            _BrokenError: An actor failed, connections between ranks broke, or the timeout passed.
            Exception: The method raised on a rank. Failures of actors have precedence over errors
                of a collective call, which may be consequences.
        """
        timeout = self._pool.retry_policy.stall_timeout
        answers: list[Answer] = []
        with Calls(self._pool, self._cancelled) as calls:
            for rank in range(self.num_ranks) if ranks is None else ranks:
                calls.add(self._members[rank], rank, method, *arguments(rank))
            end = calls.start + timeout
            if is_collective:
                self._is_formed, calls.timeout = False, math.inf
            try:
                while calls and not (is_collective and time.monotonic() > end):
                    answers += calls.collect()
                    if any(answer.failure for answer in answers):
                        end = 0.0
                    elif any(answer.error for answer in answers):
                        end = min(end, time.monotonic() + _GRACE_SECONDS)
            except CancelledError:
                self._is_formed = False
                if not self._pool.closing.is_set():
                    self._abort(calls, time.monotonic() + self._pool.retry_policy.stall_timeout)
                raise
            if is_collective and (calls or any(a.failure or a.error for a in answers)):
                self._abort(calls, calls.start + timeout if method == "compute" else 0.0)
                self._conclude(answers, is_collective=True)
                raise _BrokenError(f"{method} took more than {timeout:g} s")
        self._is_formed |= is_collective
        return self._conclude(answers, is_collective=False)

    def _abort(self, calls: Calls, end: float) -> None:
        """Abort the process group on all actors, and wait for the calls to end.

        Actors that do not answer the abort within ``_ABORT_SECONDS`` are killed. The others may be
        busy with work of their own: they have until ``end``, and at least ``_ABORT_SECONDS``.
        Actors whose call has returned are aborted too, because their GPU may still wait for a peer.
        """
        aborts = {
            actor.handle.abort.options(concurrency_group=CONTROL).remote(self._generation): actor
            for actor in self._members
            if actor.info is not None
        }
        ready, silent = self._ray.wait(
            list(aborts), num_returns=len(aborts), timeout=_ABORT_SECONDS
        )
        for ref in silent:
            calls.fail(aborts[ref], TimeoutError())
        self._pool.abandon(dict.fromkeys(ready))
        calls.cancelled = threading.Event()
        calls.timeout = max(end, time.monotonic() + _ABORT_SECONDS) - calls.start
        while calls:
            list(calls.collect())

    def _conclude(self, answers: list[Answer], *, is_collective: bool) -> dict[int, Any]:
        """Return values by rank; raise an error of the method, or _BrokenError if ranks failed.

        The errors of a collective call may be consequences of the failure of another rank.
        """
        answers.sort(key=lambda answer: (answer.failure is None, answer.keys))
        if not (is_collective and any(answer.failure for answer in answers)):
            for answer in answers:
                error = answer.error
                is_of_connections = type(error) is RuntimeError or isinstance(error, dist.DistError)
                if error is not None and not (is_collective and is_of_connections):
                    with suppress(Exception):  # some exceptions do not accept notes
                        error.add_note(f"raised on rank {answer.keys[0]} of {self.num_ranks}")
                    raise error
        for answer in answers:
            rank = answer.keys[0]
            if answer.failure is not None:
                self._is_formed = False
                raise _BrokenError(f"rank {rank} failed or hung") from answer.failure
            if answer.error is not None:
                raise _BrokenError(f"rank {rank}: {answer.error}") from answer.error
        return {answer.keys[0]: answer.value for answer in answers}

    def _free(self, operations: list[ShardOperation], ranks: Iterable[int] | None = None) -> None:
        """Free the shards of some operations on some ranks; ``None`` means all ranks."""
        for rank in range(len(self._members)) if ranks is None else ranks:
            held = [operation.number for operation in operations if self._has(rank, operation)]
            if held and self._members[rank].handle is not None:
                self._pool.abandon({self._members[rank].handle.free.remote(held): None})
            for operation in operations:
                operation.holders.pop(rank, None)
        if ranks is None:
            self._held.difference_update(operations)
