"""Actors on several GPUs: parts stay on the GPU of their actor, and others read them there."""

import itertools
import random

import pytest
import torch
from calls import assert_kills_change_no_bit, both_passes, tensors_of

import cqs
from benchmarks.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.ray]


def test_no_failure_changes_a_bit():
    if (num_gpus := torch.cuda.device_count()) < 2:
        pytest.skip("needs 2 GPUs")
    case = Case("parts", 20000, 20000, num_heads=16, num_kv_heads=8, head_dim=64)
    host, choose = tensors_of(case.make(torch.bfloat16)), random.Random(0)
    with cqs.Cluster(num_workers=num_gpus, object_store_memory=4 * 2**30) as cluster:
        for tensors, num_tasks in itertools.product(
            (host, [tensor.cuda() for tensor in host]), (num_gpus, 13)
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cluster._pool, "shares_memory", False)
                expected = both_passes(cluster, tensors, num_tasks=num_tasks)
            assert_kills_change_no_bit(cluster, tensors, expected, 1, choose, num_tasks=num_tasks)
        assert cluster._pool.shares_memory
