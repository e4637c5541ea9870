"""Attention with patterns on a cluster, whatever the number of tasks."""

import os
import signal
import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from sparse_cases import assert_gradients_right, random_bits, with_pattern
from support.exact import attend

import cqs
from benchmarks.cases import Case
from cqs.patterns import (
    block_sparse,
    causal,
    fixed,
    from_mask,
    per_head,
    sliding_window,
    strided,
)
from cqs.patterns.block_list import BlockList
from cqs.worker.memory import predict_pattern_cost

pytestmark = pytest.mark.ray

CASES = {
    "square": Case("square", 131, 131, num_heads=2, num_kv_heads=2, batch=2),
    "gqa": Case("gqa", 128, 128, num_heads=4, num_kv_heads=2),
    "few-queries": Case("few-queries", 70, 131, num_heads=2, num_kv_heads=1),
    "many-queries": Case("many-queries", 131, 70, num_heads=2, num_kv_heads=1),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SOME_NAMES = ["causal-window", "strided", "longformer", "documents", "block-sparse", "mask"]
SOME_PATTERNS = pytest.mark.parametrize("name", SOME_NAMES)
PER_HEAD = {
    "layouts": lambda: block_sparse(random_bits(4, 9, 9), 16),
    "masks": lambda: from_mask(random_bits(2, 1, 131, 131)),
    "mixed": lambda: per_head([[strided(4), fixed(8, 1), sliding_window(20, 0), causal()]]),
}
EVERY_PER_HEAD = pytest.mark.parametrize("make", PER_HEAD.values(), ids=PER_HEAD)
LONG = Case("long", 4000, 4000, num_heads=8, num_kv_heads=8, head_dim=64)


@SOME_PATTERNS
@EVERY_CASE
def test_patterns_are_exact(cluster, assert_right, case, name):
    """Numbers of workers go round."""
    num_tasks = (4, 7)[(list(CASES).index(case.name) + SOME_NAMES.index(name)) % 2]
    problem = with_pattern(case, name).make()
    assert_right(problem, attend(problem, executor=cluster, num_tasks=num_tasks, verify=True))


@SOME_PATTERNS
def test_gradients_of_patterns_are_exact(cluster, name):
    problem = with_pattern(CASES["gqa"], name).make()
    assert_gradients_right(problem, executor=cluster, num_tasks=7)


@EVERY_CASE
def test_patterns_go_with_is_causal(cluster, assert_right, case):
    case = with_pattern(case, "window")
    problem = case.make()
    answer = cluster.attention(
        problem.query,
        problem.key,
        problem.value,
        pattern=case.pattern,
        is_causal=True,
        num_tasks=7,
        return_lse=True,
    )
    assert_right(replace(case, pattern=case.pattern & causal()).make(), answer)


@EVERY_PER_HEAD
def test_heads_may_have_patterns_of_their_own(cluster, assert_right, make):
    problem = Case("heads", 131, 131, 4, 2, batch=2, pattern=make()).make()
    assert_right(problem, attend(problem, executor=cluster, num_tasks=4, verify=True))


def test_gradients_of_heads_with_patterns_of_their_own_are_exact(cluster):
    problem = Case("heads", 131, 131, 4, 2, pattern=PER_HEAD["mixed"]()).make()
    assert_gradients_right(problem, executor=cluster, num_tasks=3)


def test_a_private_cluster_serves_all_heads(ray_session, monkeypatch):
    started = []
    start = cqs.Cluster.__init__
    monkeypatch.setattr(
        cqs.Cluster, "__init__", lambda self: started.append(1) or start(self, 1, use_gpus=False)
    )
    problem = Case("heads", 64, 64, 4, 4, pattern=per_head([[causal(), strided(4)] * 2])).make()
    torch.testing.assert_close(
        attend(problem, executor="ray", num_tasks=2), attend(problem, num_tasks=2)
    )
    assert started == [1]


def test_a_private_cluster_starts_again_for_gradients(ray_session):
    problem = Case("gradients", 64, 64, 4, 2).make()
    leaves = [tensor.requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    found = [
        torch.autograd.grad(cqs.attention(*leaves, **options).sum(), leaves)
        for options in ({"executor": "ray", "num_tasks": 3}, {})
    ]
    torch.testing.assert_close(*found)


def test_submit_takes_patterns_that_all_heads_share(cluster, assert_right):
    problem = with_pattern(CASES["gqa"], "longformer").make()
    tensors = problem.query, problem.key, problem.value
    future = cluster.submit(*tensors, pattern=problem.pattern, num_tasks=7, return_lse=True)
    assert_right(problem, future.result())


@EVERY_PER_HEAD
def test_submit_computes_heads_of_different_patterns_one_after_another(cluster, assert_right, make):
    pattern, calls = make(), []
    problem = Case("heads", 131, 131, 4, 2, batch=2, pattern=pattern).make()
    future = cluster.submit(
        problem.query,
        problem.key,
        problem.value,
        pattern=pattern,
        num_tasks=4,
        return_lse=True,
        verify=True,
        progress=lambda *numbers: calls.append(numbers),
    )
    assert_right(problem, future.result())
    plans = [(part, part.make_plan(4)) for _, part in problem.parts()]
    report = future.report
    assert [task.index for task in report.tasks] == [
        task.index for _, plan in plans for task in plan.tasks if task.steps
    ]
    assert report.seconds >= report.slowest_seconds > 0 and len(calls) == len(report.tasks)
    total = sum(plan.live_pairs * part.query.shape[1] * len(part.query) for part, plan in plans)
    assert calls == sorted(calls) and calls[-1] == (total, total)


def test_a_cancelled_call_computes_no_further_part(cluster):
    pattern = per_head([[strided(4), fixed(8, 1), sliding_window(20, 0), causal()]])
    problem = Case("heads", 131, 131, 4, 2, pattern=pattern).make()
    started = threading.Event()

    def cancel(done, total):
        assert started.wait(30) and future.cancel()

    tensors = problem.query, problem.key, problem.value
    future = cluster.submit(*tensors, pattern=pattern, num_tasks=1, progress=cancel)
    started.set()
    with pytest.raises(CancelledError):
        future.result(timeout=60)


@pytest.mark.parametrize("name", ["longformer", "mask"])
def test_dropout_is_that_of_this_process(cluster, name):
    problem = with_pattern(CASES["gqa"], name).make()
    options = {"dropout_p": 0.3, "seed": 5, "backend": "reference"}
    expected = attend(problem, num_tasks=1, **options)
    actual = attend(problem, executor=cluster, num_tasks=7, **options)
    torch.testing.assert_close(actual, expected)


def test_tasks_without_live_work_are_handed_to_nobody(cluster, assert_right):
    pattern = sliding_window(1, 0)
    problem = Case("idle", 3, 3, pattern=pattern).make()
    tensors = problem.query, problem.key, problem.value
    idle = [task.index for task in problem.make_plan(7).tasks if not task.steps]
    future = cluster.submit(*tensors, pattern=pattern, num_tasks=7, return_lse=True)
    assert_right(problem, future.result())
    assert 0 < len(idle) < 7
    assert [task.index for task in future.report.tasks] == sorted({*range(7)} - {*idle})


def test_a_pattern_without_pairs_needs_no_actor(cluster):
    problem = with_pattern(CASES["square"], "nothing").make()
    output, lse = attend(problem, executor=cluster, num_tasks=7)
    assert not output.any() and (lse == -torch.inf).all()
    tensors = [t.requires_grad_() for t in (problem.query, problem.key, problem.value)]
    output = cluster.attention(*tensors, pattern=problem.pattern, num_tasks=7)
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), tensors))


def test_a_pattern_is_sent_once_for_all_tasks(cluster, monkeypatch):
    pickled = []

    def spy(self, protocol):
        pickled.append(1)
        return object.__reduce_ex__(self, protocol)

    monkeypatch.setattr(BlockList, "__reduce_ex__", spy)
    problem = with_pattern(CASES["gqa"], "mask").make()
    attend(problem, executor=cluster, num_tasks=13)
    assert len(pickled) == 1


def test_a_killed_worker_does_not_change_a_bit(cluster):
    problem = with_pattern(LONG, "longformer").make()
    tensors = problem.query, problem.key, problem.value
    undisturbed = cluster.attention(*tensors, pattern=problem.pattern, num_tasks=13, verify=True)
    victim, results = cluster.pids[0], []

    def strike(done, total):
        results.append(done)
        if len(results) == 2:
            os.kill(victim, signal.SIGKILL)

    future = cluster.submit(*tensors, pattern=problem.pattern, num_tasks=13, progress=strike)
    assert torch.equal(future.result(timeout=120), undisturbed)
    assert [failure.pid for failure in future.report.failures] == [victim]
    assert future.report.reruns >= 1
    assert victim not in cluster.pids


def test_tasks_with_most_live_pairs_come_first(ray_session):
    pattern = from_mask(torch.ones(9, 9, dtype=torch.bool).tril())
    problem = Case("uneven", 9, 9, pattern=pattern).make()
    live = [task.live_pairs for task in problem.make_plan(7).tasks]
    assert live != sorted(live, reverse=True)
    with cqs.Cluster(num_workers=1, use_gpus=False) as cluster:
        future = cluster.submit(
            problem.query, problem.key, problem.value, pattern=pattern, num_tasks=7
        )
        future.result()
    in_order = sorted(future.report.tasks, key=lambda task: task.started)
    assert [live[task.index] for task in in_order] == sorted(filter(None, live), reverse=True)


@pytest.mark.parametrize(
    ("num_tasks", "name"), [(7, "causal-window"), (7, "longformer"), (1, "dilated")]
)
def test_predicted_bytes_are_those_measured(cluster, num_tasks, name):
    problem = with_pattern(LONG, name).make()
    tensors = problem.query, problem.key, problem.value
    future = cluster.submit(*tensors, pattern=problem.pattern, num_tasks=num_tasks)
    future.result()
    plan = problem.make_plan(num_tasks)
    for task in future.report.tasks:
        cost = predict_pattern_cost(
            plan.task(task.index), problem.shape, task.backend, problem.bound_pattern
        )
        assert (task.bytes_in, task.bytes_out) == (cost.bytes_in, cost.bytes_out)
        assert 0.95 * cost.peak_bytes <= task.peak_bytes <= 1.05 * cost.peak_bytes
