"""Clusters that are opened inside of Ray, and workers with another version of cqs."""

import asyncio
import time

import pytest
import torch

import cqs
from cqs.executors.ray import pool

pytestmark = pytest.mark.ray


@pytest.mark.long
def test_a_cluster_in_an_async_actor_uses_the_ray_of_the_actor(ray_session):
    """Replicas of Ray Serve are such actors."""

    class Replica:
        def __init__(self):
            self.cluster = cqs.Cluster(num_workers=1, use_gpus=False)

        async def attend(self, *tensors):
            return await asyncio.to_thread(self.cluster.attention, *tensors, num_tasks=7)

        async def attend_in_the_event_loop(self, *tensors):
            return self.cluster.attention(*tensors, num_tasks=7)

        async def open_another(self):
            with cqs.Cluster(num_workers=1, use_gpus=False, address="auto"):
                pass

        async def close(self):
            self.cluster.close()
            import ray

            return ray.is_initialized(), ray.get_runtime_context().get_node_id()

    tensors = [torch.randn(1, 2, 60, 8) for _ in range(3)]
    expected = cqs.attention(*tensors)
    free = ray_session.available_resources()["CPU"]
    replica = ray_session.remote(num_cpus=0)(Replica).remote()
    results = [replica.attend.remote(*tensors), replica.attend.remote(*tensors)]
    results.append(replica.attend_in_the_event_loop.remote(*tensors))
    for output in ray_session.get(results, timeout=120):
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="address must be left out .* got 'auto'"):
        ray_session.get(replica.open_another.remote())
    is_initialized, node = ray_session.get(replica.close.remote(), timeout=60)
    assert is_initialized and node == ray_session.get_runtime_context().get_node_id()
    deadline = time.monotonic() + 30
    while ray_session.available_resources()["CPU"] < free:  # others may return theirs too
        assert time.monotonic() < deadline, ray_session.available_resources()
        time.sleep(0.1)


def test_a_cluster_is_not_sent_to_a_task(ray_session):
    task = ray_session.remote(num_cpus=0)(lambda cluster: None)
    with cqs.Cluster(num_workers=1, use_gpus=False) as cluster:
        with pytest.raises(TypeError, match="Cluster cannot be sent to another process"):
            task.remote(cluster)


def test_a_worker_with_another_version_is_named(ray_session, monkeypatch):
    monkeypatch.setattr(pool, "__version__", "9.9")
    node = ray_session.get_runtime_context().get_node_id()
    with pytest.raises(ValueError, match=f"version 9.9 .*got {cqs.__version__} on node {node}"):
        cqs.Cluster(num_workers=1, use_gpus=False)
