"""Calls on a process group: their order in this process, and collectives that compare them."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_NUMBERS = (
    "calls since the group was made",
    "exchanges since the group was made",
    "place in its compiled graph",
)
"""Names of the numbers that ranks compare; the last only if the call is in a compiled graph."""
_MOST_SHOWN = 300
"""Maximum number of characters of a value in an error message."""
_place = ContextVar("place", default=0)
"""Index of the running call in its graph of ``torch.compile``; 0 outside of graphs."""
_control_groups: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_calls: "WeakKeyDictionary[Any, GroupCalls]" = WeakKeyDictionary()


class Shards(NamedTuple):
    """Shard lengths of all ranks, and the common seed."""

    seqlens_q: tuple[int, ...]
    """Number of queries in every rank's shard."""
    seqlens_kv: tuple[int, ...]
    """Number of keys in every rank's shard."""
    seed: int
    """Random seed of rank 0, which all ranks use."""
    machine: int
    """Number of the machine of rank 0's device, which all ranks plan for."""
    number: int
    """Number of the call on its group."""


class Request:
    """Values that must be equal on all ranks of a call, by name; made once, compared often."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take the values; ``"call"`` is the called function."""
        # Equal values have an equal repr, so ranks compare digests of text.
        self.texts = {name: repr(value) for name, value in values.items()}
        digest = hashlib.blake2b(repr(self.texts).encode(), digest_size=7).digest()
        self.digest = int.from_bytes(digest)


def agree(
    group: Any, request: Request, own: Sequence[int] = (0, 0, 0, 0), error: Exception | None = None
) -> Shards:
    """Compare a call with the calls of all other ranks; every rank must call this.

    It comes before anything that other ranks can notice: all ranks have the same messages then, and
    all of them continue or all of them raise. The host does not wait for GPUs.

    Args:
        group: The process group.
        request: Values that must be equal on all ranks.
        own: Number of queries and of keys in this rank's shard, its random seed for dropout,
            less than 2^63, and the number of the machine of its device.
        error: The error of this rank, see :func:`errors_shared`.

    Raises:
        Exception: This rank has an error.
        ValueError: Another rank has an error or a different request; the message names it.
        RuntimeError: Threads of this process have called on the group at the same time, or a rank
            has failed or does not answer within the timeout of the group.
    """
    with agreed(group, request, own, error, checks=False) as shards:
        return shards


@contextmanager
def agreed(
    group: Any,
    request: Request,
    own: Sequence[int] = (0, 0, 0, 0),
    error: Exception | None = None,
    *,
    checks: bool = True,
) -> Iterator[Shards]:
    """Hold the group for a call that is compared with those of all other ranks.

    A call that overlaps another thread's waits for its end. Within a thread calls may be nested.

    Args:
        group: The process group.
        request: Values that must be equal on all ranks.
        own: Numbers of this rank, see :func:`agree`.
        error: The error of this rank.
        checks: Whether to raise at the end if threads have called on the group at the same time.

    Raises:
        Exception: One of the errors of :func:`agree`.
    """
    calls = calls_on(group)
    if not calls.lock.acquire(blocking=False):
        calls.overlap = (
            "group must be used by one thread at a time, got a call of "
            f"{threading.current_thread().name} during another: make a process group for each "
            "thread with torch.distributed.new_group. This group cannot be used again, and its "
            "results may be wrong since threads have shared it"
        )
        calls.lock.acquire()
    try:
        yield calls.compare(control_group(group), request, own, error)
    finally:
        calls.lock.release()
    if checks and calls.overlap:
        raise RuntimeError(calls.overlap)


def _explain(
    control: Any, request: Request, numbers: Mapping[str, int], error: Exception | None
) -> None:
    """Gather all requests and raise the error that names the rank which differs."""
    texts = request.texts | {name: str(number) for name, number in numbers.items()}
    text = json.dumps([texts, None if error is None else repr(error)])
    try:
        answers = list(map(json.loads, swap_texts(control, text)))
    except RuntimeError as lost:
        if error is None:
            raise
        raise error from lost
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(answers):
        if message is not None:
            raise ValueError(f"rank {rank} of the group failed: {message}")
    first: dict[str, tuple[int, str]] = {}
    for rank, (other, _) in enumerate(answers):
        for name, value in other.items():
            first_rank, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise ValueError(
                    f"rank {rank} of the group has {name} {value:.{_MOST_SHOWN}}, "
                    f"rank {first_rank} has {expected:.{_MOST_SHOWN}}"
                )


@contextmanager
def at_place(place: int) -> Iterator[None]:
    """Make the block a call of a compiled graph; ranks compare the places of such calls.

    Args:
        place: Index of the call in its graph, from 1; 0 outside of graphs.
    """
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


@contextmanager
def errors_shared(group: Any) -> Iterator[None]:
    """Send an error of the block to the other ranks, which wait for this one in :func:`agree`."""
    try:
        yield
    except Exception as error:
        agree(group, Request({}), error=error)  # raises it


def swap(control: Any, own: Sequence[int], lengths: Sequence[int] | None = None) -> list[int]:
    """Gather integers from all ranks, in rank order; every rank must call this.

    Args:
        control: Process group of all ranks that supports CPU tensors.
        own: Integers of this rank, within int64.
        lengths: For every rank, the number of its integers; ``None`` means as many as of this rank.

    Raises:
        RuntimeError: A rank has failed, or does not answer within the timeout of the group. All
            ranks raise, because each exchanges messages with all others.
    """
    lengths = [len(own)] * control.size() if lengths is None else list(lengths)
    sent = torch.tensor(list(own) * len(lengths), dtype=torch.int64, device="cpu")
    received = sent.new_empty(sum(lengths))
    try:
        control.alltoall_base(received, sent, lengths, [len(own)] * len(lengths)).wait()
    except RuntimeError as lost:
        raise RuntimeError(
            f"a rank of the group has failed or did not make this call: {lost}"
        ) from lost
    return received.tolist()


def swap_lists(control: Any, own: Sequence[int]) -> list[list[int]]:
    """Gather any number of integers from every rank; every rank must call this."""
    lengths = swap(control, [len(own)])
    received = iter(swap(control, own, lengths))
    return [list(islice(received, length)) for length in lengths]


def swap_texts(control: Any, own: str) -> list[str]:
    """Gather a text from all ranks, in rank order; every rank must call this."""
    return [bytes(text).decode() for text in swap_lists(control, own.encode())]


def gather(group: Any, request: Mapping[str, Any], own: Sequence[int]) -> list[list[int]]:
    """Gather integers from all ranks after comparing their requests; every rank must call this.

    Args:
        group: The process group.
        request: Values that must be equal on all ranks, see :func:`agree`.
        own: Integers of this rank, within int64.

    Returns:
        The integers of every rank, in rank order.

    Raises:
        Exception: One of the errors of :func:`agree`.
    """
    with agreed(group, Request(request)):  # messages of other threads must not interleave
        return swap_lists(control_group(group), own)


def control_group(group: Any) -> Any:
    """Return a process group of the same ranks for CPU tensors; made on the first call.

    It uses the group's store, because :func:`torch.distributed.new_group` hangs if the ranks have
    created different numbers of groups.
    """
    group = group or dist.group.WORLD
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group not in _control_groups:
        _control_groups[group] = make_control_group(group)
    return _control_groups[group]


def make_control_group(group: Any) -> Any:
    """Create a gloo process group of the same ranks; every rank must call this once."""
    store = dist.PrefixStore("cqs", group.get_group_store())
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    return dist.ProcessGroupGloo(store, rank, num_ranks, timeout_of(group))


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a process group on GPUs."""
    timeout: timedelta = group._get_backend(torch.device("cuda")).options._timeout
    return timeout


class GroupCalls:
    """Serializes this process's calls on one process group, and rejects concurrent ones.

    Ranks pair up their calls by order, and concurrent calls have no order that ranks could share: a
    thread's call may be paired with another thread's on the next rank. The lock keeps both calls
    intact, so that no rank waits in vain. The error stays, because earlier calls may have been
    paired wrongly without an overlap: every later call fails on every rank of the group.
    """

    def __init__(self) -> None:
        """Track the calls of a new process group."""
        self.lock = threading.RLock()
        """Held during a call."""
        self.overlap = ""
        """Message about the last call that overlapped another one."""
        self.num_calls = 0
        """Number of calls whose arguments all ranks have found equal."""
        self.num_sends = 0
        """Number of P2P sends in all passes that were not captured in a CUDA graph."""

    def compare(
        self, control: Any, request: Request, own: Sequence[int], error: Exception | None
    ) -> Shards:
        """Compare a call with those of other ranks, while the group is held; see :func:`agree`."""
        if self.overlap:
            error = error or self.error
        counts, place = (self.num_calls, self.num_sends), _place.get()
        message = [error is not None, request.digest, *counts, place, *own]
        received = swap(control, message)
        columns = [received[i :: len(message)] for i in range(len(message))]
        failed, digests, numbers, sends, places, *shards = columns
        are_alike = len({*zip(digests, numbers, sends, strict=True)}) == 1
        if any(failed) or not are_alike or len({*places} - {0}) > 1:
            names = _NUMBERS if place else _NUMBERS[:-1]
            own_numbers = dict(zip(names, (*counts, place), strict=False))
            _explain(control, request, own_numbers, error or self.error)  # of a thread meanwhile
        seqlens_q, seqlens_kv, seeds, machines = shards
        number, self.num_calls = self.num_calls, self.num_calls + 1
        return Shards(tuple(seqlens_q), tuple(seqlens_kv), seeds[0], machines[0], number)

    @property
    def error(self) -> RuntimeError | None:
        """Error of all calls after two threads called on the group at the same time, or None."""
        return RuntimeError(self.overlap) if self.overlap else None


def calls_on(group: Any) -> GroupCalls:
    """Return the calls of this process on a group; ``None`` means the default group."""
    group = group or dist.group.WORLD
    if (calls := _calls.get(group)) is None:
        calls = _calls.setdefault(group, GroupCalls())
    return calls
