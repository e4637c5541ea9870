"""A simulator of the GPUs of a host, in one process: a thread for each rank, and no device.

Operations run in any order that streams and events allow; a seed chooses it. Flags are int32 in
host memory, which streams wait for and write as the CUDA driver does.
benchmarks/journal/protocols.md describes the protocol that runs on it, in the same words.
"""

import ctypes
import random
import threading
import time
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cqs.executors.distributed.transport import cuda_driver

_here = threading.local()
"""World, rank, current stream and captured graph of this thread."""

_STALL_TIMEOUT = 60
"""Seconds without an operation after which all streams count as waiting; imports may take long."""


class Stream:
    """A CUDA stream: operations that run in order, each at once, as soon as it is ready."""

    def __init__(self, device=None, priority=0):
        self.world, self.rank, self.device = _here.world, _here.rank, device
        self.operations, self.num_queued, self.num_done = [], 0, 0
        with self.world.lock:
            self.world.streams.append(self)
        self.cuda_stream = self

    def enqueue(self, run=lambda: None, is_ready=lambda: True):
        """Queue an operation; one that is never ready makes the stream wait."""
        if (graph := captured()) is not None:
            graph.add(self, lambda stream, _: stream.enqueue(run, is_ready))
            return
        with self.world.lock:
            self.operations.append((run, is_ready))
            self.num_queued += 1

    def record_event(self):
        if (graph := captured()) is None:
            return Event(self)
        event = CapturedEvent(graph, graph.seen_by(self))
        graph.nodes.append((self, lambda stream, events: events.update({event: Event(stream)})))
        return event

    def wait_event(self, event):
        if (graph := captured()) is None:
            self.enqueue(is_ready=event.query)
            return
        assert event.graph is graph, "a captured stream waits for an event outside the graph"
        graph.seen_by(self).update(event.seen)
        graph.add(self, lambda stream, events: stream.wait_event(events[event]))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return self.num_done == self.num_queued


class Event:
    """An event that is complete when its stream has run all operations queued before it."""

    def __init__(self, stream):
        self.stream, self.number, self.graph = stream, stream.num_queued, None

    def query(self):
        return self.stream.num_done >= self.number


class CapturedEvent:
    """An event in a graph; every replay records its own."""

    def __init__(self, graph, seen):
        self.graph, self.seen = graph, set(seen)


class Graph:
    """A CUDA graph: the operations that a thread queued during the capture.

    Every replay runs them on new streams.
    """

    def __init__(self):
        self.nodes, self.seen = [], {}

    def __enter__(self):
        _here.graph = self

    def __exit__(self, *_):
        _here.graph = None
        missing = set().union(*self.seen.values()) - self.seen_by(_here.stream)
        assert not missing, "a stream has not been joined"

    def add(self, stream, enqueue):
        """Add a function that queues an operation again, on a replay's stream with its events."""
        self.seen_by(stream).add(len(self.nodes))
        self.nodes.append((stream, enqueue))

    def seen_by(self, stream):
        """Return the indices of the nodes that a stream's next operation comes after."""
        return self.seen.setdefault(stream, set())

    def replay(self):
        """Queue all operations, between the current stream's earlier and later ones."""
        streams, events, start = {}, {}, _here.stream.record_event()
        for of_node, enqueue in self.nodes:
            if of_node not in streams:
                streams[of_node] = Stream()
                streams[of_node].wait_event(start)
            enqueue(streams[of_node], events)
        for stream in streams.values():
            _here.stream.wait_stream(stream)


class Launches(TorchDispatchMode):
    """Queues what tensors are computed by, as a GPU does; until then what is computed is NaN."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function.is_view:
            return function(*arguments, **options)
        if function._schema.is_mutable:
            current_stream().enqueue(lambda: function(*arguments, **options))
            return options.get("out", arguments[0])
        found = function(*arguments, **options)
        results, given = storages_of(found), storages_of((arguments, options))
        if not results or results.keys() & given.keys():
            return found
        if "empty" in str(function):
            _here.world.kept += results.values()  # as an allocator does while streams use them
            return found
        for result in results.values():
            if result.is_floating_point():
                result.fill_(torch.nan)

        def run():
            again = storages_of(function(*arguments, **options))
            for result, each in zip(results.values(), again.values(), strict=True):
                result.copy_(each)

        current_stream().enqueue(run)
        return found


def storages_of(values):
    """Return the tensors among values that have elements, by the address of their storage."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return {each.untyped_storage().data_ptr(): each for each in tensors if each.numel()}


class World:
    """The ranks of a process group and the streams of their GPUs."""

    def __init__(self, num_ranks, seed):
        self.num_ranks, self.random = num_ranks, random.Random(seed)
        self.lock, self.streams = threading.RLock(), []
        self.order = []
        """The streams, in the order in which the simulator tries them."""
        self.barrier = threading.Barrier(num_ranks)
        self.passed = [[] for _ in range(num_ranks)]
        self.errors, self.kept = [], []

    def run(self, program):
        """Run ``program(rank)`` on a thread for each rank, and all operations that it queues.

        Raises:
            AssertionError: Every stream waits for another, or for a flag that no stream will write.
            BaseException: The first error of a program or an operation.
        """
        ranks = range(self.num_ranks)
        threads = [threading.Thread(target=self._run_rank, args=(program, rank)) for rank in ranks]
        for thread in threads:
            thread.start()
        idle_since = time.monotonic()
        while any(thread.is_alive() for thread in threads) or not self._is_done():
            if self._step():
                idle_since = time.monotonic()
            elif self.errors or time.monotonic() > idle_since + _STALL_TIMEOUT:
                state = [(s.rank, s.num_done, s.num_queued) for s in self.streams]
                message = f"every stream waits; rank, operations run and queued: {state}"
                self.errors.append(AssertionError(message))
                self.barrier.abort()
                break
            else:
                time.sleep(1e-4)  # for the threads of the ranks
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def size(self):
        return self.num_ranks

    def swap(self, own=()):
        """Return the numbers of all ranks in rank order, as a collective on the CPU."""
        self.passed[_here.rank] = list(own)
        self.barrier.wait(_STALL_TIMEOUT)
        found = [number for numbers in self.passed for number in numbers]
        self.barrier.wait(_STALL_TIMEOUT)
        return found

    def _run_rank(self, program, rank):
        _here.world, _here.rank = self, rank
        _here.stream = Stream()
        try:
            with Launches():
                program(rank)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()

    def _is_done(self):
        return all(stream.query() for stream in self.streams)

    def _step(self):
        """Run the next operation of a stream, and return whether one was ready."""
        with self.lock:
            self.order += self.streams[len(self.order) :]
        # Rarely: the same streams are fast for a while, so that ranks get far apart.
        if self.random.random() < 0.03:
            self.random.shuffle(self.order)
        for stream in [stream for stream in self.order if stream.operations]:
            run, is_ready = stream.operations[0]
            if is_ready():
                try:
                    run()
                except BaseException as error:
                    self.errors.append(error)
                    run = None
                with self.lock:
                    stream.operations.pop(0)
                    stream.num_done += 1
                return True
        return False


def captured():
    """Return the graph that this thread captures, or None."""
    return getattr(_here, "graph", None)


def current_rank():
    """Return the rank of this thread."""
    return _here.rank


def current_stream(device=None):
    return _here.stream


def set_stream(stream):
    _here.stream = stream


def synchronize(device=None):
    """Block until the streams of this rank are idle."""
    while not all(s.query() for s in list(_here.world.streams) if s.rank == _here.rank):
        if _here.world.errors:
            raise _here.world.errors[0]
        time.sleep(1e-4)


class Driver:
    """A double of the module ``cuda_driver``: memory, IPC handles, copies and flags."""

    HANDLE_BYTES = cuda_driver.HANDLE_BYTES

    def __init__(self):
        self.blocks = {}

    def allocate(self, num_bytes):
        block = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, address):
        # Kept, so that a read after the free finds wrong values.
        ctypes.memset(address, 254, self.blocks[address].nbytes)

    def export_memory(self, base):
        return base.to_bytes(self.HANDLE_BYTES, "little")

    def open_memory(self, handle):
        return int.from_bytes(handle, "little")

    def close_memory(self, address):
        pass

    def relax_capture(self):
        pass

    def copy(self, target, source, num_bytes, stream):
        stream.enqueue(lambda: ctypes.memmove(target, source, num_bytes))

    def fill_words(self, address, value, number, stream):
        values = (ctypes.c_int32 * number)(*[value] * number)
        stream.enqueue(lambda: ctypes.memmove(address, values, 4 * number))

    def wait_word(self, stream, address, least):
        word = ctypes.c_int32.from_address(address)
        stream.enqueue(is_ready=lambda: word.value >= least)

    def write_word(self, stream, address, value):
        self.fill_words(address, value, 1, stream)


def install(monkeypatch):
    """Replace the streams and events of PyTorch by those of this module."""
    for name, value in (
        ("Stream", Stream),
        ("current_device", lambda: 0),
        ("current_stream", current_stream),
        ("set_stream", set_stream),
        ("synchronize", synchronize),
        ("device", lambda device: nullcontext()),
        ("empty_cache", lambda: None),
        ("is_current_stream_capturing", lambda: captured() is not None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
