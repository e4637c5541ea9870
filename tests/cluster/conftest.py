import os

import pytest

import cqs


@pytest.fixture(scope="session")
def ray_session():
    """A Ray of the caller's own with four GPUs that do not exist: clusters join and leave it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", "t" * 64)
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=12,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=400 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster(ray_session):
    with cqs.Cluster(num_workers=4, use_gpus=False, stall_timeout=5) as cluster:
        yield cluster
