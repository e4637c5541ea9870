"""Memory of the host that processes share: read and written in place, and closed to others."""

import ctypes
import os
import time
from contextlib import nullcontext
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from cqs.executors.ray.blob import DenseLayout
from cqs.executors.ray.pool import MemoryNotSharedError
from cqs.executors.ray.tasks import shared_memory
from cqs.executors.ray.tasks.shared_memory import OpenedMemory, SharedMemory, SharedTensor

HOST = torch.device("cpu")
NUMBERS = torch.arange(120)
TENSORS = [
    NUMBERS.float().view(2, 3, 5, 4),
    NUMBERS.bfloat16().view(2, 5, 3, 4).transpose(1, 2),
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


def start(function, *arguments, seconds=0):
    """Run a function in another process; return that after so many seconds or its end."""
    process = get_context("fork").Process(target=function, args=arguments, daemon=True)
    process.start()
    process.join(seconds)
    return process


def test_another_process_reads_and_writes_in_place():
    memory = SharedMemory(HOST)
    locations, places = share(memory)
    assert start(double_as, None, locations, seconds=60).exitcode == 0
    assert all(torch.equal(a, 2 * b) for a, b in zip(places, TENSORS, strict=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_another_user_cannot_open_it_and_it_ends_with_its_owner():
    ours, theirs = get_context("fork").Pipe()
    owner = start(own_as, 60_001, theirs)
    locations = ours.recv()
    for user in (60_002, 60_001):  # another one, and the same
        assert start(double_as, user, locations, seconds=60).exitcode == (user != 60_001)
    owner.kill()
    owner.join()
    with pytest.raises(MemoryNotSharedError):
        OpenedMemory(HOST).tensor(locations[0])


def test_memory_is_replaced_by_larger_and_limited(monkeypatch):
    memory = SharedMemory(HOST)
    assert not memory.clear_for(TENSORS) and memory.allocate(TENSORS) and memory.clear_for(TENSORS)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**20))
    with pytest.raises(RuntimeError, match="a quarter of the free memory"):
        memory.allocate([torch.empty(1, dtype=torch.uint8).expand(2**26)])


def test_allocations_in_one_block_of_a_gpu_are_read_in_full(monkeypatch):
    block = torch.arange(96, dtype=torch.uint8)
    monkeypatch.setattr(shared_memory, "as_bytes", lambda _, number, __: block[:number])
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    opened, place = OpenedMemory(torch.device("cuda", 0)), (shared_memory._PROCESS, "GPU", b"", 0)
    for offset in (0, 88):
        shared = SharedTensor(*place, offset + 8, offset, DenseLayout.like(block[:8]))
        assert torch.equal(opened.tensor(shared), block[offset : offset + 8])
