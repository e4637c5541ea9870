"""What reports measure: the plan's shares, the predicted memory, and only what is right."""

from dataclasses import asdict, replace

import pytest
import torch
from scaling_rows import make_rows
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cqs.executors.verify import VerificationError
from cqs.partial import Gradients
from cqs.report.drivers import LocalDriver, RayDriver
from cqs.report.exact import verify_gradients
from cqs.report.findings import find
from cqs.report.passes import MeasuredPass
from cqs.report.rows import PASSES
from cqs.report.settings import Settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
SMALL = Settings("local", 200, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", repeats=2)
KINDS = {
    "full": {},
    "causal-pattern": {"pattern": "strided(16)", "is_causal": True},
    "blind-rows": {"pattern": "block_sparse([[1, 0], [0, 0]], 100)"},
}


def test_with_scores_in_memory_a_task_takes_a_share_of_one_over_w():
    """With scores in memory they outweigh the tokens, and a task has 1/W of them."""
    found = {}
    for backend in ("reference", None):
        settings = replace(SMALL, tokens=900, repeats=1, backend=backend)
        rows = [LocalDriver(settings).measure(number, "forward") for number in (1, 7, 13)]
        found[backend] = [row.memory_share for row in rows]
    assert found["reference"][1] < 1 / 7 and found["reference"][2] < 1 / 13
    assert 1 / 7 < found[None][1] < 1 and 1 / 13 < found[None][2] < found[None][1]


def test_a_loaded_machine_is_a_caveat_of_the_findings():
    *others, last = make_rows((1, 7))
    loaded = replace(last, load_average=9.9, num_cores=2)
    assert find([*others, loaded])[3:] == [
        "Caveat: times are unreliable: load 9.9 on 2 cores; measure again on an idle machine."
    ]
    assert len(find([*others, last])) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_says_what_the_plan_says_and_how_long_it_took(kind):
    settings = replace(SMALL, **KINDS[kind])
    ticks = []
    driver = LocalDriver(settings)
    one = driver.measure(1, "forward")
    found = [driver.measure(7, name, lambda: ticks.append(1)) for name in PASSES]
    assert len(ticks) == 2 * (1 + settings.repeats)
    assert one.speedup == one.efficiency == one.memory_share == 1 and one.merge_ms == 0
    assert (one.median_ms, one.one_bytes) == (found[0].one_ms, found[0].one_bytes)
    for row, name in zip(found, PASSES, strict=True):
        plan = MeasuredPass(settings, name).problem.make_plan(7)
        assert asdict(settings).items() <= asdict(row).items()
        assert row.num_tasks == 7 and row.passes == name and row.make_plan() == plan
        assert row.held_tokens == max(task.held_tokens for task in plan.tasks)
        assert row.responsibility_ratio == plan.responsibility_ratio
        assert row.balance == pytest.approx(7 / plan.responsibility_ratio)
        assert row.bytes_in <= row.peak_bytes and row.bytes_out < row.peak_bytes
        assert 0 < row.mean_ms <= row.slowest_ms < row.median_ms < row.slowest_ms + row.merge_ms
        assert row.num_devices == 7 and row.efficiency == row.speedup / 7
        assert row.transfer_ms is None
    forward, backward = found
    shape = MeasuredPass(settings, "forward").problem.shape
    costs = [plan.predict_cost(task.index, shape) for task in plan.tasks]
    assert forward.bytes_in == max(cost.bytes_in for cost in costs)
    assert forward.bytes_out == max(cost.bytes_out for cost in costs)
    assert forward.peak_ratio is not None and backward.peak_ratio is None


@pytest.mark.parametrize("pattern", [None, "sliding_window(256, 0) | global_tokens(4)"])
def test_measured_memory_is_within_a_twentieth_of_the_predicted(pattern):
    sizes = {"tokens": 2048, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    driver = LocalDriver(replace(SMALL, **sizes, repeats=1, pattern=pattern))
    for num_tasks in (1, 8):
        row = driver.measure(num_tasks, "forward")
        assert row.peak_ratio == pytest.approx(1, abs=0.05), num_tasks
        assert row.peak_bytes == pytest.approx(row.predicted_bytes, rel=0.05)
        assert row.responsibility_ratio == pytest.approx(num_tasks, rel=0.015)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_gradients_are_found(kind):
    work = MeasuredPass(replace(SMALL, **KINDS[kind]), "backward")
    plan = work.problem.make_plan(7)
    gradients = work.merge([work.compute(task, work.hold(task)) for task in plan.tasks])
    work.verify(gradients)
    for wrong in Gradients._fields:
        spoiled = Gradients(*(gradient.clone() for gradient in gradients))
        getattr(spoiled, wrong)[:, 1, 0] += 1e-3
        with pytest.raises(VerificationError, match=f"gradient of the {wrong}"):
            verify_gradients(work.problem, work.answer, work.grad_output, spoiled)


@pytest.mark.parametrize("name", PASSES)
def test_what_is_wrong_is_not_timed(monkeypatch, name):
    compute = MeasuredPass.compute
    monkeypatch.setattr(
        MeasuredPass,
        "compute",
        lambda self, *given: tree_map_only(Tensor, torch.zeros_like, compute(self, *given)),
    )
    monkeypatch.setattr(LocalDriver, "_time_all", lambda *arguments: pytest.fail("it was timed"))
    with pytest.raises(VerificationError):
        LocalDriver(SMALL).measure(7, name)


def test_what_sees_nothing_and_what_differs_by_head_is_refused():
    with pytest.raises(ValueError, match="pattern must have live pairs, .* 200 tokens"):
        MeasuredPass(replace(SMALL, pattern="block_sparse([[0, 0], [0, 0]], 100)"), "forward")
    pattern = "per_head([[causal(), causal(), strided(2), causal()]])"
    with pytest.raises(NotImplementedError, match="pattern must be the same for all heads"):
        MeasuredPass(replace(SMALL, pattern=pattern), "forward")


@pytest.mark.ray
def test_runs_on_a_cluster_are_measured(cluster):
    settings = replace(SMALL, executor="ray", repeats=1, **KINDS["causal-pattern"])
    driver = RayDriver(settings, cluster)
    for name in PASSES:
        row = driver.measure(3, name)
        assert row.num_devices == 3
        assert 0 < row.transfer_ms < row.median_ms
        assert 0 <= row.merge_ms < row.median_ms, "the slowest worker may merge nothing"
        assert (row.peak_ratio is None) == (name == "backward")
        here = MeasuredPass(replace(settings, executor="local"), name)
        plan = here.problem.make_plan(3)
        assert row.bytes_in == max(
            sum(tokens.joined().nbytes for tokens in here.hold(task)) for task in plan.tasks
        )
