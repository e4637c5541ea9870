"""Futures of calls on a cluster: waiting for one and for several."""

import threading
from concurrent.futures import as_completed, wait

import pytest
import torch

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


def test_futures_are_yielded_as_they_finish(cluster, tensors, held):
    first, open_first = held(cluster, tensors)
    second, open_second = held(cluster, tensors)
    cancelled = cluster.submit(*tensors)
    failing = cluster.submit(*tensors, num_tasks=1, backend="cudnn")
    futures = [failing, second, cancelled, first]
    with pytest.raises(TimeoutError):
        second.result(timeout=0.01)
    assert cancelled.cancel() and not wait(futures, timeout=0.01).done
    finished = as_completed(futures, timeout=60)
    open_first.set()
    assert next(finished) is first and not second.done() and not first.cancel()
    open_second.set()
    assert next(finished) is second and second.result().shape == tensors[0].shape
    assert "1 tasks on 1 workers" in repr(second.report) and "0 failures" in repr(second.report)
    assert list(finished) == [cancelled, failing] and cancelled.cancelled()
    assert isinstance(failing.exception(), NotImplementedError)
    with pytest.raises(NotImplementedError, match="cudnn"):
        failing.report  # noqa: B018


def test_a_progress_function_does_not_wait_for_a_later_call(cluster, tensors):
    submitted, later = threading.Event(), []
    future = cluster.submit(
        *tensors, num_tasks=1, progress=lambda *_: submitted.wait(60) and later[0].report
    )
    later.append(cluster.submit(*tensors))
    submitted.set()
    with pytest.raises(RuntimeError, match="progress function"):
        future.result()
    assert later[0].result().shape == tensors[0].shape


def test_a_cluster_prints_its_workers(cluster):
    assert f"4 workers, {len(cluster.pids)} running on cpu, 1 nodes" in repr(cluster)
