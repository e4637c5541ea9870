import itertools
import os
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.exact import assert_tracks_exact, eager_output, exact_answer

import cqs
from benchmarks.cases import CASES, Case
from cqs.executors.ray import pool
from cqs.executors.ray.actor import TaskActor
from cqs.executors.verify import VerificationError
from cqs.scheduler import Quorums

pytestmark = pytest.mark.ray

LARGE = Case("large", 3000, 3000, num_heads=8, num_kv_heads=8, head_dim=64, is_causal=True)


def tensors(problem):
    return problem.query, problem.key, problem.value


def options(problem):
    return {"is_causal": problem.is_causal, "scale": problem.scale}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_exact_and_always_is_bitwise_identical(cluster, case):
    """Numbers of workers go round."""
    num_tasks = (1, 4, 7, 13)[CASES.index(case) % 4]
    problem = case.make()
    output, lse = cluster.attention(
        *tensors(problem), **options(problem), num_tasks=num_tasks, return_lse=True
    )
    exact = exact_answer(problem)
    assert_tracks_exact(output, eager_output(problem), exact.output)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)
    again = cluster.attention(
        *tensors(problem), **options(problem), num_tasks=num_tasks, return_lse=True
    )
    assert torch.equal(output, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_sent(cluster, dtype):
    problem = CASES[5].make(dtype)
    output = cluster.attention(*tensors(problem), **options(problem), num_tasks=7)
    assert output.dtype == dtype
    assert_tracks_exact(output, eager_output(problem), exact_answer(problem).output)


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_actors", [1, 3])
def test_results_are_bitwise_identical_for_any_number_of_actors(ray_session, cluster, num_actors):
    problem = CASES[3].make()
    with_four = cluster.attention(*tensors(problem), **options(problem), num_tasks=8)
    with cqs.Cluster(num_workers=num_actors, use_gpus=False) as fewer:
        assert len(fewer.pids) == num_actors
        through_api = cqs.attention(
            *tensors(problem), **options(problem), num_tasks=8, executor=fewer
        )
    assert torch.equal(through_api, with_four)
    assert ray_session.is_initialized(), "a cluster must not shut down a Ray it did not start"


def test_numbers_of_numpy_are_numbers(ray_session):
    problem = CASES[0].make()
    with cqs.Cluster(
        num_workers=np.int64(1),
        use_gpus=np.False_,
        cpus_per_worker=np.int32(1),
        stall_timeout=np.float32(60),
        max_attempts=np.uint8(2),
    ) as cluster:
        cluster.attention(*tensors(problem), scale=np.float32(0.5), num_tasks=np.int64(7))


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

    problem = CASES[0].make()
    with Spies() as cluster:
        actors = cluster._pool.actors
        seen = ray_session.get([actor.handle.visible.remote() for actor in actors])
        assert sorted(seen) == ["0", "1", "2", "3"]
        cluster.attention(*tensors(problem), num_tasks=7, verify=True)
        with pytest.raises(ValueError, match=r"num_workers must be .* got 1,.* 0 free of 4"):
            cqs.Cluster(num_workers=1)


def run_undisturbed(cluster, problem, **options):
    """Return the report of a run without a failure; on a busy machine a worker may stall."""
    for _ in range(4):
        future = cluster.submit(*tensors(problem), **options)
        future.result()
        if not future.report.failures:
            return future.report
    pytest.fail(f"workers failed four times: {future.report}")


def test_predicted_bytes_are_those_measured(cluster):
    problem = LARGE.make()
    for num_tasks in (7, 8):
        report = run_undisturbed(cluster, problem, is_causal=True, num_tasks=num_tasks)
        plan = problem.make_plan(num_tasks)
        for task in report.tasks:
            cost = plan.predict_cost(task.index, problem.shape)
            assert (task.bytes_in, task.bytes_out) == (cost.bytes_in, cost.bytes_out)
            assert 0.75 * cost.peak_bytes <= task.peak_bytes <= 1.05 * cost.peak_bytes


def test_report_adds_up(cluster):
    problem = LARGE.make()
    report = run_undisturbed(cluster, problem, num_tasks=7)
    assert [task.index for task in report.tasks] == list(range(7))
    parts = (
        report.load_seconds,
        report.slowest_seconds,
        report.merge_seconds,
        report.unload_seconds,
        report.waiting_seconds,
    )
    assert min(parts) > 0 and sum(parts) == pytest.approx(report.seconds)
    assert {merge.pid for merge in report.merges} <= {task.pid for task in report.tasks}
    assert 0 < report.put_seconds < report.seconds and 0 < report.get_seconds < report.seconds
    assert report.reruns == 0


@pytest.mark.parametrize("fits_the_store", [True, False])
def test_each_token_is_put_once(cluster, ray_session, monkeypatch, fits_the_store):
    puts = []
    put = ray_session.put
    monkeypatch.setattr(ray_session, "put", lambda value: puts.append(value) or put(value))
    problem = CASES[0].make()
    expected = cluster.attention(*tensors(problem), num_tasks=7)
    assert len(puts) == 2, "queries, keys with values"
    if not fits_the_store:
        puts.clear()
        monkeypatch.setattr(cluster._pool, "store_bytes", 0)
        assert torch.equal(cluster.attention(*tensors(problem), num_tasks=7), expected)
        assert len(puts) == 14, "seven groups of queries, seven of keys and values"


def test_autocast_casts_what_it_casts_for_sdpa(cluster):
    mixed = torch.randn(3, 1, 2, 40, 16).unbind()
    mixed = *mixed[:2], mixed[2].bfloat16()
    cast = [each.bfloat16() for each in mixed]
    expected = cluster.attention(*cast), cluster.attention(cluster.shard(*cast)).to_local()
    with torch.autocast("cpu", torch.bfloat16):
        found = cluster.attention(*mixed), cluster.attention(cluster.shard(*mixed)).to_local()
        assert torch.equal(cluster.submit(*mixed).result(), expected[0])
        assert torch.equal(cqs.attention(*mixed, executor=cluster), expected[0])
    assert all(map(torch.equal, found, expected))


def test_inputs_are_never_written_to(cluster):
    problem = CASES[1].make()
    before = [tensor.clone() for tensor in tensors(problem)]
    cluster.attention(*tensors(problem), **options(problem), num_tasks=8)
    assert all(map(torch.equal, tensors(problem), before))


def test_empty_problems_need_no_actor(cluster):
    query = torch.randn(2, 4, 5, 8)
    nothing = torch.randn(2, 4, 0, 8)
    output, lse = cluster.attention(query, nothing, nothing, num_tasks=3, return_lse=True)
    assert torch.equal(output, torch.zeros_like(query)) and (lse == -torch.inf).all()
    assert cluster.attention(nothing, query, query).shape == nothing.shape
    assert cluster.attention(query[:0], query[:0], query[:0]).shape == query[:0].shape


@pytest.mark.parametrize("is_of_api", [False, True])
def test_progress_counts_the_live_pairs_of_all_heads(cluster, is_of_api):
    problem = LARGE.make()
    attend = partial(cqs.attention, executor=cluster) if is_of_api else cluster.attention
    calls = []
    attend(
        *tensors(problem),
        is_causal=True,
        num_tasks=7,
        progress=lambda done, total: calls.append((done, total)),
    )
    pairs = [8 * task.live_pairs for task in problem.make_plan(7).tasks]
    done = [0, *(done for done, _ in calls)]
    assert sorted(b - a for a, b in pairwise(done)) == sorted(pairs)
    assert {total for _, total in calls} == {sum(pairs)} == {done[-1]}


def test_progress_bar_is_drawn_on_request(cluster, capsys):
    cluster.attention(*tensors(CASES[0].make()), num_tasks=7, progress=True)
    drawn = capsys.readouterr().err
    assert "100%" in drawn and "pair/s" in drawn


def test_a_cancelled_run_ends_and_the_next_one_works(cluster):
    problem = LARGE.make()
    future = cluster.submit(*tensors(problem), num_tasks=111)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(timeout=30)
    assert future.done()
    cluster.attention(*tensors(problem), num_tasks=3, verify=True)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_submit_rejects_tensors_that_require_gradients(cluster, name):
    problem = CASES[0].make()
    arguments = {each: getattr(problem, each) for each in ("query", "key", "value")}
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name} .*requires_grad=True"):
        cluster.submit(**arguments)
    with torch.no_grad():
        assert not cluster.submit(**arguments).result().requires_grad
    output = cluster.attention(**arguments)
    (gradient,) = torch.autograd.grad(output.sum(), arguments[name])
    expected = cqs.attention(**arguments)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), arguments[name])
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


def test_errors_and_futures_of_ended_calls_keep_no_objects_in_the_store(cluster, ray_session):
    """A notebook keeps the last error, and its traceback refers to the run."""
    core_worker = ray_session._private.worker.global_worker.core_worker
    problem, tiny, kept = LARGE.make(), CASES[0].make(), []

    def references():
        return set(core_worker.get_all_reference_counts())

    cluster.attention(*tensors(tiny), num_tasks=1)
    before = references()
    for number in (1, 6, 13):
        calls = itertools.count(1)
        with pytest.raises(ZeroDivisionError) as info:
            cluster.attention(
                *tensors(problem),
                num_tasks=13,
                progress=lambda *_, calls=calls, number=number: 1 // (next(calls) - number),
            )
        kept.append(info)
        done = threading.Event()
        kept.append(
            future := cluster.submit(
                *tensors(problem), num_tasks=13, progress=lambda *_, done=done: done.set()
            )
        )
        assert done.wait(60) and future.cancel()
    for _ in range(300):  # until abandoned calls have ended
        cluster.attention(*tensors(tiny), num_tasks=1)
        if references() <= before:
            return
        time.sleep(0.1)
    pytest.fail(f"{len(references() - before)} objects are kept by {kept}")


def test_runs_queue_up(cluster):
    problems = [case.make() for case in CASES[:4]]
    futures = [cluster.submit(*tensors(p), **options(p), num_tasks=7) for p in problems]
    for problem, future in zip(problems, futures, strict=True):
        assert_tracks_exact(future.result(), eager_output(problem), exact_answer(problem).output)


def test_what_a_task_raises_is_raised_once_with_its_traceback(cluster, capfd):
    problem = CASES[0].make()
    with pytest.raises(
        NotImplementedError, match=r"^backend 'cudnn' requires CUDA tensors"
    ) as raised:
        cluster.attention(*tensors(problem), num_tasks=13, backend="cudnn")
    assert "worker.py" in str(raised.value.__cause__), "the remote traceback is its cause"
    pids = cluster.pids
    cluster.attention(*tensors(problem), num_tasks=7)
    assert cluster.pids == pids
    assert "Unhandled error" not in capfd.readouterr().err


def test_verification_catches_a_wrong_worker(ray_session):
    class Wrong(TaskActor):
        def merge(self, settings, calls, *arguments):
            for call in calls:
                for _, (output, _) in self._kept.get((call.group, 2), ()):
                    output += 0.01
            return super().merge(settings, calls, *arguments)

    class WrongCluster(cqs.Cluster):
        actor_class = Wrong

    problem = CASES[0].make()
    with WrongCluster(num_workers=1, use_gpus=False) as cluster:
        cluster.attention(*tensors(problem), num_tasks=7)
        with pytest.raises(VerificationError, match=r"row \d+ deviates by 0\.0"):
            cluster.attention(*tensors(problem), num_tasks=7, verify=True)


def test_a_closed_cluster_refuses(ray_session):
    cluster = cqs.Cluster(num_workers=1, use_gpus=False)
    cluster.close()
    cluster.close()
    assert "1 workers, closed" in repr(cluster)
    with pytest.raises(ValueError, match="closed"):
        cluster.attention(*tensors(CASES[0].make()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"num_workers": 2.0}, TypeError, "num_workers must be an integer, got 2.0"),
        ({"num_workers": True}, TypeError, "num_workers must be an integer, got True"),
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
        ({"scale": float("nan")}, ValueError, "nan"),
        ({"key": torch.zeros(3)}, ValueError, "key must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_leaves_the_cluster_untouched(cluster, change, error, message):
    query, key, value = tensors(CASES[0].make())
    pids = cluster.pids
    with pytest.raises(error, match=message):
        cluster.attention(query, **{"key": key, "value": value, "num_tasks": 4, **change})
    assert cluster.attention(query, key, value, num_tasks=4).shape == query.shape
    assert cluster.pids == pids


def test_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'ray\[client\]'"):
        cqs.Cluster(num_workers=1)
    problem = CASES[0].make()
    with pytest.raises(NotImplementedError, match="Ray"):
        cqs.attention(*tensors(problem), executor="ray")


def test_partial_results_survive_the_trip_as_they_are():
    from cqs.executors.ray.blob import Blob

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(2, 3, 4).to(dtype).transpose(0, 2)
        assert torch.equal(Blob(tensor).tensor(), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1, 1, 2)[..., ::2],
        torch.ones(0, 4)[:, ::2],
        torch.ones(2, 0, 4).transpose(0, 1),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
    ],
    ids=["one-element", "no-rows", "no-columns", "conjugated"],
)
def test_views_with_unusual_strides_and_conjugated_ones_are_sent(tensor):
    from cqs.executors.ray.blob import Blob

    received = Blob(tensor).tensor()
    assert received.shape == tensor.shape and torch.equal(received, tensor)


def test_views_that_are_negated_lazily_are_sent(cluster):
    query, key = torch.randn(2, 1, 2, 30, 8, dtype=torch.complex64).conj().imag
    value = torch._neg_view(torch.randn(1, 2, 30, 8))
    assert query.is_neg() and value.is_neg() and value.is_contiguous()
    resolved = [tensor.resolve_neg() for tensor in (query, key, value)]
    output = cluster.attention(query, key, value, num_tasks=7, verify=True)
    assert torch.equal(output, cluster.attention(*resolved, num_tasks=7))


def like_a_gpu(failing=()):
    """A cluster whose actors use memory of the CPU as that of a GPU.

    Args:
        failing: Pairs of a method and the number of a call of it that runs out of memory.
    """

    class GpuLike(TaskActor):
        def _make_inputs(self):
            from cqs.executors.ray import actor
            from cqs.executors.ray.tasks.gpu_inputs import GpuInputs
            from cqs.executors.streaming.transfers import DeviceCopies

            actor.memory_of = lambda device: 2**30
            self.counts = dict.fromkeys(["load", "hold", "merge"], 0)
            inputs = GpuInputs(DeviceCopies(self._device))
            for name in ("load", "hold"):
                setattr(inputs, name, partial(self.compute_or_fail, name, getattr(inputs, name)))
            return inputs

        def _merge_group(self, *arguments):
            return self.compute_or_fail("merge", super()._merge_group, *arguments)

        def compute_or_fail(self, name, compute, *arguments, **options):
            found = compute(*arguments, **options)
            self.counts[name] += 1
            if (name, self.counts[name]) in failing:
                raise torch.OutOfMemoryError("as if out of memory")
            return found

    class GpuLikeCluster(cqs.Cluster):
        actor_class = GpuLike

    return GpuLikeCluster(num_workers=2, use_gpus=False)


def results_by(clusters, case, num_tasks):
    """Output and gradients by each of several clusters."""
    problem, found = case.make(), []
    for cluster in clusters:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors(problem)]
        output = cluster.attention(*leaves, **options(problem), num_tasks=num_tasks)
        found.append((output, *torch.autograd.grad(output.sum(), leaves)))
    return found


@pytest.mark.parametrize("is_whole", [True, False])
def test_inputs_that_stay_on_a_device_do_not_change_a_bit(
    cluster, ray_session, monkeypatch, is_whole
):
    with like_a_gpu() as gpus:
        for each in (cluster, gpus):
            monkeypatch.setattr(each._pool, "store_bytes", 2**40 if is_whole else 0)
        for case, num_tasks in itertools.product(CASES, (1, 2, 7)):
            assert all(map(torch.equal, *results_by((cluster, gpus), case, num_tasks)))


@pytest.mark.parametrize("name", ["load", "hold", "merge"])
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_device_that_is_full_computes_task_by_task(cluster, ray_session, name, number):
    with like_a_gpu([(name, number)]) as gpus:
        assert all(map(torch.equal, *results_by((cluster, gpus), CASES[1], 13)))


def test_a_task_too_large_for_a_device_is_an_error(cluster, ray_session):
    problem = CASES[1].make()
    with like_a_gpu([("hold", 1), ("hold", 2)]) as gpus:
        with pytest.raises(torch.OutOfMemoryError, match=r"task \d+ of 7 requires"):
            gpus.attention(*tensors(problem), **options(problem), num_tasks=7)
