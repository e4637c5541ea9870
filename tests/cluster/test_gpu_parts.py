"""Actors on several GPUs: parts stay on the GPU of their actor, and others read them there."""

import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch

import cqs
from benchmarks.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.ray]


def both_passes(cluster, tensors, num_tasks):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = cluster.attention(*leaves, is_causal=True, num_tasks=num_tasks)
    return output.detach(), *torch.autograd.grad(output, leaves, tensors[0])


def test_no_failure_changes_a_bit():
    if (num_gpus := torch.cuda.device_count()) < 2:
        pytest.skip("needs 2 GPUs")
    problem = Case("parts", 20000, 20000, num_heads=16, num_kv_heads=8, head_dim=64).make(
        torch.bfloat16
    )
    host = problem.query, problem.key, problem.value
    choose = random.Random(0)
    with cqs.Cluster(num_workers=num_gpus, object_store_memory=4 * 2**30) as cluster:
        for tensors, num_tasks in itertools.product(
            (host, [tensor.cuda() for tensor in host]), (num_gpus, 13)
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cluster._pool, "shares_gpu_memory", False)
                expected = both_passes(cluster, tensors, num_tasks)
            for _ in range(2):
                start = time.monotonic()
                found = both_passes(cluster, tensors, num_tasks)
                seconds = time.monotonic() - start
                assert all(map(torch.equal, found, expected))
            victim, moment = choose.choice(cluster.pids), choose.uniform(0, seconds)
            timer = threading.Timer(moment, os.kill, (victim, signal.SIGKILL))
            timer.start()
            found = both_passes(cluster, tensors, num_tasks)
            timer.join()
            assert all(map(torch.equal, found, expected)), (num_tasks, moment)
            while len(cluster.pids) < num_gpus:
                cluster.attention(*(tensor[:, :, :64] for tensor in tensors))
        assert cluster._pool.shares_gpu_memory
