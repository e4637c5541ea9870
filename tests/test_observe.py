"""What passes show to loggers and profilers."""

import logging

import pytest
import torch

import cqs
import cqs.streaming

TENSORS = [torch.randn(1, 2, 60, 16, requires_grad=True) for _ in range(3)]
NUM_BYTES = 3 * 2 * 60 * 16 * 4


@pytest.mark.parametrize(
    "attend", [cqs.attention, cqs.streaming.attention, pytest.param(None, marks=[pytest.mark.ray])]
)
def test_each_pass_is_logged(request, caplog, attend):
    if attend is None:
        attend = request.getfixturevalue("cluster").attention
    caplog.set_level(logging.DEBUG, "cqs")
    attend(*TENSORS, backend="reference").sum().backward()
    forward, backward = (record.getMessage() for record in caplog.records if record.name == "cqs")
    assert forward.startswith("forward: ") and backward.startswith("backward: ")
    for text in (forward, backward):
        assert "backend reference" in text and f"{NUM_BYTES} bytes" in text


def test_the_chosen_backend_is_named(caplog):
    caplog.set_level(logging.DEBUG, "cqs")
    with pytest.raises(NotImplementedError):
        cqs.attention(*TENSORS, backend="flash")
    cqs.attention(*TENSORS, num_tasks=3)
    (record,) = caplog.records  # none of the pass that failed
    assert "3 tasks over 60 x 60 non-causal attention" in record.getMessage()
    assert "backend cpu" in record.getMessage()


def test_nothing_is_logged_unless_somebody_asks(caplog):
    cqs.attention(*TENSORS)
    assert not caplog.records


def test_profilers_see_the_passes():
    with torch.profiler.profile() as profile:
        cqs.attention(*TENSORS).sum().backward()
    assert {"cqs.forward", "cqs.backward"} <= {event.key for event in profile.key_averages()}
