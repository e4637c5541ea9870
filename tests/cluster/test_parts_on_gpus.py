"""Parts that stay where they were computed, read there by the actor that merges: any moment of
failure leaves the result unchanged. Actors on the CPU exchange them through files."""

import os
import random
import signal

import pytest
import torch
from calls import are_equal, assert_kills_change_no_bit, both_passes

import cqs
from cqs.executors.ray.actor import TaskActor

pytestmark = pytest.mark.ray


def like_gpus(folder, monkeypatch, *, num_workers=2, readable=True, is_short=False, kills=False):
    """A cluster whose actors leave parts in files, which are lost if their actor has failed.

    Args:
        folder: Where the files are.
        readable: Whether other actors can read the files.
        is_short: Whether an actor with such files has too little memory for the next task.
        kills: Whether the first read of a part kills the actor that has left it.
    """

    class Part:
        def __init__(self, tensor, number):
            self.pid, self.path = os.getpid(), folder / f"{os.getpid()}-{number}"
            torch.save(tensor, self.path)

    class Keeping(TaskActor):
        num_parts = 0

        def _make_inputs(self):
            from cqs.executors.ray.pool import MemoryNotSharedError
            from cqs.executors.ray.tasks.inputs import Inputs

            class FileInputs(Inputs):
                def tensor(self, sent):
                    if not isinstance(sent, Part):
                        return super().tensor(sent)
                    if kills and not (folder / "killed").exists():
                        (folder / "killed").touch()
                        os.kill(sent.pid, signal.SIGKILL)
                        raise MemoryNotSharedError("its process was killed")
                    if not readable or not os.path.exists(f"/proc/{sent.pid}/fd/0"):
                        raise MemoryNotSharedError("the part cannot be read")
                    return torch.load(sent.path)

            return FileInputs()

        def _export(self, tensors):
            first, self.num_parts = self.num_parts, self.num_parts + len(tensors)
            return [Part(each, first + i) for i, each in enumerate(tensors)]

        def _load(self, *arguments):
            from cqs.executors.ray import actor

            if is_short and self.num_parts:
                self.num_parts = 0
                actor.memory_of = lambda device: 2**30
                self._backend = "sdpa"
                raise torch.OutOfMemoryError("as if out of memory")
            super()._load(*arguments)

    class KeepingCluster(cqs.Cluster):
        actor_class = Keeping

    cluster = KeepingCluster(num_workers=num_workers, use_gpus=False)
    pool = cluster._pool
    monkeypatch.setattr(pool, "share_host", lambda one, other: pool.shares_gpu_memory)
    return cluster


@pytest.fixture(scope="module")
def expected(cluster, tensors):
    return both_passes(cluster, tensors)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 4])
def test_parts_of_a_failed_actor_are_computed_again(
    ray_session, tmp_path, monkeypatch, tensors, expected, num_workers
):
    with like_gpus(tmp_path, monkeypatch, num_workers=num_workers) as cluster:
        choose = random.Random(num_workers)
        assert_kills_change_no_bit(cluster, tensors, expected, 2, choose)
        assert cluster._pool.shares_gpu_memory and any(tmp_path.iterdir())


def test_a_merge_whose_parts_are_lost_is_repeated(
    ray_session, tmp_path, monkeypatch, tensors, expected
):
    with like_gpus(tmp_path, monkeypatch, kills=True) as cluster:
        future = cluster.submit(*tensors, is_causal=True, num_tasks=13)
        assert torch.equal(future.result(), expected[0])
        assert (tmp_path / "killed").exists()
        assert future.report.reruns > 0 and future.report.failures
        assert cluster._pool.shares_gpu_memory


@pytest.mark.long
def test_parts_that_nobody_can_read_pass_through_the_store(
    ray_session, tmp_path, monkeypatch, tensors, expected
):
    with like_gpus(tmp_path, monkeypatch, readable=False) as cluster:
        assert are_equal(both_passes(cluster, tensors), expected)
        assert not cluster._pool.shares_gpu_memory
        number = len(list(tmp_path.iterdir()))
        assert are_equal(both_passes(cluster, tensors), expected)
        assert len(list(tmp_path.iterdir())) == number > 0


@pytest.mark.long
def test_a_run_without_memory_for_parts_is_repeated_without_them(
    ray_session, tmp_path, monkeypatch, tensors, expected
):
    with like_gpus(tmp_path, monkeypatch, is_short=True) as cluster:
        assert are_equal(both_passes(cluster, tensors), expected)
        assert any(tmp_path.iterdir())
        assert cluster._pool.shares_gpu_memory, "the next run tries again"
        seen = []
        cluster.attention(
            *tensors, num_tasks=13, progress=lambda done, total: seen.append((done, total))
        )
        assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)
