"""Workers that come and go during a call: none changes a bit, and none computes for nothing."""

import os
import random
import signal
import threading
import time
from collections import defaultdict

import pytest
import torch
from calls import are_equal, at_second_result, both_passes, cluster_of, wait_for_workers

from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.tasks.job import DIFFERENTIATE

pytestmark = pytest.mark.ray
NUM_TASKS = 40


def noting(folder, num_workers=1):
    """A cluster whose actors note the tasks that they begin and end in files.

    They wait before a task while there is a file ``forward`` or ``backward``.
    """

    class Noting(TaskActor):
        def _run_task(self, settings, call, *arguments):
            name = "backward" if settings.task_pass == DIFFERENTIATE else "forward"
            task = f"{settings.number} {name} {call.task.index},{os.getpid()}"
            (folder / f"begun,{task},{time.time_ns()}").touch()
            while (folder / name).exists():
                time.sleep(0.01)
            results = super()._run_task(settings, call, *arguments)
            time.sleep(0.02)
            (folder / f"ended,{task},{time.time_ns()}").touch()
            return results

    return cluster_of(Noting, num_workers)


def processes(folder, event):
    """Return the processes that have begun or ended tasks, one for each time, by task."""
    pids = defaultdict(list)
    for path in folder.glob(f"{event},*"):
        _, task, pid, _ = path.name.split(",")
        pids[task].append(int(pid))
    return pids


def await_processes(folder, event, name, number):
    for _ in range(3000):
        pids = {pid for task, of in processes(folder, event).items() if name in task for pid in of}
        if len(pids) == number:
            return pids
        time.sleep(0.01)
    pytest.fail(f"only {pids} have {event} a task")


def assert_only_failures_repeat_tasks(folder, killed):
    begun = processes(folder, "begun")
    for task, pids in processes(folder, "ended").items():
        assert len(pids) == 1 or killed & {*begun[task]}, task


@pytest.fixture(scope="module")
def expected(cluster, tensors):
    return both_passes(cluster, tensors, num_tasks=NUM_TASKS)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_workers_that_join_compute_tasks_of_the_running_call(
    ray_session, tmp_path, tensors, expected, name
):
    gate, results = tmp_path / name, []
    with noting(tmp_path) as cluster:
        gate.touch()
        call = threading.Thread(
            target=lambda: results.extend(both_passes(cluster, tensors, num_tasks=NUM_TASKS))
        )
        call.start()
        await_processes(tmp_path, "begun", name, 1)
        cluster.scale(4)
        await_processes(tmp_path, "begun", name, 4)
        gate.unlink()
        victim = max(await_processes(tmp_path, "ended", name, 4))
        os.kill(victim, signal.SIGKILL)
        call.join()
    assert are_equal(results, expected)
    assert_only_failures_repeat_tasks(tmp_path, {victim})


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_of_joins_and_kills_changes_a_bit(
    ray_session, tmp_path, tensors, expected, seed
):
    choose, killed, results = random.Random(seed), set(), []
    with noting(tmp_path, 1 + seed % 4) as cluster:
        call = threading.Thread(
            target=lambda: results.extend(both_passes(cluster, tensors, num_tasks=NUM_TASKS))
        )
        call.start()
        while call.is_alive():
            call.join(choose.uniform(0, 2))
            if choose.random() < 0.6:
                cluster.scale(choose.randint(1, 4))
            elif cluster.pids and len(killed) < 4:
                killed.add(victim := choose.choice(cluster.pids))
                os.system(f"kill -9 {victim} 2> /dev/null")  # it may have been stopped
    assert are_equal(results, expected), killed
    assert_only_failures_repeat_tasks(tmp_path, killed)


def test_a_call_outlives_its_only_worker(ray_session, tmp_path, tensors, expected):
    """Its failure is noticed within a second, unless the machine is busy."""
    delays, struck = [], []

    def strike():
        struck.append((cluster.pids[0], time.time()))
        os.kill(cluster.pids[0], signal.SIGKILL)

    with noting(tmp_path) as cluster:
        while not delays or min(delays) > 1 and len(delays) < 3:
            options = {"is_causal": True, "num_tasks": NUM_TASKS}
            future = cluster.submit(*tensors, **options, progress=at_second_result(strike))
            assert torch.equal(future.result(timeout=120), expected[0])
            (failure,), (victim, moment) = future.report.failures, struck[-1]
            (_, pid) = list(future.report.by_process)[-1]
            assert failure.pid == victim and (pid,) == cluster.pids != (victim,)
            delays.append(failure.noticed - moment)
            assert 0 < future.report.rerun_seconds < future.report.seconds
        assert min(delays) < 1


def test_workers_that_are_too_many_end_after_the_call(ray_session, tensors, expected, tmp_path):
    (tmp_path / "forward").touch()
    options = {"is_causal": True, "num_tasks": NUM_TASKS}
    with noting(tmp_path, 3) as cluster:
        future = cluster.submit(*tensors, **options)
        await_processes(tmp_path, "begun", "forward", 3)
        cluster.scale(1)
        (tmp_path / "forward").unlink()
        assert torch.equal(future.result(timeout=60), expected[0]) and not future.report.failures
        assert len(future.report.by_process) == 3 and future.report.rerun_seconds == 0
        assert torch.equal(cluster.attention(*tensors, **options), expected[0])
        assert len(cluster.pids) == 1 and "1 workers" in repr(cluster)
        cluster.scale(99)  # most of them find no room
        assert torch.equal(cluster.attention(*tensors, **options), expected[0])
        cluster.scale(2)
        wait_for_workers(cluster, 2)
        shards = cluster.shard(*tensors)
        with pytest.raises(ValueError, match="sharded sequences exist"):
            cluster.scale(1)
        assert len(shards.shapes) == 2
        cluster.attention(shards, is_causal=True, verify=True)
        del shards
        cluster.scale(3)
        shards = cluster.shard(*tensors)
        cluster.attention(shards, is_causal=True, verify=True)
        assert len(shards.shapes) == 3


def test_sharded_sequences_keep_their_workers(ray_session, tmp_path, tensors):
    """One that waits for a call during which the cluster is scaled, and one that was lost."""
    struck = []

    def scale_once(done, total):
        if not struck:
            struck.append(time.sleep(1))  # the other thread has come to wait
            cluster.scale(1)

    with noting(tmp_path, 3) as cluster:
        cluster.submit(*tensors, num_tasks=NUM_TASKS, progress=scale_once)
        shards = cluster.shard(*tensors)
        assert len(shards.shapes) == 3 and are_equal(shards.to_local(), tensors)
        output = cluster.attention(shards, is_causal=True)
        os.kill(cluster.pids[1], signal.SIGKILL)
        shards = shards.map(lambda query, key, value: query + 1)
        with pytest.raises(ValueError, match="got 2"):
            cluster.scale(1)
        assert output.to_local().shape == tensors[0].shape and "3 workers" in repr(cluster)
