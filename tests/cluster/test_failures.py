import os
import random
import signal
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch
from calls import (
    assert_kills_change_no_bit,
    at_second_result,
    both_passes,
    cluster_of,
    notice_stalls_after,
    wait_for_workers,
)

import cqs
from cqs.executors.ray import TaskFailedError, WorkersFailedError
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.pool import Calls
from cqs.executors.ray.tasks.run import Run

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def undisturbed(cluster, tensors):
    return cluster.attention(*tensors, is_causal=True, num_tasks=13, verify=True)


def signal_at_second_result(cluster, tensors, signals):
    """Send signals to workers by their number as soon as the second result is there."""
    wait_for_workers(cluster, len(cluster._pool.actors))
    victims = [cluster.pids[number] for number in signals]

    def strike():
        for pid, number in zip(victims, signals.values(), strict=True):
            os.kill(pid, number)

    future = cluster.submit(
        *tensors, is_causal=True, num_tasks=13, progress=at_second_result(strike)
    )
    return future, victims


def test_calls_that_end_before_they_are_sent_harm_no_worker(cluster, tensors, undisturbed):
    """Ray's cancellation of such a call made its actor fail 30 seconds later."""
    wait_for_workers(cluster, 4)
    pids = cluster.pids
    for _ in range(50):
        with Calls(cluster._pool, threading.Event()) as calls:
            calls.refill()
    assert torch.equal(cluster.attention(*tensors, is_causal=True, num_tasks=13), undisturbed)
    assert cluster.pids == pids


def test_killed_workers_do_not_change_a_bit(cluster, tensors, undisturbed):
    future, victims = signal_at_second_result(
        cluster, tensors, {0: signal.SIGKILL, 1: signal.SIGKILL}
    )
    assert torch.equal(future.result(timeout=120), undisturbed)
    assert {failure.pid for failure in future.report.failures} >= set(victims)
    assert {index for each in future.report.failures for index in each.lost_tasks}
    assert future.report.reruns >= 2
    wait_for_workers(cluster, 4)
    assert not set(victims) & set(cluster.pids)


def test_a_worker_that_fails_before_a_merge_does_not_change_a_bit(
    cluster, tensors, undisturbed, monkeypatch
):
    """The failure arrives together with the last part of a group, of which it has one."""
    runs, struck, collect, process = [], [], Calls.collect, Run._process

    def note(run, answer):
        runs.append(run)
        process(run, answer)

    def strike(calls):
        yield from collect(calls)
        ready = [each for run in runs[-1:] for each in run._merges.values() if each.is_ready]
        if ready and not struck:
            struck.append(next(iter(ready[0].parts.values())).holder)
            yield calls.fail(struck[0], RuntimeError("struck"))

    monkeypatch.setattr(Run, "_process", note)
    monkeypatch.setattr(Calls, "collect", strike)
    wait_for_workers(cluster, 4)
    output = cluster.attention(*tensors, is_causal=True, num_tasks=13)
    assert struck and torch.equal(output, undisturbed)


def test_a_hung_worker_is_killed_and_replaced(pair, tensors, undisturbed, monkeypatch):
    notice_stalls_after(5, pair, monkeypatch)
    future, (victim,) = signal_at_second_result(pair, tensors, {0: signal.SIGSTOP})
    assert torch.equal(future.result(timeout=120), undisturbed)
    (failure,) = future.report.failures
    assert failure.pid == victim and len(failure.lost_tasks) == future.report.reruns
    assert 0 < failure.noticed - future.report.started < future.report.seconds
    wait_for_workers(pair, 2)
    assert not os.path.exists(f"/proc/{victim}")


def test_failure_of_all_workers_does_not_change_a_bit(pair, tensors, undisturbed):
    """And one between runs."""
    future, victims = signal_at_second_result(pair, tensors, {0: signal.SIGKILL, 1: signal.SIGKILL})
    assert torch.equal(future.result(timeout=120), undisturbed)
    assert len(future.report.failures) >= 2  # a replacement may stall on a busy machine
    wait_for_workers(pair, 2)
    assert not set(victims) & set(pair.pids)
    os.kill(pair.pids[0], signal.SIGKILL)
    assert torch.equal(pair.attention(*tensors, is_causal=True, num_tasks=13), undisturbed)


def test_a_task_that_kills_its_workers_is_named(ray_session, tensors):
    class Poisoned(TaskActor):
        def run(self, settings, calls, *arguments):
            if any(call.task.index == 3 for call in calls):
                time.sleep(0.5)  # what was computed before arrives
                os.kill(os.getpid(), signal.SIGKILL)
            return super().run(settings, calls, *arguments)

    with cluster_of(Poisoned, max_attempts=2) as cluster:
        with pytest.raises(TaskFailedError, match="task 3 .* 2 workers"):
            cluster.submit(*tensors, num_tasks=7).result(timeout=120)


@pytest.mark.long
def test_workers_that_cannot_start_again_are_an_error(ray_session, tensors, tmp_path):
    started = tmp_path / "started"

    class Mortal(TaskActor):
        def describe(self):
            if started.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return super().describe()

    with cluster_of(Mortal, max_attempts=2) as cluster:
        started.touch()
        os.kill(cluster.pids[0], signal.SIGKILL)
        with pytest.raises(WorkersFailedError, match=r"all 1 workers failed; tasks \[0, 1, 2\]"):
            cluster.submit(*tensors, num_tasks=3).result(timeout=120)
        started.unlink()
        cluster.attention(*tensors, num_tasks=3, verify=True)


def test_a_progress_function_may_close_the_cluster_but_not_wait_for_it(ray_session, tensors):
    """Closing cancels the run and those that wait, and everything after it is an error."""
    cluster = cqs.Cluster(num_workers=1, use_gpus=False)
    with pytest.raises(RuntimeError, match="progress"):
        cluster.attention(*tensors, num_tasks=3, progress=lambda *_: cluster.attention(*tensors))
    running = cluster.submit(*tensors, num_tasks=31, progress=lambda *_: cluster.close())
    waiting = cluster.submit(*tensors, num_tasks=31)
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=30)
    cluster.close()
    assert "1 workers, closed" in repr(cluster)
    with pytest.raises(ValueError, match="closed"):
        cluster.attention(*tensors)


def test_a_future_keeps_its_cluster(ray_session, tensors):
    future = cqs.Cluster(num_workers=1, use_gpus=False).submit(*tensors, num_tasks=3)
    assert future.result(timeout=60).shape == tensors[0].shape


def test_a_forked_process_cannot_use_the_cluster(cluster, tensors):
    script = os.fork()
    if script == 0:
        try:
            cluster.submit(*tensors)
        except ValueError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]) == 7


@pytest.mark.long
def test_kills_do_not_change_the_bits_of_one_process(pair, tensors):
    options = {"num_tasks": 24, "reproducible": True}
    expected = both_passes(SimpleNamespace(attention=cqs.attention), tensors, **options)
    assert_kills_change_no_bit(pair, tensors, expected, 20, random.Random(0), **options)
