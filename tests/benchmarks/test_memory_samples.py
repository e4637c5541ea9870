"""What is held over time: recorded, and plotted."""

import numpy as np
import pytest
import torch

from benchmarks.memory_samples import record_memory, samples_of_snapshot
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


def test_samples_of_a_snapshot_count_what_was_there_before():
    def event(action, size, time_us):
        return {"action": action, "size": size, "time_us": time_us, "addr": 0, "stream": 0}

    history = [
        event("segment_alloc", 4096, 1_000_000),
        event("alloc", 1024, 1_000_001),
        event("free_requested", 512, 2_000_000),
        event("free_completed", 512, 2_500_000),
        event("alloc", 256, 3_000_000),
    ]
    segments = [{"device": 1, "allocated_size": 3072}, {"device": 0, "allocated_size": 9999}]
    snapshot = {"segments": segments, "device_traces": [[], history]}
    assert samples_of_snapshot(snapshot, 1) == [
        (1.000001, 3072 - 256 + 512), (2.0, 3072 - 256), (3.0, 3072)
    ]  # fmt: skip
    assert samples_of_snapshot(snapshot, 0) == []
