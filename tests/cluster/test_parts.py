"""Parts that stay where they were computed, read there by the actor that merges: any moment of
failure leaves the result unchanged."""

import os
import random
import signal

import pytest
import torch
from calls import are_equal, assert_kills_change_no_bit, both_passes, cluster_of

from cqs.executors.ray.actor import TaskActor

pytestmark = pytest.mark.ray


def with_parts(folder, *, num_workers=2, is_readable=True, is_short=False, kills=False):
    """A cluster whose actors note in files that they have left parts.

    Args:
        folder: Where the files are.
        num_workers: Number of actors.
        is_readable: Whether other actors can read the parts.
        is_short: Whether an actor with such parts has too little memory for the next task.
        kills: Whether the first read of a part kills the actor that has left it.
    """

    class Keeping(TaskActor):
        def _export(self, settings, parts):
            places = super()._export(settings, parts)
            if isinstance(places, list):  # of locations
                (folder / places[0][1][0].handle.decode().split()[1]).touch()
            return places

        def _merge_group(self, settings, call):
            from cqs.executors.ray.pool import MemoryNotSharedError

            parts = [part for part in call.parts if isinstance(part, list)]
            others = {int(part[0][1][0].handle.split(b"/")[2]) for part in parts} - {os.getpid()}
            if others and not is_readable:
                raise MemoryNotSharedError("the part cannot be read")
            if others and kills and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(min(others), signal.SIGKILL)
            return super()._merge_group(settings, call)

        def _run_task(self, settings, *arguments):
            from cqs.executors.ray import actor

            if is_short and settings.shares_parts and any(folder.iterdir()):
                actor.memory_of = lambda device: 2**30
                self._backend = "sdpa"
                raise torch.OutOfMemoryError("as if out of memory")
            return super()._run_task(settings, *arguments)

    return cluster_of(Keeping, num_workers)


@pytest.fixture(scope="module")
def expected(cluster, tensors):
    return both_passes(cluster, tensors)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 4])
def test_parts_of_a_failed_actor_are_computed_again(
    ray_session, tmp_path, tensors, expected, num_workers
):
    with with_parts(tmp_path, num_workers=num_workers) as cluster:
        choose = random.Random(num_workers)
        assert_kills_change_no_bit(cluster, tensors, expected, 2, choose)
        assert not cluster._pool.obstacle and any(tmp_path.iterdir())


def test_a_merge_whose_parts_are_lost_is_repeated(ray_session, tmp_path, tensors, expected):
    with with_parts(tmp_path, kills=True) as cluster:
        future = cluster.submit(*tensors, is_causal=True, num_tasks=13)
        assert torch.equal(future.result(), expected[0])
        assert (tmp_path / "killed").exists()
        assert future.report.reruns > 0 and future.report.failures
        assert not cluster._pool.obstacle


@pytest.mark.long
def test_parts_that_nobody_can_read_pass_through_the_store(
    ray_session, tmp_path, tensors, expected
):
    with with_parts(tmp_path, is_readable=False) as cluster:
        for _ in range(5):  # a merge whose owner computes the lost parts itself succeeds
            assert are_equal(both_passes(cluster, tensors), expected)
        transport = cluster.submit(*tensors).report.transport
        assert transport == "object store: the part cannot be read"
        number = len(list(tmp_path.iterdir()))
        assert are_equal(both_passes(cluster, tensors), expected)
        assert len(list(tmp_path.iterdir())) == number > 0


@pytest.mark.long
def test_a_run_without_memory_for_parts_is_repeated_without_them(
    ray_session, tmp_path, tensors, expected
):
    with with_parts(tmp_path, is_short=True) as cluster:
        assert are_equal(both_passes(cluster, tensors), expected)
        assert any(tmp_path.iterdir())
        assert not cluster._pool.obstacle, "the next run tries again"
        seen = []
        cluster.attention(*tensors, num_tasks=13, progress=lambda *counts: seen.append(counts))
        assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)
