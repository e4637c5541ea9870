import itertools
import os
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from calls import are_equal, cluster_of
from support.exact import attend, tensors_of

import cqs
from benchmarks.cases import CASES, Case
from cqs.executors.ray import pool
from cqs.executors.ray.actor import TaskActor
from cqs.executors.ray.blob import Blob
from cqs.executors.verify import VerificationError
from cqs.patterns import causal, dilated, fixed, longformer, per_head, sliding_window, strided
from cqs.scheduler import Quorums
from cqs.worker.memory import predict_pattern_cost

pytestmark = pytest.mark.ray

LARGE = Case("large", 3000, 3000, num_heads=8, num_kv_heads=8, head_dim=64, is_causal=True)
LONG = replace(LARGE, is_causal=False, pattern=longformer(30, 5))
MIXED = per_head([[strided(4), fixed(8, 1), sliding_window(20, 0), causal()]])
PER_HEAD = Case("heads", 131, 131, 4, 2, batch=2, pattern=MIXED)


def submit(cluster, problem, **options):
    return cluster.submit(*tensors_of(problem), pattern=problem.pattern, **options)


def test_results_are_bitwise_identical_for_any_number_of_actors(ray_session, cluster):
    problem, one = CASES[3].make(), np.int64(1)
    before = [tensor.clone() for tensor in tensors_of(problem)]
    expected = attend(problem, cluster.attention, num_tasks=8)
    options = {"stall_timeout": np.float32(60), "max_attempts": np.uint8(2)}
    with cqs.Cluster(one, use_gpus=np.False_, cpus_per_worker=one, **options) as single:
        assert len(single.pids) == 1
        assert are_equal(attend(problem, single.attention, num_tasks=np.int64(8)), expected)
    assert are_equal(attend(problem, cluster.attention, num_tasks=8), expected)
    assert are_equal(tensors_of(problem), before), "inputs are only read"


@pytest.fixture
def short_wait(monkeypatch):
    """For room that nobody will give back."""
    monkeypatch.setattr(pool, "_RELEASE_SECONDS", 1)


def test_each_actor_is_pinned_to_a_gpu_of_its_own(ray_session, short_wait):
    class Spy(TaskActor):
        def visible(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    class Spies(cqs.Cluster):
        actor_class = Spy

    with Spies() as cluster:
        actors = cluster._pool.actors
        seen = ray_session.get([actor.handle.visible.remote() for actor in actors])
        assert sorted(seen) == ["0", "1", "2", "3"]
        cluster.attention(*tensors_of(CASES[0].make()), num_tasks=7, verify=True)
        with pytest.raises(ValueError, match=r"num_workers must be .* got 1,.* 0 free of 4"):
            cqs.Cluster(num_workers=1)


def run_undisturbed(cluster, problem, **options):
    """Return the report of a run without a failure; on a busy machine a worker may stall."""
    for _ in range(4):
        future = submit(cluster, problem, **options)
        future.result()
        if not future.report.failures:
            return future.report
    pytest.fail(f"workers failed four times: {future.report}")


@pytest.mark.parametrize(
    ("case", "num_tasks", "least"),
    [(LARGE, 7, 0.75), (LONG, 7, 0.95), (replace(LONG, pattern=dilated(5, 3, 4)), 1, 0.95)],
)
def test_predicted_bytes_are_those_measured(cluster, case, num_tasks, least):
    problem = case.make()
    for _ in range(2):  # compiling takes memory too
        report = run_undisturbed(cluster, problem, is_causal=case.is_causal, num_tasks=num_tasks)
    plan = problem.make_plan(num_tasks)
    for task in report.tasks:
        if case.pattern is None:
            cost = plan.predict_cost(task.index, problem.shape)
        else:
            planned, bound = plan.task(task.index), problem.bound_pattern
            cost = predict_pattern_cost(planned, problem.shape, task.backend, bound)
        assert (task.bytes_in, task.bytes_out) == (cost.bytes_in, cost.bytes_out)
        assert least * cost.peak_bytes <= task.peak_bytes <= 1.05 * cost.peak_bytes


def test_report_adds_up(cluster):
    problem = LARGE.make()
    report = run_undisturbed(cluster, problem, num_tasks=7)
    assert [task.index for task in report.tasks] == list(range(7))
    parts = report.slowest.values()
    assert min(parts) > 0 and sum(parts) == pytest.approx(report.seconds)
    assert {merge.pid for merge in report.merges} <= {task.pid for task in report.tasks}
    assert 0 < report.put_seconds < report.seconds and 0 < report.get_seconds < report.seconds


def test_each_token_is_put_once(cluster, ray_session, monkeypatch):
    puts, put = [], ray_session.put
    monkeypatch.setattr(ray_session, "put", lambda value: puts.append(value) or put(value))
    problem = CASES[0].make()
    expected = attend(problem, cluster.attention, num_tasks=7)
    assert not puts and submit(cluster, problem).report.transport == "shared memory"
    with monkeypatch.context() as patched:
        patched.setattr(cluster._pool, "obstacle", "as if it failed")
        assert are_equal(attend(problem, cluster.attention, num_tasks=7), expected)
    assert len(puts) == 14, "seven groups of queries, seven of keys and values"


def test_autocast_casts_what_it_casts_for_sdpa(cluster):
    mixed = torch.randn(3, 1, 2, 40, 16).unbind()
    mixed = *mixed[:2], mixed[2].bfloat16()
    cast = [each.bfloat16() for each in mixed]
    expected = cluster.attention(*cast), cluster.attention(cluster.shard(*cast)).to_local()
    with torch.autocast("cpu", torch.bfloat16):
        found = cluster.attention(*mixed), cluster.attention(cluster.shard(*mixed)).to_local()
        assert torch.equal(cluster.submit(*mixed).result(), expected[0])
        assert torch.equal(cluster.attention(*mixed), expected[0])
    assert are_equal(found, expected)


def test_empty_problems_need_no_actor(cluster):
    query = torch.randn(2, 4, 5, 8)
    nothing = torch.randn(2, 4, 0, 8)
    output, lse = cluster.attention(query, nothing, nothing, num_tasks=3, return_lse=True)
    assert torch.equal(output, torch.zeros_like(query)) and (lse == -torch.inf).all()
    assert cluster.attention(nothing, query, query).shape == nothing.shape
    assert cluster.attention(query[:0], query[:0], query[:0]).shape == query[:0].shape
    without_pairs = sliding_window(0, 0) - sliding_window(0, 0)
    problem = replace(PER_HEAD, pattern=without_pairs).make()
    output, lse = attend(problem, cluster.attention, num_tasks=7)
    assert not output.any() and (lse == -torch.inf).all()
    leaves = [tensor.requires_grad_() for tensor in tensors_of(problem)]
    output = cluster.attention(*leaves, pattern=without_pairs, num_tasks=7)
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), leaves))


def test_progress_is_drawn(cluster, capsys):
    cluster.attention(*tensors_of(CASES[0].make()), num_tasks=7, progress=True)
    drawn = capsys.readouterr().err
    assert "100%" in drawn and "pair/s" in drawn


def test_a_cancelled_run_ends_and_the_next_one_works(cluster):
    """It computes no further heads either."""
    problem, submitted = LARGE.make(), threading.Event()

    def cancel(done, total):
        assert submitted.wait(30) and heads.cancel()

    whole = cluster.submit(*tensors_of(problem), num_tasks=111)
    heads = submit(cluster, PER_HEAD.make(), num_tasks=1, progress=cancel)
    submitted.set()
    assert whole.cancel()
    for future in (whole, heads):
        with pytest.raises(CancelledError):
            future.result(timeout=60)
        assert future.done()
    cluster.attention(*tensors_of(problem), num_tasks=3, verify=True)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_submit_rejects_tensors_that_require_gradients(cluster, name):
    problem = CASES[0].make()
    arguments = {each: getattr(problem, each) for each in ("query", "key", "value")}
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name} .*requires_grad=True"):
        cluster.submit(**arguments)
    with torch.no_grad():
        assert not cluster.submit(**arguments).result().requires_grad


def test_submit_copies_what_it_reads(cluster):
    tensors = [torch.randn(1, 2, 90, 16) for _ in range(3)]
    scored = {"scores": cqs.Scores(heads := torch.ones(2), 2.0, heads)}
    expected, future = (call(*tensors, **scored) for call in (cluster.attention, cluster.submit))
    torch._foreach_zero_([*tensors, heads])
    assert torch.equal(future.result(), expected)


def test_errors_and_futures_of_ended_calls_keep_no_objects_in_the_store(cluster, ray_session):
    """A notebook keeps the last error, and its traceback refers to the run."""
    core_worker = ray_session._private.worker.global_worker.core_worker
    problem, tiny, kept = LARGE.make(), CASES[0].make(), []

    def references():
        return set(core_worker.get_all_reference_counts())

    cluster.attention(*tensors_of(tiny), num_tasks=1)
    before = references()
    for number in (1, 6, 13):
        calls = itertools.count(1)
        with pytest.raises(ZeroDivisionError) as info:
            cluster.attention(
                *tensors_of(problem),
                num_tasks=13,
                progress=lambda *_, calls=calls, number=number: 1 // (next(calls) - number),
            )
        kept.append(info)
        done = threading.Event()
        kept.append(
            future := cluster.submit(
                *tensors_of(problem), num_tasks=13, progress=lambda *_, done=done: done.set()
            )
        )
        assert done.wait(60) and future.cancel()
    for _ in range(300):  # until abandoned calls have ended
        cluster.attention(*tensors_of(tiny), num_tasks=1)
        if references() <= before:
            return
        time.sleep(0.1)
    pytest.fail(f"{len(references() - before)} objects are kept by {kept}")


def test_what_a_task_raises_is_raised_once_with_its_traceback(cluster, capfd):
    problem = CASES[0].make()
    with pytest.raises(
        NotImplementedError, match=r"^backend 'cudnn' requires CUDA tensors"
    ) as raised:
        cluster.attention(*tensors_of(problem), num_tasks=13, backend="cudnn")
    assert "worker.py" in str(raised.value.__cause__), "the remote traceback is its cause"
    pids = cluster.pids
    cluster.attention(*tensors_of(problem), num_tasks=7)
    assert cluster.pids == pids
    assert "Unhandled error" not in capfd.readouterr().err


def test_verification_catches_a_wrong_worker(ray_session):
    class Wrong(TaskActor):
        def _export(self, settings, parts):
            parts[0][1][0].add_(0.01)
            return super()._export(settings, parts)

    problem = CASES[0].make()
    with cluster_of(Wrong) as cluster:
        cluster.attention(*tensors_of(problem), num_tasks=7)
        with pytest.raises(VerificationError, match=r"row \d+ deviates by 0\.0"):
            cluster.attention(*tensors_of(problem), num_tasks=7, verify=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"num_workers": 2.0}, TypeError, "num_workers must be an integer, got 2.0"),
        ({"num_workers": 5}, ValueError, "num_workers must be .*GPUs, got 5"),
        ({"num_workers": 99, "use_gpus": False}, ValueError, "num_workers must be .*CPUs, got 99"),
        ({"cpus_per_worker": -1}, ValueError, "cpus_per_worker must be at least 1, got -1"),
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1, got 0"),
        ({"stall_timeout": 0}, ValueError, "stall_timeout must be positive, got 0"),
        ({"start_timeout": "1"}, TypeError, "start_timeout must be a number of seconds, got '1'"),
        ({"address": 6379}, TypeError, "address must be a string, got 6379"),
        ({"address": "auto"}, ValueError, "address must be .* got 'auto'"),
        ({"num_workers": np.True_}, TypeError, "num_workers must be an integer, got np.True_"),
        ({"stall_timeout": float("nan")}, ValueError, "stall_timeout must be positive, got nan"),
        ({"use_gpus": 1}, TypeError, "use_gpus must be a bool or None, got 1"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named_and_leave_no_actor(
    ray_session, short_wait, arguments, error, message
):
    free = ray_session.available_resources()
    with pytest.raises(error, match=message):
        cqs.Cluster(**arguments)
    assert ray_session.available_resources().get("GPU") == free.get("GPU")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_tasks": 0}, ValueError, "num_tasks must be at least 1, got 0"),
        ({"plan": Quorums([0, 1])}, ValueError, "no difference cover"),
        ({"backend": "warp"}, ValueError, "'warp'"),
        ({"progress": 3}, TypeError, "progress must be a bool or a function, got 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_leaves_the_cluster_untouched(cluster, change, error, message):
    query, key, value = tensors_of(CASES[0].make())
    pids = cluster.pids
    with pytest.raises(error, match=message):
        cluster.attention(query, **{"key": key, "value": value, "num_tasks": 4, **change})
    assert cluster.attention(query, key, value, num_tasks=4).shape == query.shape
    assert cluster.pids == pids


def test_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'ray\[client\]'"):
        cqs.Cluster(num_workers=1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1, 1, 2)[..., ::2],
        torch.ones(0, 4)[:, ::2],
        torch.ones(2, 0, 4).transpose(0, 1),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.arange(24).view(2, 3, 4).bfloat16().transpose(0, 2),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch._neg_view(torch.arange(4.0)),
    ],
    ids=["one-element", "no-rows", "no-columns", "conjugated", "transposed", "imag", "negated"],
)
def test_views_with_unusual_strides_and_lazy_signs_are_sent(tensor):
    received = Blob(tensor).tensor()
    assert received.shape == tensor.shape and torch.equal(received, tensor)


@pytest.mark.parametrize(
    ("case", "num_tasks", "num_reports"),
    [(PER_HEAD, 4, 16), (Case("idle", 3, 3, pattern=sliding_window(1, 0)), 7, 5)],
    ids=["per head", "idle"],
)
def test_submit_computes_tasks_with_live_pairs(cluster, assert_right, case, num_tasks, num_reports):
    """Heads of different patterns one after another."""
    problem, calls = case.make(), []
    options = {"num_tasks": num_tasks, "return_lse": True, "verify": True}
    future = submit(cluster, problem, progress=lambda *each: calls.append(each), **options)
    assert_right(problem, future.result())
    plans = [(part, part.make_plan(num_tasks)) for _, part in problem.parts()]
    report = future.report
    assert [task.index for task in report.tasks] == [
        task.index for _, plan in plans for task in plan.tasks if task.steps
    ]
    assert len(calls) == len(report.tasks) == num_reports
    assert report.seconds >= report.slowest["compute"] > 0
    pairs = [
        task.live_pairs * part.query.shape[1] * len(part.query)
        for part, plan in plans
        for task in plan.tasks
    ]
    done = [0, *(number for number, _ in calls)]
    assert sorted(b - a for a, b in pairwise(done)) == sorted(filter(None, pairs))
    assert {total for _, total in calls} == {sum(pairs)} == {done[-1]}
