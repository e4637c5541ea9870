import os
import signal
import threading
import time

import pytest
import torch

import cqs
from benchmarks.cases import Case
from cqs.executors.ray import TaskFailedError, WorkersFailedError
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.pool import Calls
from cqs.executors.ray.tasks.job import ATTEND, Job
from cqs.executors.ray.tasks.run import Run

pytestmark = pytest.mark.ray

PROBLEM = Case("failures", 4000, 4000, num_heads=8, num_kv_heads=8, head_dim=64, is_causal=True)


@pytest.fixture(scope="module")
def tensors():
    problem = PROBLEM.make()
    return problem.query, problem.key, problem.value


@pytest.fixture(scope="module")
def undisturbed(cluster, tensors):
    return cluster.attention(*tensors, is_causal=True, num_tasks=13, verify=True)


def wait_for_workers(cluster, number):
    """Runs wait for nobody who is only starting; tests that kill want all of them there."""
    for _ in range(300):
        cluster.attention(*(torch.zeros(1, 1, 8, 8) for _ in range(3)), num_tasks=1)
        if len(cluster.pids) == number:
            return
        time.sleep(0.1)
    pytest.fail(f"only {len(cluster.pids)} of {number} workers are back")


def run_with_signal(cluster, tensors, number, signal_number):
    """Send a signal to some workers as soon as the second result is there."""
    wait_for_workers(cluster, 4)
    victims, results = cluster.pids[:number], []

    def strike(done, total):
        results.append(done)
        if len(results) == 2:
            for pid in victims:
                os.kill(pid, signal_number)

    future = cluster.submit(*tensors, is_causal=True, num_tasks=13, progress=strike)
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


@pytest.mark.parametrize("number", [1, 3])
def test_killed_workers_do_not_change_a_bit(cluster, tensors, undisturbed, number):
    future, victims = run_with_signal(cluster, tensors, number, signal.SIGKILL)
    assert torch.equal(future.result(timeout=120), undisturbed)
    assert {failure.pid for failure in future.report.failures} >= set(victims)
    assert {index for each in future.report.failures for index in each.lost_tasks}
    assert future.report.reruns >= number
    wait_for_workers(cluster, 4)
    assert not set(victims) & set(cluster.pids)


def test_a_worker_killed_in_the_backward_pass_does_not_change_a_bit(cluster, tensors, monkeypatch):
    def gradients():
        wait_for_workers(cluster, 4)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        output = cluster.attention(*leaves, is_causal=True, num_tasks=13)
        return torch.autograd.grad(output, leaves, tensors[0])

    expected = gradients()
    accept, killed = Job.accept, []

    def kill_after_two(self, group, merged):
        accept(self, group, merged)
        if self.of_pass is ATTEND:
            return
        killed.append(group)
        if len(killed) == 2:
            os.kill(cluster.pids[0], signal.SIGKILL)

    monkeypatch.setattr(Job, "accept", kill_after_two)
    assert all(map(torch.equal, gradients(), expected))
    assert len(killed) == len(set(killed)) == 2 * 13


def test_an_owner_that_fails_before_its_merge_does_not_change_a_bit(
    cluster, tensors, undisturbed, monkeypatch
):
    """The failure arrives together with the last part of a group."""
    runs, struck, collect, process = [], [], Calls.collect, Run._process

    def note(run, answer):
        runs.append(run)
        process(run, answer)

    def strike(calls):
        yield from collect(calls)
        ready = list(runs[-1]._ready) if runs else []
        if ready and len(struck) < 3:
            struck.append(ready[0].owner)
            yield calls.fail(ready[0].owner, RuntimeError("struck"))

    monkeypatch.setattr(Run, "_process", note)
    monkeypatch.setattr(Calls, "collect", strike)
    wait_for_workers(cluster, 4)
    output = cluster.attention(*tensors, is_causal=True, num_tasks=13)
    assert len(struck) == 3 and torch.equal(output, undisturbed)


def test_a_hung_worker_is_killed_and_replaced(cluster, tensors, undisturbed):
    future, (victim,) = run_with_signal(cluster, tensors, 1, signal.SIGSTOP)
    assert torch.equal(future.result(timeout=120), undisturbed)
    (failure,) = future.report.failures
    assert failure.pid == victim and len(failure.lost_tasks) == future.report.reruns
    assert 0 < failure.noticed - future.report.started < future.report.seconds
    wait_for_workers(cluster, 4)
    assert not os.path.exists(f"/proc/{victim}")


def test_failure_of_all_workers_does_not_change_a_bit(cluster, tensors, undisturbed):
    future, victims = run_with_signal(cluster, tensors, 4, signal.SIGKILL)
    assert len(victims) == 4
    assert torch.equal(future.result(timeout=120), undisturbed)
    assert len(future.report.failures) >= 4  # a replacement may stall on a busy machine
    wait_for_workers(cluster, 4)
    assert not set(victims) & set(cluster.pids)


def test_workers_that_failed_between_runs_are_replaced(cluster, tensors, undisturbed):
    wait_for_workers(cluster, 4)
    for pid in cluster.pids[:3]:
        os.kill(pid, signal.SIGKILL)
    assert torch.equal(cluster.attention(*tensors, is_causal=True, num_tasks=13), undisturbed)


@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_task_that_kills_its_workers_is_named(ray_session, tensors, num_actors):
    class Poisoned(TaskActor):
        def run(self, settings, calls, *arguments):
            if any(call.task.index == 3 for call in calls):
                time.sleep(0.5)  # what was computed before arrives
                os.kill(os.getpid(), signal.SIGKILL)
            return super().run(settings, calls, *arguments)

    class PoisonedCluster(cqs.Cluster):
        actor_class = Poisoned

    with PoisonedCluster(num_workers=num_actors, use_gpus=False, max_attempts=2) as cluster:
        with pytest.raises(TaskFailedError, match="task 3 .* 2 workers"):
            cluster.submit(*tensors, num_tasks=7).result(timeout=120)


def test_workers_that_cannot_start_again_are_an_error(ray_session, tensors, tmp_path):
    started = tmp_path / "started"

    class Mortal(TaskActor):
        def describe(self):
            if started.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return super().describe()

    class MortalCluster(cqs.Cluster):
        actor_class = Mortal

    with MortalCluster(num_workers=2, use_gpus=False, max_attempts=2) as cluster:
        started.touch()
        with pytest.raises(WorkersFailedError, match=r"all 2 workers failed; tasks \[0, 1, 2\]"):
            cluster.submit(*tensors, num_tasks=3).result(timeout=120)
        started.unlink()
        cluster.attention(*tensors, num_tasks=3, verify=True)


def test_closing_in_mid_run_cancels_it(ray_session, tensors):
    from concurrent.futures import CancelledError

    cluster = cqs.Cluster(num_workers=1, use_gpus=False)
    future = cluster.submit(*tensors, num_tasks=31)
    queued = cluster.submit(*tensors, num_tasks=31)
    cluster.close()
    for pending in (future, queued):
        with pytest.raises(CancelledError):
            pending.result(timeout=30)


def test_a_progress_function_may_close_the_cluster_but_not_wait_for_it(ray_session, tensors):
    from concurrent.futures import CancelledError

    cluster = cqs.Cluster(num_workers=1, use_gpus=False)
    with pytest.raises(RuntimeError, match="progress"):
        cluster.attention(
            *tensors, num_tasks=3, progress=lambda done, total: cluster.attention(*tensors)
        )
    with pytest.raises(CancelledError):
        cluster.attention(*tensors, num_tasks=7, progress=lambda done, total: cluster.close())
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
