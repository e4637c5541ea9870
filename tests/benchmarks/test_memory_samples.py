"""What is held over time: recorded, and plotted."""

import numpy as np
import pytest
import torch

from benchmarks.memory_samples import record_memory
from cqs.worker.memory import measure_peak_bytes

pytestmark = pytest.mark.long


def allocate(device):
    first = torch.ones(2**20, device=device)
    second = torch.ones(2**21, device=device)
    del first
    return torch.ones(2**18, device=device), second.sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_allocated_and_freed_is_recorded_in_order(device):
    device = torch.device(device)
    allocate(device)
    _, samples = record_memory(lambda: allocate(device), device)
    seconds, held = zip(*samples, strict=True)
    assert samples[0] == (0, 0) and list(seconds) == sorted(seconds) and seconds[-1] < 60
    large = [size for size in (np.array(held) / 2**20).round().tolist()]
    steps = [size for size, before in zip(large, [None, *large], strict=False) if size != before]
    assert steps == [0, 4, 12, 8, 9, 1]
    _, peak = measure_peak_bytes(lambda: allocate(device), device)
    assert max(held) == pytest.approx(peak, abs=4096)
