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

import torch.distributed as dist
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.pool import (
    CONTROL,
    Actor,
    Answer,
    Calls,
    TaskFailedError,
    WorkersFailedError,
)
from cqs.executors.ray.shards.operation import Shapes, ShardOperation, ShardProducer, load_shard

_Found = TypeVar("_Found")

_INLINE_BYTES = 2**16
"""Producers up to this size are sent with the call; larger ones through the object store."""
_GRACE_SECONDS = 1.0
"""Seconds in which the other ranks of a group report errors after the first error."""
_ABORT_SECONDS = 5.0
"""Seconds in which an actor must answer an abort; otherwise it counts as hung and is killed."""


class _BrokenError(Exception):
    """A call must be repeated: an actor failed or hung, or connections between ranks broke."""

    operation: ShardOperation | None = None
    """The operation whose shards were lost, if it is not the requested one."""


class WorkerGroup:
    """Maps ranks 0 to n - 1 to actors, and makes the shards of sequences on them.

    The methods run in the dispatcher thread of the cluster, except :meth:`call`.
    No failure leaves an actor in the middle of a call. Each actor has answered, or it is removed
    and replaced before the next call. Cancelled calls are aborted.
    """

    def __init__(self, dispatcher: Dispatcher):
        """Assign ranks to the actors of the pool; actors of one node get adjacent ranks.

        Args:
            dispatcher: Thread that talks to the actors.
        """
        self._dispatcher, self._pool = dispatcher, dispatcher.pool
        self._ray, self._retry_policy = self._pool.ray, self._pool.retry_policy
        actors = self._pool.actors
        places = sorted((actor.info.node, actor.index) for actor in actors.values() if actor.info)
        self._members: list[Actor] = [actors[index] for _, index in places]
        self._numbers = itertools.count()
        self._generation = 0
        self._is_formed = False
        self._unsettled: ShardOperation | None = None
        """The last collective operation; its shards are lost if a rank fails before it is done."""
        self._cancelled = threading.Event()
        self._held: set[ShardOperation] = set()
        """Operations of which actors may hold shards."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, equal to the number of shards of every sequence."""
        return len(self._members)

    def call(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Execute ``work(*arguments)`` in the dispatcher thread, and wait for its result.

        Shards to which nothing refers are freed first. If an exception interrupts the wait, the
        work is cancelled.
        """
        cancelled = threading.Event()

        def sweep_and_work() -> _Found:
            self._cancelled = cancelled
            self._sweep()
            return work(*arguments)

        return self._dispatcher.wait_for(sweep_and_work, cancelled)

    def begin(
        self,
        producer: ShardProducer,
        sources: tuple[ShardOperation, ...] = (),
        parts: tuple[tuple[Tensor, ...], ...] = (),
    ) -> ShardOperation:
        """Define an operation, which :meth:`make` will execute.

        Args:
            producer: Makes the shard of each rank.
            sources: Operations whose shards are the first inputs of the producer.
            parts: For each rank, additional input tensors, which are copied to the object store.

        Returns:
            The operation, with a number above those of all earlier operations.
        """
        stored = [tuple(self._ray.put(Blob(tensor)) for tensor in part) for part in parts]
        return ShardOperation(
            next(self._numbers),
            producer,
            self._pickle(producer),
            sources,
            stored or [()] * self.num_ranks,
            holders=[None] * self.num_ranks,
        )

    def _sweep(self, *needed: ShardOperation) -> None:
        """Free the shards of all operations that are neither wanted nor needed."""
        self._free([each for each in self._held.difference(needed) if not each.is_wanted])

    def make(self, operation: ShardOperation, use: Callable[[], _Found] = lambda: None) -> _Found:
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
        most = self._retry_policy.max_attempts
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
                            operation, *(each for later, _ in todo for each in later.sources)
                        )
                    return use()
                except _BrokenError as error:
                    failed = error.operation or current
                    attempts[failed] += 1
                    if attempts[failed] == most:
                        raise TaskFailedError(
                            f"{failed.producer.name} failed {most} times; the last failure: {error}"
                        ) from error
        except BaseException:
            self._sweep()
            raise

    def finish(self, operation: ShardOperation) -> None:
        """Make the shards and wait until all GPUs have finished; raises as :meth:`make` does."""
        self.make(operation, lambda: self._call_settled("settle"))

    def fetch(self, operation: ShardOperation) -> list[tuple[Blob, ...]]:
        """Return the shards as blobs, in rank order; raises as :meth:`make` does."""
        found = self.make(operation, lambda: self._call_settled("fetch", operation.number))
        return [found[rank] for rank in range(self.num_ranks)]

    def replicate(self, operation: ShardOperation) -> None:
        """Copy the shards into the object store, and restore lost shards from there.

        The operation no longer refers to its sources. Raises as :meth:`make` does.
        """
        shards = self.fetch(operation)
        operation.stored = [tuple(map(self._ray.put, shard)) for shard in shards]
        operation.producer = ShardProducer("shard", load_shard)
        operation.pickled = self._pickle(operation.producer)
        operation.sources = ()

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

    def _pickle(self, producer: ShardProducer) -> Any:
        """Pickle a producer; a small one is sent with the call, which is faster than the store."""
        pickled = self._ray.cloudpickle.dumps(producer)
        return pickled if len(pickled) <= _INLINE_BYTES else self._ray.put(pickled)

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
        return operation.holders[rank] == self._members[rank].index

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
            operation.holders[rank] = self._members[rank].index
        try:
            if producer.is_collective:
                found = self._call_together("compute", arguments, self._retry_policy.stall_timeout)
            else:
                found = self._call("compute", arguments, ranks)
            _check_shapes(operation, {rank: found[rank] for rank in ranks})
        except BaseException:
            self._free([operation], ranks)  # they may hold invalid data
            raise
        operation.shapes.update((rank, found[rank]) for rank in ranks)
        if producer.is_collective:
            self._unsettled = operation

    def _settle(self) -> None:
        """Wait until all GPUs have finished the last collective operation."""
        if self._unsettled is not None and self._is_formed:
            try:
                self._call_together("settle", lambda rank: (), self._retry_policy.stall_timeout)
            except _BrokenError as error:
                error.operation = self._unsettled
                raise
            self._unsettled = None

    def _call_settled(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method with equal arguments on all ranks when all shards are valid."""
        self._settle()
        return self._call(method, lambda rank: arguments, range(self.num_ranks))

    def _form(self) -> None:
        """Initialise a process group of all ranks, under a new generation number."""
        self._generation += 1
        # Waits for tasks of a cancelled run.
        self._call("describe", lambda rank: (), range(self.num_ranks))
        timeout = self._retry_policy.start_timeout
        call_timeout = 2 * self._retry_policy.stall_timeout
        address = self._call("bind", lambda rank: (timeout,), [0])[0]

        def arguments(rank: int) -> tuple[Any, ...]:
            return self._generation, rank, self.num_ranks, address, timeout, call_timeout

        self._call_together("join", arguments, timeout)

    def _mend(self) -> None:
        """Replace failed actors, and free shards that a broken group has made.

        Raises:
            WorkersFailedError: No replacement answered within ``start_timeout``, or
                ``max_attempts`` replacements failed.
        """
        failure: Exception | None = None
        for _ in range(self._retry_policy.max_attempts):
            if all(map(self._is_started, self._members)) or isinstance(failure, TimeoutError):
                break
            self._is_formed = False
            failure = self._take_places()
        if vacant := [rank for rank, a in enumerate(self._members) if not self._is_started(a)]:
            raise WorkersFailedError(
                f"rank {', '.join(map(str, vacant))} failed, and no replacement started within "
                f"start_timeout={self._retry_policy.start_timeout:g} s: {failure}"
            ) from failure
        if self._unsettled is not None and not self._is_formed:
            self._free([self._unsettled])
            self._unsettled = None

    def _take_places(self) -> Exception | None:
        """Replace failed actors, and wait for the replacements; return a failure of one of them."""
        failure: Exception | None = None
        with Calls(self._pool, self._cancelled) as calls:
            calls.refill()
            spare = [each for each in self._pool.actors.values() if each not in self._members]
            for rank, actor in enumerate(self._members):
                if actor.index not in self._pool.actors:
                    self._members[rank] = spare.pop(0)
            while calls:
                for answer in calls.collect():
                    failure = answer.failure or failure
        return failure

    def _is_started(self, actor: Actor) -> bool:
        return actor.index in self._pool.actors and actor.info is not None

    def _begin_calls(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], ranks: Iterable[int]
    ) -> Calls:
        calls = Calls(self._pool, self._cancelled)
        for rank in ranks:
            calls.add(self._members[rank], rank, method, *arguments(rank))
        return calls

    def _call(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], ranks: Iterable[int]
    ) -> dict[int, Any]:
        """Call a method on ranks that do not wait for each other.

        Args:
            method: Name of a method of the actor.
            arguments: Returns the arguments of a rank.
            ranks: Ranks to call. Those that do not answer within ``stall_timeout`` are killed.

        Returns:
            The return values by rank.

        Raises:
            _BrokenError: An actor failed or hung, and the method raised on no other.
            Exception: The method raised on a rank.
        """
        answers: list[Answer] = []
        with self._begin_calls(method, arguments, ranks) as calls:
            while calls:
                answers += self._collect(calls)
        self._raise_first({answer.keys[0]: answer.error for answer in answers})
        return _values(answers)

    def _call_together(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout: float,
    ) -> dict[int, Any]:
        """Call a method on all ranks, which wait for each other.

        After any failure the process group is aborted, and all return values are discarded.

        Args:
            method: Name of a method of the actor.
            arguments: Returns the arguments of a rank.
            timeout: Seconds for the whole call.

        Returns:
            The return values by rank.

        Raises:
            _BrokenError: An actor failed, connections between ranks broke, or ``timeout`` passed.
            Exception: The method raised on a rank, and no actor failed before that.
        """
        self._is_formed = False
        answers: list[Answer] = []
        with self._begin_calls(method, arguments, range(self.num_ranks)) as calls:
            calls.timeout = math.inf  # no rank is to blame that waits for another
            end = calls.start + timeout
            while calls and time.monotonic() < end and not any(each.failure for each in answers):
                answers += self._collect(calls)
                if any(answer.error for answer in answers):
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
            if calls or any(answer.failure or answer.error for answer in answers):
                self._abort(calls, calls.start + timeout if method == "compute" else 0.0)
                if not any(answer.failure for answer in answers):
                    self._raise_first(
                        {a.keys[0]: a.error for a in answers if not _is_of_connections(a.error)}
                    )
                _values(answers)
                raise _BrokenError(f"{method} took more than {timeout:g} s")
        self._is_formed = True
        return _values(answers)

    def _collect(self, calls: Calls) -> list[Answer]:
        """Return the answers that have arrived; abort calls that are cancelled."""
        try:
            return list(calls.collect())
        except CancelledError:
            self._is_formed = False
            if not self._pool.closing.is_set():
                self._abort(calls, time.monotonic() + self._retry_policy.stall_timeout)
            raise

    def _abort(self, calls: Calls, end: float) -> None:
        """Abort the process group on all actors, and wait for the calls to end.

        Actors that do not answer the abort within ``_ABORT_SECONDS`` are killed. The others may be
        busy with work of their own: they have until ``end``, and at least ``_ABORT_SECONDS``.
        Actors whose call has returned are aborted too, because their GPU may still wait for a peer.
        """
        aborts = {
            actor.handle.abort.options(concurrency_group=CONTROL).remote(self._generation): actor
            for actor in filter(self._is_started, self._members)
        }
        ready, silent = self._ray.wait(
            list(aborts), num_returns=len(aborts), timeout=_ABORT_SECONDS
        )
        for ref in silent:
            calls.fail(aborts[ref], TimeoutError())
        self._pool.abandon(ready)
        calls.cancelled = threading.Event()
        calls.timeout = max(end, time.monotonic() + _ABORT_SECONDS) - calls.start
        while calls:
            list(calls.collect())

    def _raise_first(self, errors: dict[int, Exception | None]) -> None:
        """Raise the error of the lowest rank that has one, with a note that names the rank."""
        for rank, error in sorted(errors.items()):
            if error is not None:
                with suppress(Exception):  # some exceptions do not accept notes
                    error.add_note(f"raised on rank {rank} of {self.num_ranks}")
                raise error

    def _free(self, operations: list[ShardOperation], ranks: Iterable[int] | None = None) -> None:
        """Free the shards of some operations on some ranks; ``None`` means all ranks."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            held = [each.number for each in operations if self._has(rank, each)]
            if held and self._members[rank].index in self._pool.actors:
                self._pool.abandon([self._members[rank].handle.free.remote(held)])
            for operation in operations:
                operation.holders[rank] = None
        if ranks is None:
            self._held.difference_update(operations)


def _values(answers: list[Answer]) -> dict[int, Any]:
    """Return the values by rank; raise _BrokenError if an actor failed or a method raised."""
    for answer in sorted(answers, key=lambda answer: (answer.failure is None, answer.keys[0])):
        if answer.failure is not None:
            raise _BrokenError(f"rank {answer.keys[0]} failed or hung") from answer.failure
        if answer.error is not None:
            raise _BrokenError(f"rank {answer.keys[0]}: {answer.error}") from answer.error
    return {answer.keys[0]: answer.value for answer in answers}


def _is_of_connections(error: Exception | None) -> bool:
    """Return whether an error may be a consequence of the failure of another rank."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _check_shapes(operation: ShardOperation, found: dict[int, Shapes]) -> None:
    """Raise ValueError if ranks differ in the number of tensors, or a repeated shard in shape."""
    name = operation.producer.name
    for rank, shapes in found.items():
        before = operation.shapes.get(rank, shapes)
        if shapes != before:
            raise ValueError(
                f"{name} must repeat the shapes of rank {rank}'s shard, {before}, "
                f"got {shapes} when it made the lost shard again"
            )
        if len(shapes) != (number := len((found | operation.shapes)[0])):
            raise ValueError(
                f"{name} must make the same number of tensors on every rank, "
                f"got {len(shapes)} on rank {rank} and {number} on rank 0"
            )
