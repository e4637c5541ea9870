"""What the probe of links makes of its round trips."""

from types import SimpleNamespace

import pytest
import torch

from cqs.executors.distributed import probe


@pytest.mark.parametrize("rate", [5e5, 1.25e6, 1.25e8])
@pytest.mark.parametrize("burst", [0, 36_000])
def test_bytes_that_pass_at_once_do_not_count(monkeypatch, rate, burst):
    def round_trip(group, device, other, num_bytes):
        return 2 * (1e-4 + max(num_bytes - burst, 0) / rate)

    nothing = SimpleNamespace(get_rank=lambda group: 0, send=lambda *each, **options: None)
    monkeypatch.setattr(probe, "dist", nothing)
    monkeypatch.setattr(probe, "_round_trip", round_trip)
    links = probe._measure(None, torch.device("cpu"), 1, 1)
    assert links.bandwidth == pytest.approx(rate, rel=1e-3)
    assert links.latency == pytest.approx(1e-4, rel=0.03)
    assert probe._measure(None, torch.device("cpu"), 1, 2)[0] == pytest.approx(rate / 2, rel=1e-3)
