"""Tasks on a GPU, for tensors of the host and of the GPU itself."""

import gc
import itertools
import random

import pytest
import torch
from calls import assert_kills_change_no_bit, both_passes
from support.exact import exact_answer, tensors_of

import cqs
from benchmarks.cases import Case
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.tasks.outbox import Outbox

pytestmark = [pytest.mark.gpu, pytest.mark.ray]

CASE = Case("gpu", 3000, 3000, num_heads=4, num_kv_heads=2, head_dim=64, is_causal=True)


@pytest.fixture(scope="module")
def gpu_cluster():
    with cqs.Cluster(num_workers=1, object_store_memory=2 * 2**30) as cluster:
        yield cluster


def leaves(problem, device, layout="contiguous"):
    tensors = [t.detach().to(device) for t in tensors_of(problem)]
    if layout == "transposed":  # memory in the order of [batch, seqlen, heads, dim]
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_tasks", [1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_placement_is_exact(gpu_cluster, device, num_tasks, layout, dtype):
    problem = CASE.make(dtype=dtype)
    exact = exact_answer(problem)
    tensors = leaves(problem, device, layout)
    output, lse = gpu_cluster.attention(
        *tensors, is_causal=True, num_tasks=num_tasks, return_lse=True, verify=True
    )
    bound = {torch.bfloat16: 0.02, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    assert output.device.type == lse.device.type == device
    assert (output.detach().cpu() - exact.output).abs().max() < bound
    assert (lse.detach().cpu() - exact.lse).abs().max() < bound
    local = leaves(problem, "cuda")
    expected = cqs.attention(*local, is_causal=True)
    gradients = torch.autograd.grad(output.sum(), tensors)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), local), strict=True):
        scale = theirs.abs().max().item()
        assert (ours.cpu() - theirs.cpu()).abs().max() < bound * max(scale, 1)


def test_tensors_of_the_gpu_do_not_pass_through_the_store(gpu_cluster, monkeypatch):
    used, put_settings = [], Outbox.put_settings

    def note(outbox, *arguments):
        used.append(outbox.is_on_gpu)
        return put_settings(outbox, *arguments)

    monkeypatch.setattr(Outbox, "put_settings", note)
    problem = CASE.make()
    tensors = [tensor.detach() for tensor in leaves(problem, "cuda")]
    first = gpu_cluster.submit(*tensors, is_causal=True, num_tasks=7)
    output = first.result()
    assert first.report.slowest["unload"] < 0.01
    assert {task.device for task in first.report.tasks} == {"cuda"}
    monkeypatch.setattr(gpu_cluster._pool, "obstacle", "as if it failed")
    assert torch.equal(gpu_cluster.attention(*tensors, is_causal=True, num_tasks=7), output)
    assert used == [True, False]


def test_memory_that_was_made_in_inference_mode_serves_other_calls(gpu_cluster):
    problem = CASE.make()
    tensors = [tensor.detach() for tensor in leaves(problem, "cuda")]
    gpu_cluster._pool.shared_memories.clear()
    with torch.inference_mode():
        first = gpu_cluster.attention(*tensors, is_causal=True, num_tasks=7)
    second = gpu_cluster.attention(*tensors, is_causal=True, num_tasks=7)
    assert torch.equal(first, second)
    assert list(gpu_cluster._pool.shared_memories) == [str(tensors[0].device)]


def test_memory_of_a_call_is_freed(gpu_cluster):
    problem = CASE.make()
    tensors = [tensor.detach() for tensor in leaves(problem, "cuda")]
    for _ in range(2):
        output = gpu_cluster.attention(*tensors, is_causal=True, num_tasks=7)
        del output
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        future = gpu_cluster.submit(*tensors, is_causal=True, num_tasks=31)
        future.cancel()
        gpu_cluster.attention(*tensors, is_causal=True, num_tasks=7)
    del future
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_gpu_with_little_memory_computes_the_same(gpu_cluster):
    class TightActor(TaskActor):
        """Has little memory beyond what it has allocated at its start."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            total = torch.cuda.get_device_properties(0).total_memory
            room = torch.cuda.memory_reserved() + 90 * 2**20
            torch.cuda.set_per_process_memory_fraction(room / total)

    class TightCluster(cqs.Cluster):
        actor_class = TightActor

    case = Case("tight", 16384, 16384, num_heads=16, num_kv_heads=16, head_dim=64)
    problem = case.make(dtype=torch.bfloat16)
    tensors = problem.query, problem.key, problem.value
    expected = gpu_cluster.attention(*tensors, num_tasks=31)
    gpu_cluster.close()
    with TightCluster(num_workers=1, object_store_memory=2 * 2**30) as tight:
        assert torch.equal(tight.attention(*tensors, num_tasks=31), expected)
        with pytest.raises(torch.OutOfMemoryError, match="task 0 of 1 requires"):
            tight.attention(*tensors, num_tasks=1)


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
                patch.setattr(cluster._pool, "obstacle", "as if it failed")
                expected = both_passes(cluster, tensors, num_tasks=num_tasks)
            assert_kills_change_no_bit(cluster, tensors, expected, 1, choose, num_tasks=num_tasks)
        assert not cluster._pool.obstacle
