"""A GPU out of memory: the message names what was predicted, and how many tasks would fit."""

import re
from itertools import product
from unittest.mock import Mock

import pytest
import torch

import cqs
from benchmarks.cases import Case
from cqs.executors.ray.actor import TaskActor
from cqs.executors.shortage import choose_num_tasks, explain_shortage
from cqs.patterns import longformer, sliding_window
from cqs.worker.memory import predict_pattern_cost

PROBLEM = Case("long", 4096, 4096, 8, 8, 64).make()
TENSORS = PROBLEM.query, PROBLEM.key, PROBLEM.value


SPARSE = Case("long", 4096, 4096, 8, 8, 64, pattern=longformer(512, 16)).make()


def peaks(problem, num_tasks, backend):
    """Return the predicted peak of every task."""
    plan = problem.make_plan(num_tasks)
    if problem.pattern is None:
        costs = [plan.predict_cost(w, problem.shape, backend) for w in range(num_tasks)]
    else:
        given = problem.shape, backend, problem.bound_pattern
        costs = [predict_pattern_cost(task, *given) for task in plan.tasks]
    return [cost.peak_bytes for cost in costs]


@pytest.mark.parametrize(
    ("problem", "backend"),
    [*product([PROBLEM, SPARSE], ["cpu", "triton", "reference"]), (PROBLEM, "cudnn")],
    ids=lambda each: each if isinstance(each, str) else str(each.pattern),
)
def test_the_advice_is_the_smallest_number_of_tasks_that_fits(problem, backend):
    plan, limit = problem.make_plan(3), max(peaks(problem, 13, backend))
    message = explain_shortage(problem, plan, backend, int(limit / 0.9) + 1, index=1)
    needed = peaks(problem, 3, backend)[1]
    assert f"task 1 of 3 requires {needed / 2**30:.3g} GiB" in message
    assert f"num_tasks=13 each task would require {limit / 2**30:.3g} GiB: " in message
    assert "attention(..., num_tasks=13)" in message
    smaller = explain_shortage(problem, plan, backend, int(limit / 0.9) - 8, index=1)
    assert "num_tasks=13" not in smaller and "num_tasks=" in smaller
    hopeless = explain_shortage(problem, plan, backend, 1000, index=1)
    assert hopeless.endswith("No number of tasks up to 993 would help")
    whole = explain_shortage(problem, plan, "triton", 2**40)
    assert f"this call requires {peaks(problem, 1, 'triton')[0] / 2**30:.3g} GiB" in whole


def test_memory_that_others_occupy_is_named():
    plan = PROBLEM.make_plan(3)
    needed = plan.predict_cost(1, PROBLEM.shape, "triton").peak_bytes
    alone = explain_shortage(PROBLEM, plan, "triton", needed, index=1)
    shared = explain_shortage(PROBLEM, plan, "triton", 3 * needed, index=1)
    assert "processes occupy" in shared and "processes occupy" not in alone
    assert "num_tasks=" in shared


def test_plans_that_cannot_fit_are_not_made(monkeypatch):
    """Levelling the work of many tasks takes long; some task holds its share of everything."""
    make = Mock(wraps=cqs.problem._cached_plan)
    monkeypatch.setattr("cqs.problem._cached_plan", make)
    problem = Case("long", 4096, 4096, pattern=sliding_window(64, 0)).make()
    message = explain_shortage(problem, problem.make_plan(3), "triton", 1000, index=0)
    assert message.endswith("No number of tasks up to 993 would help")
    assert max(call.kwargs["num_tasks"] for call in make.call_args_list) == 3


def test_in_this_process(monkeypatch):
    fail = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("cqs.executors.local.Worker.run_steps", fail)
    monkeypatch.setattr("cqs.executors.local.memory_of", lambda device: 2**25)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        cqs.attention(*TENSORS, num_tasks=2)
    assert re.search(
        r"this call requires 0\.\d+ GiB by prediction \(forward pass, backend 'cpu'\)",
        str(raised.value),
    )
    assert "the GPU has 0.0312 GiB" in str(raised.value) and "num_tasks=" in str(raised.value)


@pytest.mark.ray
def test_on_a_cluster(ray_session):
    class Small(TaskActor):
        def run(self, settings, calls, *arguments):
            raise torch.OutOfMemoryError("CUDA out of memory", calls[0].task.index, None, 2**25)

    class SmallCluster(cqs.Cluster):
        actor_class = Small

    with SmallCluster(num_workers=1, use_gpus=False) as cluster:
        with pytest.raises(torch.OutOfMemoryError, match=r"task \d of 7 requires .*num_tasks=\d+"):
            cluster.attention(*TENSORS, num_tasks=7)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_on_a_gpu(backend):
    torch.cuda.empty_cache()
    shape = 1, 16, 65536, 128
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    capacity = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / capacity)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="this call requires 1.*num_tasks="):
            cqs.attention(*tensors, num_tasks=7, backend=backend)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("num_workers", [1, 4, 9])
def test_tasks_are_as_many_as_workers_unless_memory_is_too_small(num_workers, caplog):
    least = max(peaks(PROBLEM, num_workers, None)) / 0.9 + 1
    assert choose_num_tasks(PROBLEM, num_workers, int(least) + 1) == num_workers
    with caplog.at_level("INFO", "cqs"):
        assert (
            choose_num_tasks(PROBLEM, num_workers, int(max(peaks(PROBLEM, 13, None)) / 0.9) + 1)
            == 13
        )
    assert f"num_tasks=13: the {num_workers} tasks" in caplog.text
    assert choose_num_tasks(PROBLEM, num_workers, 1000) == num_workers
