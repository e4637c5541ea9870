"""Calls on clusters, failures of workers during them, and clusters of a test's own actors."""

import os
import threading
import time
from dataclasses import replace

import pytest
import torch

import cqs


def cluster_of(actor, num_workers=1, **options):
    """Start a cluster without GPUs whose actors are of a class."""
    kind = type("OwnCluster", (cqs.Cluster,), {"actor_class": actor})
    return kind(num_workers=num_workers, use_gpus=False, **options)


def both_passes(cluster, tensors, **options):
    """Return a causal output and the gradients of 13 tasks, unless options differ."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = cluster.attention(*leaves, **{"is_causal": True, "num_tasks": 13} | options)
    return output.detach(), *torch.autograd.grad(output, leaves, tensors[0])


def are_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def notice_stalls_after(seconds, cluster, monkeypatch):
    """Replace workers of a shared cluster sooner than others, which compile on busy machines."""
    policy = replace(cluster._pool.retry_policy, stall_timeout=seconds)
    monkeypatch.setattr(cluster._pool, "retry_policy", policy)


def wait_for_workers(cluster, number):
    """Calls do not wait for workers that only start; tests that kill want all to be there."""
    for _ in range(300):
        cluster.attention(*(torch.zeros(1, 1, 8, 8) for _ in range(3)), num_tasks=1)
        if len(cluster.pids) == number:
            return
        time.sleep(0.1)
    pytest.fail(f"only {len(cluster.pids)} of {number} workers are back")


def at_second_result(strike):
    """Return a progress function that calls ``strike`` at the second result."""
    results = []

    def progress(done, total):
        results.append(done)
        if len(results) == 2:
            strike()

    return progress


def assert_kills_change_no_bit(cluster, tensors, expected, number, choose, **options):
    """Kill a random worker at a random moment of both passes, a number of times."""
    num_workers = len(cluster._pool.actors)  # those that only start are not in pids
    for _ in range(2):  # the first may be slow
        start = time.monotonic()
        assert are_equal(both_passes(cluster, tensors, **options), expected)
        seconds = time.monotonic() - start
    for _ in range(number):
        victim, moment = choose.choice(cluster.pids), choose.uniform(0, seconds)
        # The command, because a worker may have been replaced by then.
        timer = threading.Timer(moment, os.system, (f"kill -9 {victim} 2> /dev/null",))
        timer.start()
        results = both_passes(cluster, tensors, **options)
        timer.join()
        assert are_equal(results, expected), (victim, moment)
        wait_for_workers(cluster, num_workers)
