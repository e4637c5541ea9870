"""Memory of the host that processes share: read and written in place, and closed to others."""

import ctypes
import os
import time
from multiprocessing import get_context

import pytest
import torch

from cqs.executors.ray.pool import MemoryNotSharedError
from cqs.executors.ray.tasks.shared_memory import OpenedMemory, SharedMemory

HOST = torch.device("cpu")
NUMBERS = torch.arange(120)
TENSORS = [
    NUMBERS.float().view(2, 3, 5, 4),
    NUMBERS.bfloat16().view(2, 5, 3, 4).transpose(1, 2),
    NUMBERS[:0].half().view(1, 3, 0, 4),
    NUMBERS[:30].double().view(2, 3, 5),
]


def share(memory):
    """Return the locations of the tensors in memory of this process, and their places."""
    places, locations = zip(*memory.allocate(TENSORS), strict=True)
    for place, tensor in zip(places, TENSORS, strict=True):
        place.copy_(tensor)
    return locations, places


def become(user):
    """Give up the rights of root; other processes of the user may look into this one."""
    os.setuid(user)
    assert not ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


def own_as(user, pipe):
    """Share the tensors as a user, for a minute."""
    become(user)
    memory = SharedMemory(HOST)
    pipe.send(share(memory)[0])
    time.sleep(60)


def double_as(user, locations):
    """Double the shared tensors as a user, or as this one."""
    if user is not None:
        become(user)
    for location, tensor in zip(locations, TENSORS, strict=True):
        shared = OpenedMemory(HOST).tensor(location)
        assert torch.equal(shared, tensor) and shared.stride() == tensor.stride()
        shared.mul_(2)


def start(function, *arguments):
    process = get_context("fork").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def status(function, *arguments):
    """Return the exit status of a function in another process."""
    process = start(function, *arguments)
    process.join(60)
    return process.exitcode


def test_another_process_reads_and_writes_in_place():
    memory = SharedMemory(HOST)
    locations, places = share(memory)
    assert status(double_as, None, locations) == 0
    assert all(torch.equal(a, 2 * b) for a, b in zip(places, TENSORS, strict=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_another_user_cannot_open_it_and_it_ends_with_its_owner():
    ours, theirs = get_context("fork").Pipe()
    owner = start(own_as, 60_001, theirs)
    locations = ours.recv()
    assert status(double_as, 60_002, locations) == 1
    assert status(double_as, 60_001, locations) == 0
    owner.kill()
    owner.join()
    with pytest.raises(MemoryNotSharedError):
        OpenedMemory(HOST).tensor(locations[0])


def test_memory_is_replaced_by_larger_and_limited(monkeypatch):
    memory = SharedMemory(HOST)
    assert not memory.clear_for(TENSORS) and memory.allocate(TENSORS) and memory.is_used
    assert memory.clear_for(TENSORS) and not memory.is_used
    monkeypatch.setattr("cqs.executors.ray.tasks.shared_memory.free_bytes", lambda _: 2**20)
    with pytest.raises(RuntimeError, match="a quarter of the free memory"):
        memory.allocate([torch.empty(1, dtype=torch.uint8).expand(2**26)])
