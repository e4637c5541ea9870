"""The actors of a cluster as the ranks of a group: what they hold, and making it again."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.member import Shapes
from cqs.executors.ray.pool import CONTROL, Actor, ActorPool, actor_failures
from cqs.executors.ray.run import RetryPolicy, TaskFailedError, WorkersFailedError
from cqs.executors.ray.shard_producer import LoadShard, ShardProducer
from cqs.executors.ray.sharded import Step

_Found = TypeVar("_Found")

_POLL_SECONDS = 0.1
_INLINE_BYTES = 2**16
_GRACE_SECONDS = 1.0
"""In which the ranks of a group are expected to fail after one has."""
_ABORT_SECONDS = 5.0
"""In which an actor that is not hung answers an abort."""


class _BrokenError(Exception):
    """A call must be made again: an actor died or hung, or the group broke."""

    step: Step | None = None
    """What was being made, if not what was asked for."""


class Group:
    """Ranks 0 to n - 1 and the actors that take their places.

    Used by one thread at a time, the dispatcher of the cluster, except :meth:`forget`. Whatever
    fails, no actor is left in the middle of a call: each has answered, or is dead and its place
    will be taken by another. Calls that are cancelled are ended before the next.
    """

    def __init__(self, pool: ActorPool, retry_policy: RetryPolicy, closing: threading.Event):
        """Give the actors of the pool their ranks, those of a node side by side."""
        self._pool, self._ray = pool, pool.ray
        self._retry_policy, self._closing = retry_policy, closing
        actors = [(actor.info.node, actor.index) for actor in pool.actors.values() if actor.info]
        self._members: list[Actor] = [pool.actors[index] for _, index in sorted(actors)]
        self._numbers = itertools.count()
        self._generation = 0
        self._is_formed = False
        self._unsettled: Step | None = None
        """What ranks have made together, unless one dies before its GPU is done with it."""
        self._cancelled = threading.Event()
        self._interrupted: _Calls | None = None
        """Calls that were cancelled: actors may be in the middle of them."""
        self._forgotten: deque[Step] = deque()

    @property
    def num_ranks(self) -> int:
        """Number of shards of every sequence."""
        return len(self._members)

    def begin(
        self,
        producer: ShardProducer,
        sources: tuple[Step, ...] = (),
        parts: tuple[tuple[Tensor, ...], ...] = (),
    ) -> Step:
        """Number a step that :meth:`make` will carry out; see :class:`Step`.

        Args:
            producer: How its shards are made.
            sources: Steps whose shards the producer is given.
            parts: For each rank, tensors that it is given after them.
        """
        stored = tuple(tuple(self._ray.put(Blob(tensor)) for tensor in part) for part in parts)
        return Step(
            next(self._numbers),
            producer.name,
            self._pickle(producer),
            producer.is_collective,
            producer.is_early,
            self.num_ranks,
            sources,
            stored,
        )

    def forget(self, step: Step) -> None:
        """Note that the shards of a step are needed no more; safe in garbage collection."""
        self._forgotten.append(step)

    def sweep(self) -> None:
        """Free what was forgotten."""
        steps = []
        while self._forgotten:
            steps.append(self._forgotten.popleft())
            steps[-1].is_wanted = False
        self._free(steps)

    def make(self, step: Step, cancelled: threading.Event) -> None:
        """Make those shards of a step that no actor has, and what they are made from.

        Raises:
            CancelledError: if ``cancelled`` is set meanwhile, or the cluster is closed.
            WorkersFailedError: if no actor can be started in the place of a dead one.
            TaskFailedError: if a step fails ``max_attempts`` times because of deaths.
            Exception: what a producer raises, with a note of the rank.
        """
        self._cancelled = cancelled
        made: set[Step] = set()
        attempts: Counter[Step] = Counter()
        try:
            self._mend()
            while todo := self._missing(step):
                (first, ranks), *rest = todo
                made.add(first)
                try:
                    self._compute(first, ranks)
                except _BrokenError as error:
                    self._count(attempts, error.step or first, error)
                    self._mend()
                    continue
                in_use = {step, *(source for later, _ in rest for source in later.sources)}
                self._free(found for found in made - in_use if not found.is_wanted)
        except BaseException:
            self._free(found for found in made if not found.is_wanted)
            raise

    def finish(self, step: Step, cancelled: threading.Event) -> None:
        """Make a step, and wait until all GPUs are done; raises as :meth:`make` does."""

        def settle_all() -> None:
            self._settle()
            self._call_all("settle")

        self._make_for(step, cancelled, settle_all)

    def fetch(self, step: Step, cancelled: threading.Event) -> list[tuple[Blob, ...]]:
        """Return the shards of a step by rank; raises as :meth:`make` does."""

        def fetch_all() -> dict[int, Any]:
            self._settle()
            return self._call_all("fetch", step.number)

        found = self._make_for(step, cancelled, fetch_all)
        return [found[rank] for rank in range(self.num_ranks)]

    def replicate(self, step: Step, cancelled: threading.Event) -> None:
        """Put the shards of a step into the object store, and make them from there henceforth."""
        shards = self.fetch(step, cancelled)
        step.stored = tuple(tuple(map(self._ray.put, shard)) for shard in shards)
        step.producer, step.is_collective, step.sources = self._pickle(LoadShard()), False, ()
        step.is_early = False

    def rest(self, cancelled: threading.Event) -> None:
        """Wait until actors can be given other work: none waits for one that has died."""
        self._cancelled = cancelled
        self._end_interrupted()
        try:
            self._settle()
        except CancelledError:
            raise
        except Exception:
            pass  # what is lost is made again when it is needed, and may fail then

    def _make_for(
        self, step: Step, cancelled: threading.Event, use: Callable[[], _Found]
    ) -> _Found:
        """Make a step and return what is found with it, if none dies meanwhile."""
        attempts: Counter[Step] = Counter()
        while True:
            self.make(step, cancelled)
            try:
                return use()
            except _BrokenError as error:
                self._count(attempts, error.step or step, error)

    def _pickle(self, producer: ShardProducer) -> Any:
        """Pickle a producer; what is small travels with the call, which takes less time."""
        pickled = self._ray.cloudpickle.dumps(producer)
        return pickled if len(pickled) <= _INLINE_BYTES else self._ray.put(pickled)

    def _missing(self, step: Step) -> list[tuple[Step, list[int]]]:
        """List what must be made for a step, in order, and on which ranks."""
        needed = {step: set(range(self.num_ranks))}
        todo = []
        while needed:
            last = max(needed, key=lambda step: step.number)
            wanted = needed.pop(last)
            ranks = sorted(rank for rank in wanted if not self._has(rank, last))
            if ranks:
                todo.append((last, ranks))
                for source in last.sources:
                    on_ranks = range(self.num_ranks) if last.is_collective else ranks
                    needed.setdefault(source, set()).update(on_ranks)
        return todo[::-1]

    def _has(self, rank: int, step: Step) -> bool:
        return step.holders[rank] == self._members[rank].index

    def _compute(self, step: Step, ranks: Collection[int]) -> None:
        """Make some shards of a step, all of whose sources are there."""
        if not step.is_early:
            self._settle()
        if step.is_collective and not self._is_formed:
            self._form()
        sources = tuple(source.number for source in step.sources)

        def arguments(rank: int) -> tuple[Any, ...]:
            place, keep = (rank, self.num_ranks), rank in ranks
            stored = step.stored[rank] if step.stored else ()
            return step.number, step.producer, place, sources, keep, *stored

        try:
            if step.is_collective:
                found = self._call_together("compute", arguments, self._retry_policy.stall_timeout)
            else:
                found = self._call("compute", arguments, ranks, self._retry_policy.stall_timeout)
            _check_shapes(step, {rank: found[rank] for rank in ranks})
        except BaseException:
            for rank in ranks:  # whatever is there under this number is garbage
                self._free_on(rank, [step.number])
            raise
        for rank in ranks:
            step.holders[rank] = self._members[rank].index
            step.shapes[rank] = found[rank]
        if step.is_collective:
            self._unsettled = step

    def _settle(self) -> None:
        """Wait until all GPUs are done with what was made last."""
        if self._unsettled is not None and self._is_formed:
            try:
                self._call_together("settle", lambda rank: (), self._retry_policy.stall_timeout)
            except _BrokenError as error:
                error.step = self._unsettled
                raise
            self._unsettled = None

    def _mend(self) -> None:
        """Have an actor in each place again, and nothing that a broken group has made."""
        self._end_interrupted()
        self._take_places()
        if self._unsettled is not None and not self._is_formed:
            self._free([self._unsettled])
            self._unsettled = None

    def _form(self) -> None:
        """Have all members join a group of the next generation."""
        self._generation += 1
        self._call_all("describe")  # they may be at work on tasks of a run that was cancelled
        timeout, call_timeout = (
            self._retry_policy.start_timeout,
            2 * self._retry_policy.stall_timeout,
        )
        address = self._call("bind", lambda rank: (timeout,), [0], timeout)[0]

        def arguments(rank: int) -> tuple[Any, ...]:
            return self._generation, rank, self.num_ranks, address, timeout, call_timeout

        self._call_together("join", arguments, timeout)

    def _take_places(self) -> None:
        """Put actors in the places of those that died, and wait until they answer."""
        deadline = time.monotonic() + self._retry_policy.start_timeout
        vacant: list[int] = []
        death: BaseException | None = None
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
                death = error.__cause__
            else:
                for rank, info in infos.items():
                    self._members[rank].info = info
                return
            if time.monotonic() >= deadline:
                break
        raise WorkersFailedError(
            f"rank {', '.join(map(str, vacant))} died, and within start_timeout="
            f"{self._retry_policy.start_timeout:g} s no replacement could be started: {death}"
        ) from death

    def _is_known(self, actor: Actor) -> bool:
        return actor.index in self._pool.actors

    def _call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call all members alike, which do not wait for each other; see :meth:`_call`."""
        ranks = range(self.num_ranks)
        return self._call(method, lambda rank: arguments, ranks, self._retry_policy.stall_timeout)

    def _call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        ranks: Iterable[int],
        timeout: float,
    ) -> dict[int, Any]:
        """Call members that do not wait for each other; return what they do by rank.

        Raises:
            _BrokenError: if some died, or took more than ``timeout`` seconds and were killed.
            Exception: what the method raised, if none died.
        """
        calls = self._begin_calls(method, arguments, ranks)
        self._wait(calls, time.monotonic() + timeout)
        has_failed = bool(calls.dead)
        self._remove_hung(calls)
        if not has_failed:
            self._raise_first(calls.errors)
        return self._conclude(calls)

    def _call_together(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], timeout: float
    ) -> dict[int, Any]:
        """Call all members, which wait for each other; return what they do by rank.

        After a failure the group is no more and no result counts.

        Raises:
            _BrokenError: also if the connections between members failed.
            Exception: as :meth:`_call`.
        """
        calls = self._begin_calls(method, arguments, range(self.num_ranks))
        self._is_formed = False
        end = time.monotonic() + timeout
        self._wait(calls, end, until_failure=True)
        if calls.errors and not calls.dead:
            self._wait(calls, time.monotonic() + _GRACE_SECONDS)
        errors, has_failed = (
            dict(calls.errors),
            bool(calls.dead),
        )  # what comes later is of the abort
        if not calls.pending and not errors and not has_failed:
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
    ) -> "_Calls":
        return _Calls(
            {
                getattr(self._members[rank].handle, method).remote(*arguments(rank)): rank
                for rank in ranks
            }
        )

    def _wait(self, calls: "_Calls", end: float, *, until_failure: bool = False) -> None:
        """Sort out the answers that come until some time of the clock, or the first failure."""
        while calls.pending and not (until_failure and (calls.errors or calls.dead)):
            if self._cancelled.is_set() or self._closing.is_set():
                self._is_formed = False
                if self._closing.is_set():
                    self._pool.abandon(list(calls.pending))
                else:
                    self._interrupted = calls
                raise CancelledError
            self._pool.check_connected()
            left = end - time.monotonic()
            if left <= 0:
                return
            refs = list(calls.pending)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=min(left, _POLL_SECONDS))
            for ref in ready:
                rank = calls.pending.pop(ref)
                try:
                    calls.found[rank] = self._ray.get(ref)
                except self._ray.exceptions.RayTaskError as error:
                    with suppress(Exception):  # that it refuses
                        error.cause.__cause__ = error
                    calls.errors[rank] = error.cause
                except self._ray.exceptions.UnserializableException as error:
                    calls.errors[rank] = error
                except actor_failures(self._ray) as error:
                    calls.dead[rank] = error
                    self._remove_failed(rank)

    def _end_interrupted(self) -> None:
        """Have no actor in the middle of a call that was cancelled."""
        if self._interrupted is not None:
            calls, self._interrupted = self._interrupted, None
            self._abort(calls, time.monotonic() + self._retry_policy.stall_timeout)

    def _abort(self, calls: "_Calls", end: float) -> None:
        """End calls that wait for each other, by some time of the clock or soon after.

        An actor that hears of it may be busy with work of its own, and is waited for so long. One
        that does not is killed at once. Also one whose call has returned is told: its GPU may wait.
        """
        answers = {
            actor.handle.abort.options(concurrency_group=CONTROL).remote(self._generation): rank
            for rank, actor in enumerate(self._members)
            if self._is_known(actor) and actor.info is not None
        }
        ready, silent = self._ray.wait(
            list(answers), num_returns=len(answers), timeout=_ABORT_SECONDS
        )
        for ref in silent:
            self._remove_failed(answers[ref], is_hung=True)
        self._pool.abandon(ready)
        self._wait(calls, max(end, time.monotonic() + _ABORT_SECONDS))
        self._remove_hung(calls)

    def _remove_hung(self, calls: "_Calls") -> None:
        for rank in calls.pending.values():
            calls.dead[rank] = TimeoutError(f"rank {rank} did not answer in time")
            self._remove_failed(rank, is_hung=True)
        self._pool.abandon(list(calls.pending))

    def _remove_failed(self, rank: int, *, is_hung: bool = False) -> None:
        """Let go of a member; its place is taken later."""
        if self._is_known(self._members[rank]):
            self._pool.remove(self._members[rank], is_hung=is_hung)
        self._is_formed = False

    def _conclude(self, calls: "_Calls") -> dict[int, Any]:
        """Return what was found, unless members have died."""
        if calls.dead:
            rank, death = min(calls.dead.items())
            raise _BrokenError(f"rank {rank} died or hung") from death
        return calls.found

    def _raise_first(self, errors: dict[int, Exception]) -> None:
        """Raise the error of the first rank that has one."""
        for rank, error in sorted(errors.items()):
            with suppress(Exception):  # that it refuses
                error.add_note(f"raised on rank {rank} of {self.num_ranks}")
            raise error

    def _count(self, attempts: "Counter[Step]", step: Step, error: _BrokenError) -> None:
        """Note that a step failed through no fault of its own; raise if that is hard to believe."""
        attempts[step] += 1
        if attempts[step] >= self._retry_policy.max_attempts:
            raise TaskFailedError(
                f"{step.name} failed {attempts[step]} times, the last time because {error}"
            ) from error

    def _free(self, steps: Iterable[Step]) -> None:
        """Have the members let go of their shards."""
        steps = list(steps)
        for rank in range(self.num_ranks):
            self._free_on(rank, [step.number for step in steps if self._has(rank, step)])
        for step in steps:
            step.holders = [None] * self.num_ranks

    def _free_on(self, rank: int, numbers: list[int]) -> None:
        actor = self._members[rank]
        if numbers and self._is_known(actor):
            self._pool.abandon([actor.handle.free.remote(numbers)])


@dataclass
class _Calls:
    """One method called on several members."""

    pending: dict[Any, int]
    """Ranks by the references that they owe."""
    found: dict[int, Any] = field(default_factory=dict)
    """By rank, as the others."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """What was raised there."""
    dead: dict[int, Exception] = field(default_factory=dict)


def _is_of_connections(error: Exception) -> bool:
    """Say whether an error may only mean that another rank has failed."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _check_shapes(step: Step, found: dict[int, Shapes]) -> None:
    """Raise ValueError if shards differ from each other, or from what they were, in kind."""
    for rank, shapes in found.items():
        before = step.shapes.get(rank, shapes)
        if shapes != before:
            raise ValueError(
                f"{step.name} gave rank {rank} a shard of shapes {before}, and of {shapes} when "
                "it was made again"
            )
        if len(shapes) != (number := len((found | step.shapes)[0])):
            raise ValueError(
                f"{step.name} gave rank {rank} {len(shapes)} tensors, and rank 0 {number}"
            )
