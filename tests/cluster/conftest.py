"""A small cluster, which joins Ray beside that of four workers."""

import pytest

import cqs
from benchmarks.cases import Case


@pytest.fixture(scope="session")
def pair(ray_session):
    """Two workers that tests kill or stop."""
    with cqs.Cluster(num_workers=2, use_gpus=False, stall_timeout=60, max_attempts=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tensors():
    """Queries, keys and values for calls of 13 tasks during which workers fail."""
    problem = Case("failures", 3000, 3000, 8, 4, 64, is_causal=True).make()
    return problem.query, problem.key, problem.value
