"""GPUs of threads: streams whose operations happen in any order that the streams allow."""

import ctypes
import random
import threading
import time
import types
import weakref
from contextlib import nullcontext

import torch

_here = threading.local()
"""Which rank this thread is, and its current stream."""


_streams = weakref.WeakValueDictionary()
"""By their numbers."""


class Deadlock(AssertionError):
    """No stream can go on."""


class Stream:
    """Operations in order; each is ready or not, and then happens at once."""

    def __init__(self, device=None, priority=0):
        self.world, self.rank, self.device = _here.world, _here.rank, device
        self.operations, self.num_begun, self.num_done = [], 0, 0
        with self.world.lock:
            self.world.streams.append(self)
        self.cuda_stream = id(self)
        _streams[self.cuda_stream] = self

    def enqueue(self, run=lambda: None, is_ready=lambda: True):
        if (graph := captured()) is not None:
            graph.add(self, lambda stream, _: stream.enqueue(run, is_ready))
            return
        with self.world.lock:
            self.operations.append((run, is_ready))
            self.num_begun += 1

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
        assert event.graph is graph, "a graph must not depend on what is outside"
        graph.seen_by(self).update(event.seen)
        graph.add(self, lambda stream, events: stream.wait_event(events[event]))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return self.num_done == self.num_begun


class Event:
    """Has come when its stream has done what it had to do."""

    def __init__(self, stream):
        self.stream, self.number, self.graph = stream, stream.num_begun, None

    def query(self):
        return self.stream.num_done >= self.number


class CapturedEvent:
    """Stands for what a replay will record."""

    def __init__(self, graph, seen):
        self.graph, self.seen = graph, set(seen)


class Graph:
    """What a thread enqueued while it was captured, to be replayed on streams of its own."""

    def __init__(self):
        self.nodes, self.seen = [], {}

    def __enter__(self):
        _here.graph = self

    def __exit__(self, *_):
        _here.graph = None
        missing = set().union(*self.seen.values()) - self.seen_by(_here.stream)
        assert not missing, "a stream has not been joined"

    def add(self, stream, enqueue):
        """Add what enqueues something again, given the stream and the events of a replay."""
        self.seen_by(stream).add(len(self.nodes))
        self.nodes.append((stream, enqueue))

    def seen_by(self, stream):
        """Return the numbers of nodes after which a stream goes on."""
        return self.seen.setdefault(stream, set())

    def replay(self):
        """Enqueue all of it, after what the current stream has to do and before what it will."""
        streams, events, begin = {}, {}, _here.stream.record_event()
        for of_node, enqueue in self.nodes:
            if of_node not in streams:
                streams[of_node] = Stream()
                streams[of_node].wait_event(begin)
            enqueue(streams[of_node], events)
        for stream in streams.values():
            _here.stream.wait_stream(stream)


class World:
    """All streams of all ranks, and the driver that they use."""

    def __init__(self, num_ranks, seed):
        self.num_ranks, self.random = num_ranks, random.Random(seed)
        self.lock, self.streams = threading.RLock(), []
        self.order = []
        """The streams, in the order in which they may go on."""
        self.barrier = threading.Barrier(num_ranks)
        self.passed = [[] for _ in range(num_ranks)]
        self.errors = []

    def run(self, program):
        """Run ``program(rank)`` on a thread for each rank, and all that it launches."""
        threads = [
            threading.Thread(target=self._be, args=(program, r)) for r in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        idle_since = time.monotonic()
        while any(thread.is_alive() for thread in threads) or not self._is_done():
            if self._step():
                idle_since = time.monotonic()
            elif self.errors or time.monotonic() > idle_since + 10:
                state = [(s.rank, s.num_done, s.num_begun) for s in self.streams]
                self.errors.append(Deadlock(state))  # who waits is told
                self.barrier.abort()
                break
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def swap(self, own):
        """Return the numbers that all ranks pass."""
        self.passed[_here.rank] = list(own)
        self.barrier.wait(30)
        found = [number for numbers in self.passed for number in numbers]
        self.barrier.wait(30)
        return found

    def _be(self, program, rank):
        _here.world, _here.rank = self, rank
        _here.stream = Stream()
        try:
            program(rank)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()

    def _is_done(self):
        return all(stream.query() for stream in self.streams)

    def _step(self):
        """Let some stream do its next operation; say whether one could."""
        with self.lock:
            self.order += self.streams[len(self.order) :]
        if self.random.random() < 0.03:  # till then the same streams are the fast ones
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
    """Return the graph that this thread captures, if it does."""
    return getattr(_here, "graph", None)


def current_rank():
    """Return which rank this thread is."""
    return _here.rank


def current_stream(device=None):
    return _here.stream


def set_stream(stream):
    _here.stream = stream


def synchronize(device=None):
    """Wait until the streams of this rank are done."""
    while not all(s.query() for s in list(_here.world.streams) if s.rank == _here.rank):
        if _here.world.errors:
            raise _here.world.errors[0]
        time.sleep(1e-4)


def later(function):
    """Make a function happen when its stream comes to it."""

    def launch(*arguments):
        _here.stream.enqueue(lambda: function(*arguments))

    return launch


def make_driver():
    """Return what stands in for the module of the CUDA driver."""
    blocks = {}

    def write(address, number):
        ctypes.c_int32.from_address(address).value = number

    def read(address):
        return ctypes.c_int32.from_address(address).value

    def allocate(num_bytes):
        block = torch.full((num_bytes,), 255, dtype=torch.uint8)
        blocks[block.data_ptr()] = block
        return 0, block.data_ptr()

    def free(address):
        blocks[address].fill_(254)  # and kept: who still reads it finds garbage
        return (0,)

    def get_handle(address):
        return 0, types.SimpleNamespace(reserved=address.to_bytes(64, "little"))

    def set_numbers(address, value, number):
        for i in range(number):
            write(address + 4 * i, value)
        return (0,)

    def set_numbers_later(address, value, number, stream):
        _streams[stream].enqueue(lambda: set_numbers(address, value, number))
        return (0,)

    def copy(target, source, number, stream):
        _streams[stream].enqueue(lambda: ctypes.memmove(target, source, number))
        return (0,)

    def wait_value(stream, address, number, flags):
        _streams[stream].enqueue(is_ready=lambda: read(address) >= number)
        return (0,)

    def write_value(stream, address, number, flags):
        _streams[stream].enqueue(lambda: write(address, number))
        return (0,)

    return types.SimpleNamespace(
        CUipcMemHandle=types.SimpleNamespace,
        CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
        CUipcMem_flags=types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        CUstreamWaitValue_flags=types.SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0),
        cuMemAlloc=allocate,
        cuMemFree=free,
        cuMemsetD32Async=set_numbers_later,
        cuMemcpyAsync=copy,
        cuIpcGetMemHandle=get_handle,
        cuIpcOpenMemHandle=lambda handle, flags: (0, int.from_bytes(handle.reserved, "little")),
        cuIpcCloseMemHandle=lambda address: (0,),
        cuThreadExchangeStreamCaptureMode=lambda mode: (0, mode),
        cuStreamWaitValue32=wait_value,
        cuStreamWriteValue32=write_value,
    )


def install(monkeypatch):
    """Have PyTorch use the streams of this module."""
    for name, value in (
        ("Stream", Stream),
        ("current_stream", current_stream),
        ("set_stream", set_stream),
        ("synchronize", synchronize),
        ("device", lambda device: nullcontext()),
        ("empty_cache", lambda: None),
        ("is_current_stream_capturing", lambda: captured() is not None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
