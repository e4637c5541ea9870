"""Workers killed at random moments: no bit of outputs and gradients changes."""

import os
import random
import signal
import threading
import time

import pytest
import torch

import cqs
from benchmarks.cases import Case

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_MOMENTS = 40


def both_passes(cluster, tensors):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = cluster.attention(*leaves, is_causal=True, num_tasks=13)
    return output.detach(), *torch.autograd.grad(output, leaves, tensors[0])


def test_no_moment_changes_a_bit(ray_session):
    problem = Case("kills", 3000, 3000, num_heads=8, num_kv_heads=4, head_dim=64).make()
    tensors = problem.query, problem.key, problem.value
    choose, expected, seconds, struck = random.Random(0), None, 0.0, 0
    for num_workers in (1, 2, 3, 4):
        with cqs.Cluster(num_workers, use_gpus=False) as cluster:
            for _ in range(2):  # the first start may be slow
                start = time.monotonic()
                found = both_passes(cluster, tensors)
                seconds = time.monotonic() - start
            expected = expected or found
            assert all(map(torch.equal, found, expected)), num_workers
            for _ in range(NUM_MOMENTS // 4):
                victim, moment = choose.choice(cluster.pids), choose.uniform(0, seconds)
                timer = threading.Timer(moment, os.kill, (victim, signal.SIGKILL))
                timer.start()
                found = both_passes(cluster, tensors)
                timer.join()
                assert all(map(torch.equal, found, expected)), (num_workers, moment)
                struck += 1
                cluster.attention(*tensors, num_tasks=num_workers)  # waits for the replacement
    assert struck == NUM_MOMENTS
