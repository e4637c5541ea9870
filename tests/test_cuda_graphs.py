"""What kernels read while CUDA graphs are captured and replayed."""

import weakref

import pytest
import torch

from cqs.worker import cuda_graphs
from cqs.worker.cuda_graphs import cached_on_device

CPU = torch.device("cpu")


class Table:
    def __init__(self, numbers):
        self.numbers = numbers


@cached_on_device
def make(device, *numbers, is_reversed=False):
    return Table(numbers[::-1] if is_reversed else numbers)


@pytest.fixture
def captured(monkeypatch):
    """Make it look as if a graph were captured."""
    monkeypatch.setattr(cuda_graphs, "_replayed", {})
    return lambda is_captured: monkeypatch.setattr(
        cuda_graphs, "is_captured", lambda device: is_captured
    )


def test_what_kernels_read_is_made_once():
    assert make(CPU, 1, 2) is make(CPU, 1, 2)
    assert make(CPU, 1, 2, is_reversed=True).numbers == (2, 1)
    assert make(CPU, 1, 2).numbers == (1, 2)


def test_nothing_is_made_while_a_graph_is_captured(captured):
    captured(True)
    with pytest.raises(RuntimeError, match="call once with the same arguments"):
        make(CPU, 3)
    captured(False)
    assert make(CPU, 3).numbers == (3,)


def test_what_a_graph_reads_outlives_the_cache(captured):
    read, unread = (weakref.ref(make(CPU, number)) for number in (4, 5))
    captured(True)
    assert make(CPU, 4) is read()
    captured(False)
    for number in range(600):
        make(CPU, "other", number)
    assert unread() is None
    assert read() is not None
