"""The actors of a cluster as ranks: shards, process groups and re-execution of lost shards."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.dispatcher import Dispatcher
from cqs.executors.ray.failures import Answer, Calls, RetryPolicy, WorkersFailedError
from cqs.executors.ray.pool import CONTROL, Actor, ActorPool
from cqs.executors.ray.shards.actor import Shapes
from cqs.executors.ray.shards.operation import ShardOperation
from cqs.executors.ray.shards.producer import LoadShard, ShardProducer

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

    The methods run in the dispatcher thread of the cluster, except :meth:`call` and :meth:`forget`.
    No failure leaves an actor in the middle of a call. Each actor has answered, or it is removed
    and replaced before the next call. Cancelled calls are aborted before the next call.
    """

    def __init__(self, dispatcher: Dispatcher, retry_policy: RetryPolicy):
        """Assign ranks to the actors of the pool; actors of one node get adjacent ranks.

        Args:
            dispatcher: Thread that talks to the actors.
            retry_policy: Timeouts and the number of attempts per operation.
        """
        self._dispatcher, self._retry_policy = dispatcher, retry_policy
        self._pool, self._ray = dispatcher.pool, dispatcher.pool.ray
        pool = self._pool
        actors = [(actor.info.node, actor.index) for actor in pool.actors.values() if actor.info]
        self._members: list[Actor] = [pool.actors[index] for _, index in sorted(actors)]
        self._numbers = itertools.count()
        self._generation = 0
        self._is_formed = False
        self._unsettled: ShardOperation | None = None
        """The last collective operation; its shards are lost if a rank fails before it is done."""
        self._cancelled = threading.Event()
        self._interrupted: _RankCalls | None = None
        """Cancelled calls that actors may still execute."""
        self._forgotten: deque[ShardOperation] = deque()

    @property
    def num_ranks(self) -> int:
        """Number of ranks, equal to the number of shards of every sequence."""
        return len(self._members)

    def call(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Execute ``work(*arguments)`` in the dispatcher thread, and wait for its result.

        The shards of forgotten operations are freed first. If an exception interrupts the wait, the
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
        stored = tuple(tuple(self._ray.put(Blob(tensor)) for tensor in part) for part in parts)
        return ShardOperation(
            next(self._numbers),
            producer.name,
            self._pickle(producer),
            producer.is_collective,
            producer.is_early,
            self.num_ranks,
            sources,
            stored,
        )

    def forget(self, operation: ShardOperation) -> None:
        """Mark shards to be freed; safe to call during garbage collection."""
        self._forgotten.append(operation)

    def _sweep(self) -> None:
        operations = []
        while self._forgotten:
            operations.append(self._forgotten.popleft())
            operations[-1].is_wanted = False
        self._free(operations)

    def make(self, operation: ShardOperation) -> None:
        """Make the missing shards of an operation, and first the missing shards of its sources.

        Args:
            operation: Operation of this group; shards that its ranks hold are not made again.

        Raises:
            CancelledError: The call was cancelled, or the cluster was closed.
            WorkersFailedError: No replacement for a failed actor could be started.
            TaskFailedError: Actors or connections failed ``max_attempts`` times in one operation.
            ValueError: Shards differ in their number of tensors, or a repeated shard in its shapes.
            Exception: A producer raised; a note on the exception names the rank.
        """
        made: set[ShardOperation] = set()
        attempts: Counter[ShardOperation] = Counter()
        try:
            self._mend()
            while todo := self._missing(operation):
                (first, ranks), *rest = todo
                made.add(first)
                try:
                    self._compute(first, ranks)
                except _BrokenError as error:
                    self._count(attempts, error.operation or first, error)
                    self._mend()
                    continue
                in_use = {operation, *(source for later, _ in rest for source in later.sources)}
                self._free(found for found in made - in_use if not found.is_wanted)
        except BaseException:
            self._free(found for found in made if not found.is_wanted)
            raise

    def finish(self, operation: ShardOperation) -> None:
        """Make the shards and wait until all GPUs have finished; raises as :meth:`make` does."""

        def settle_all() -> None:
            self._settle()
            self._call_all("settle")

        self._make_for(operation, settle_all)

    def fetch(self, operation: ShardOperation) -> list[tuple[Blob, ...]]:
        """Return the shards as blobs, in rank order; raises as :meth:`make` does."""

        def fetch_all() -> dict[int, Any]:
            self._settle()
            return self._call_all("fetch", operation.number)

        found = self._make_for(operation, fetch_all)
        return [found[rank] for rank in range(self.num_ranks)]

    def replicate(self, operation: ShardOperation) -> None:
        """Copy the shards into the object store, and restore lost shards from there.

        The operation no longer refers to its sources. Raises as :meth:`make` does.
        """
        shards = self.fetch(operation)
        operation.stored = tuple(tuple(map(self._ray.put, shard)) for shard in shards)
        operation.producer = self._pickle(LoadShard())
        operation.is_collective = operation.is_early = False
        operation.sources = ()

    def rest(self, cancelled: threading.Event) -> None:
        """Wait until every actor is free for other work: none waits for a failed rank.

        Args:
            cancelled: Event that makes the wait end with CancelledError.
        """
        self._cancelled = cancelled
        self._sweep()
        self._end_interrupted()
        try:
            self._settle()
        except CancelledError:
            raise
        except Exception:
            pass  # lost shards are made again when they are needed; errors are raised there

    def _make_for(self, operation: ShardOperation, use: Callable[[], _Found]) -> _Found:
        """Make the shards and call ``use``; repeat both if an actor fails in the meantime."""
        attempts: Counter[ShardOperation] = Counter()
        while True:
            self.make(operation)
            try:
                return use()
            except _BrokenError as error:
                self._count(attempts, error.operation or operation, error)

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
            ranks = sorted(rank for rank in wanted if not self._has(rank, last))
            if ranks:
                todo.append((last, ranks))
                for source in last.sources:
                    on_ranks = range(self.num_ranks) if last.is_collective else ranks
                    needed.setdefault(source, set()).update(on_ranks)
        return todo[::-1]

    def _has(self, rank: int, operation: ShardOperation) -> bool:
        return operation.holders[rank] == self._members[rank].index

    def _compute(self, operation: ShardOperation, ranks: Collection[int]) -> None:
        """Make the shards of an operation on some ranks; all of its source shards must exist."""
        if not operation.is_early:
            self._settle()
        if operation.is_collective and not self._is_formed:
            self._form()
        sources = tuple(source.number for source in operation.sources)

        def arguments(rank: int) -> tuple[Any, ...]:
            place, keep = (rank, self.num_ranks), rank in ranks
            stored = operation.stored[rank] if operation.stored else ()
            return operation.number, operation.producer, place, sources, keep, *stored

        try:
            if operation.is_collective:
                found = self._call_together("compute", arguments, self._retry_policy.stall_timeout)
            else:
                found = self._call("compute", arguments, ranks, self._retry_policy.stall_timeout)
            _check_shapes(operation, {rank: found[rank] for rank in ranks})
        except BaseException:
            for rank in ranks:  # shards of a failed operation may hold invalid data
                self._free_on(rank, [operation.number])
            raise
        for rank in ranks:
            operation.holders[rank] = self._members[rank].index
            operation.shapes[rank] = found[rank]
        if operation.is_collective:
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

    def _mend(self) -> None:
        """Replace failed actors, and free shards that a broken group has made."""
        self._end_interrupted()
        self._take_places()
        if self._unsettled is not None and not self._is_formed:
            self._free([self._unsettled])
            self._unsettled = None

    def _form(self) -> None:
        """Initialise a process group of all ranks, under a new generation number."""
        self._generation += 1
        self._call_all("describe")  # waits for tasks of a cancelled run
        timeout = self._retry_policy.start_timeout
        call_timeout = 2 * self._retry_policy.stall_timeout
        address = self._call("bind", lambda rank: (timeout,), [0], timeout)[0]

        def arguments(rank: int) -> tuple[Any, ...]:
            return self._generation, rank, self.num_ranks, address, timeout, call_timeout

        self._call_together("join", arguments, timeout)

    def _take_places(self) -> None:
        """Replace the actors of failed ranks, and wait until the replacements answer.

        Raises:
            WorkersFailedError: No replacement answered within ``start_timeout``, or
                ``max_attempts`` replacements failed.
        """
        deadline = time.monotonic() + self._retry_policy.start_timeout
        vacant: list[int] = []
        failure: BaseException | None = None
        for _ in range(self._retry_policy.max_attempts):
            vacant = [rank for rank, actor in enumerate(self._members) if not self._is_known(actor)]
            spare = [actor for actor in self._pool.actors.values() if actor not in self._members]
            for rank in vacant:
                self._members[rank] = spare.pop() if spare else self._pool.start(1)[0]
                self._is_formed = False
            fresh = [rank for rank, actor in enumerate(self._members) if actor.info is None]
            if not fresh:
                return
            try:
                infos = self._call("describe", lambda rank: (), fresh, deadline - time.monotonic())
            except _BrokenError as error:
                failure = error.__cause__
            else:
                for rank, info in infos.items():
                    self._members[rank].info = info
                return
            if time.monotonic() >= deadline:
                break
        raise WorkersFailedError(
            f"rank {', '.join(map(str, vacant))} failed, and no replacement started within "
            f"start_timeout={self._retry_policy.start_timeout:g} s: {failure}"
        ) from failure

    def _is_known(self, actor: Actor) -> bool:
        return actor.index in self._pool.actors

    def _call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method with equal arguments on all ranks, independently; see :meth:`_call`."""
        ranks = range(self.num_ranks)
        return self._call(method, lambda rank: arguments, ranks, self._retry_policy.stall_timeout)

    def _call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        ranks: Iterable[int],
        timeout: float,
    ) -> dict[int, Any]:
        """Call a method on ranks that do not wait for each other.

        Args:
            method: Name of a method of the actor.
            arguments: Returns the arguments of a rank.
            ranks: Ranks to call.
            timeout: Seconds after which ranks that have not answered are killed.

        Returns:
            The return values by rank.

        Raises:
            _BrokenError: An actor failed, or did not answer within ``timeout``.
            Exception: The method raised on a rank, and no actor failed before that.
        """
        calls = self._begin_calls(method, arguments, ranks)
        self._wait(calls, time.monotonic() + timeout)
        has_failed = bool(calls.failures)
        self._remove_hung(calls)
        if not has_failed:
            self._raise_first(calls.errors)
        return self._conclude(calls)

    def _call_together(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], timeout: float
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
        calls = self._begin_calls(method, arguments, range(self.num_ranks))
        self._is_formed = False
        end = time.monotonic() + timeout
        self._wait(calls, end, until_failure=True)
        if calls.errors and not calls.failures:
            self._wait(calls, time.monotonic() + _GRACE_SECONDS)
        # Errors after this point are caused by the abort.
        errors, has_failed = dict(calls.errors), bool(calls.failures)
        if not calls and not errors and not has_failed:
            self._is_formed = True
            return calls.found
        self._abort(calls, end if method == "compute" else time.monotonic())
        if has_failed:
            self._conclude(calls)
        self._raise_first({rank: e for rank, e in errors.items() if not _is_of_connections(e)})
        for rank, error in sorted(errors.items()):
            raise _BrokenError(f"rank {rank}: {error}") from error
        raise _BrokenError(f"{method} took more than {timeout:g} s")

    def _begin_calls(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], ranks: Iterable[int]
    ) -> "_RankCalls":
        calls = _RankCalls(self._pool, lambda: self._cancelled.is_set(), self._dispatcher.closing)
        for rank in ranks:
            actor = self._members[rank]
            calls.add(actor, rank, getattr(actor.handle, method).remote(*arguments(rank)))
        return calls

    def _wait(self, calls: "_RankCalls", end: float, *, until_failure: bool = False) -> None:
        """Collect answers until all have arrived, ``end`` has passed, or the first failure.

        Args:
            calls: Pending calls; answers, errors and failures are recorded here.
            end: Deadline on the clock of ``time.monotonic``, in seconds.
            until_failure: Return after the first error or failed actor.

        Raises:
            CancelledError: The call was cancelled, or the cluster closed.
        """
        while calls and not (until_failure and (calls.errors or calls.failures)):
            if (left := end - time.monotonic()) <= 0:
                return
            try:
                for answer in calls.collect(left):
                    self._record(calls, answer)
            except CancelledError:
                self._is_formed = False
                if self._dispatcher.closing.is_set():
                    calls.abandon()
                else:
                    self._interrupted = calls
                raise

    def _record(self, calls: "_RankCalls", answer: Answer) -> None:
        (rank,) = answer.keys
        if answer.failure is not None:
            calls.failures[rank] = answer.failure
            self._is_formed = False  # _take_places replaces the actor
        elif answer.error is not None:
            calls.errors[rank] = answer.error
        else:
            calls.found[rank] = answer.value

    def _end_interrupted(self) -> None:
        """Abort calls that a cancelled request has left on the actors."""
        if self._interrupted is not None:
            calls, self._interrupted = self._interrupted, None
            self._abort(calls, time.monotonic() + self._retry_policy.stall_timeout)

    def _abort(self, calls: "_RankCalls", end: float) -> None:
        """Abort the process group on all actors, and wait for the calls to end.

        Actors that do not answer the abort within ``_ABORT_SECONDS`` are killed. The others may be
        busy with work of their own: they have until ``end``, and at least ``_ABORT_SECONDS``.
        Actors whose call has returned are aborted too, because their GPU may still wait for a peer.
        """
        answers = {
            actor.handle.abort.options(concurrency_group=CONTROL).remote(self._generation): rank
            for rank, actor in enumerate(self._members)
            if self._is_known(actor) and actor.info is not None
        }
        ready, silent = self._ray.wait(
            list(answers), num_returns=len(answers), timeout=_ABORT_SECONDS
        )
        for rank in (answers[ref] for ref in silent):
            self._pool.remove(self._members[rank], is_hung=True)
            self._is_formed = False
        self._pool.abandon(ready)
        self._wait(calls, max(end, time.monotonic() + _ABORT_SECONDS))
        self._remove_hung(calls)

    def _remove_hung(self, calls: "_RankCalls") -> None:
        for actor in calls.actors:
            failure = TimeoutError(f"rank {self._members.index(actor)} did not answer in time")
            self._record(calls, calls.fail(actor, failure, is_hung=True))

    def _conclude(self, calls: "_RankCalls") -> dict[int, Any]:
        """Return the results by rank; raise _BrokenError if an actor failed."""
        if calls.failures:
            rank, failure = min(calls.failures.items())
            raise _BrokenError(f"rank {rank} failed or hung") from failure
        return calls.found

    def _raise_first(self, errors: dict[int, Exception]) -> None:
        """Raise the error of the lowest rank that has one, with a note that names the rank."""
        for rank, error in sorted(errors.items()):
            with suppress(Exception):  # some exceptions do not accept notes
                error.add_note(f"raised on rank {rank} of {self.num_ranks}")
            raise error

    def _count(
        self, attempts: "Counter[ShardOperation]", operation: ShardOperation, error: _BrokenError
    ) -> None:
        """Count a failure of actors or connections against an operation.

        Raises:
            TaskFailedError: The operation has failed ``max_attempts`` times.
        """
        self._retry_policy.count(
            attempts,
            operation,
            lambda number: f"{operation.name} failed {number} times; the last failure: {error}",
            error,
        )

    def _free(self, operations: Iterable[ShardOperation]) -> None:
        """Free the shards of some operations on all ranks."""
        operations = list(operations)
        for rank in range(self.num_ranks):
            self._free_on(
                rank, [operation.number for operation in operations if self._has(rank, operation)]
            )
        for operation in operations:
            operation.holders = [None] * self.num_ranks

    def _free_on(self, rank: int, numbers: list[int]) -> None:
        actor = self._members[rank]
        if numbers and self._is_known(actor):
            self._pool.abandon([actor.handle.free.remote(numbers)])


class _RankCalls(Calls):
    """Calls of one method on several ranks, with the rank as key."""

    def __init__(self, pool: ActorPool, is_cancelled: Callable[[], bool], closing: threading.Event):
        """Start without calls and answers."""
        super().__init__(pool, is_cancelled, closing)
        self.found: dict[int, Any] = {}
        """Return values by rank."""
        self.errors: dict[int, Exception] = {}
        """Exceptions that the method raised, by rank."""
        self.failures: dict[int, Exception] = {}
        """Failures of actors, by rank."""


def _is_of_connections(error: Exception) -> bool:
    """Return whether an error may be a consequence of the failure of another rank."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _check_shapes(operation: ShardOperation, found: dict[int, Shapes]) -> None:
    """Raise ValueError if ranks differ in the number of tensors, or a repeated shard in shape."""
    for rank, shapes in found.items():
        before = operation.shapes.get(rank, shapes)
        if shapes != before:
            raise ValueError(
                f"{operation.name} must repeat the shapes of rank {rank}'s shard, {before}, "
                f"got {shapes} when it made the lost shard again"
            )
        if len(shapes) != (number := len((found | operation.shapes)[0])):
            raise ValueError(
                f"{operation.name} must make the same number of tensors on every rank, "
                f"got {len(shapes)} on rank {rank} and {number} on rank 0"
            )
