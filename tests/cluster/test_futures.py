"""Futures of calls on a cluster: waiting for several, and what they print as."""

import threading
from concurrent.futures import CancelledError

import pytest
import torch

import cqs

pytestmark = pytest.mark.ray


@pytest.fixture
def tensors():
    return [torch.randn(1, 2, 60, 8) for _ in range(3)]


@pytest.fixture
def held():
    """Submit calls that each end when their gate opens; all gates are open after the test."""
    gates = []

    def submit(cluster, tensors, **options):
        gate = threading.Event()
        gates.append(gate)
        future = cluster.submit(*tensors, num_tasks=1, progress=lambda *_: gate.wait(60), **options)
        return future, gate

    yield submit
    for gate in gates:
        gate.set()


def test_futures_are_yielded_once_each_as_they_finish(cluster, tensors, held):
    first, open_first = held(cluster, tensors)
    second, open_second = held(cluster, tensors)
    failing = cluster.submit(*tensors, num_tasks=1, backend="cudnn")
    futures = [failing, second, first, second]
    with pytest.raises(TimeoutError, match="3 .of 3. futures unfinished"):
        next(cqs.as_completed(futures, timeout=0.01))
    finished = cqs.as_completed(iter(futures), timeout=60)
    open_first.set()
    assert next(finished) is first and not second.done()
    open_second.set()
    assert next(finished) is second and second.result().shape == tensors[0].shape
    assert next(finished) is failing
    with pytest.raises(NotImplementedError, match="cudnn"):
        failing.result()
    assert next(finished, None) is None
    assert set(cqs.as_completed(futures, timeout=0)) == {first, second, failing}
    assert list(cqs.as_completed([])) == []


def test_as_completed_rejects_what_it_cannot_wait_for(cluster, tensors):
    with pytest.raises(TypeError, match=r"futures must be .*got 3"):
        cqs.as_completed([3])
    later = []

    def wait_for_later(*_):
        cqs.as_completed(later)

    with pytest.raises(RuntimeError, match="progress function"):
        gate = threading.Event()
        future = cluster.submit(
            *tensors, num_tasks=1, progress=lambda *_: gate.wait(60) and wait_for_later()
        )
        later.append(cluster.submit(*tensors))
        gate.set()
        future.result()


def test_reprs_say_how_far_a_call_is(cluster, tensors, held):
    running, gate = held(cluster, tensors)
    cancelled = cluster.submit(*tensors)
    failing = cluster.submit(*tensors, backend="cudnn")
    assert "pending" in repr(failing)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result()
    assert "cancelled" in repr(cancelled)
    while not running._future.running():
        pass
    assert "running" in repr(running)
    gate.set()
    report = repr(running.report)
    assert "1 tasks on 1 workers" in report and "0 failures" in report
    assert "[1, 2, 60, 8]" in repr(running)
    with pytest.raises(NotImplementedError):
        failing.result()
    assert "NotImplementedError" in repr(failing)
    assert f"4 workers, {len(cluster.pids)} running on cpu, 1 nodes" in repr(cluster)
    html = running.report._repr_html_()
    assert html.count("<tr>") == 2 and "&lt;RunReport" in html
    html = cluster._repr_html_()
    assert all(f"<td>{pid}</td>" in html for pid in cluster.pids)
