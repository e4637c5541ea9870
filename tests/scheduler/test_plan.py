import dataclasses
import time

import pytest

from cqs.patterns import causal
from cqs.scheduler import Plan, Quorums, load_interest_set, make_plan, quorum

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@KINDS
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 8, 12, 31, 64, 112, 133])
def test_responsibility_ratio_is_the_number_of_tasks(num_tasks, is_causal):
    plan = make_plan(10**9, num_tasks=num_tasks, is_causal=is_causal)
    assert plan.responsibility_ratio == pytest.approx(num_tasks, rel=1e-6)
    for lengths in ((10**9, 10**9), (10**9, 10**6), (777_777, 10**9)):
        plan = make_plan(*lengths, num_tasks=num_tasks, is_causal=is_causal)
        assert 0.99 * num_tasks <= plan.responsibility_ratio <= num_tasks
    for lengths in ((5, 5), (300, 7), (7, 300)):
        plan = make_plan(*lengths, num_tasks=num_tasks, is_causal=is_causal)
        busiest = max(task.live_pairs for task in plan.tasks)
        assert plan.responsibility_ratio == plan.live_pairs / busiest


@KINDS
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_a_plan_without_work_has_no_steps_and_ratio_one(lengths, is_causal):
    plan = make_plan(*lengths, num_tasks=4, is_causal=is_causal)
    plan.validate()
    assert plan.live_pairs == 0 and plan.responsibility_ratio == 1.0
    assert all(task.steps == task.blocks == task.held_groups == () for task in plan.tasks)


@KINDS
@pytest.mark.parametrize("num_tasks", [10**4, 2**18])
def test_many_tasks_are_planned_within_seconds(num_tasks, is_causal):
    start = time.process_time()
    plan = make_plan(10**9, num_tasks=num_tasks, is_causal=is_causal)
    task = plan.task(num_tasks // 3)
    assert Plan.from_json(plan.to_json()) == plan and str(num_tasks) in str(plan)
    assert time.process_time() - start < 15
    assert task.live_pairs == pytest.approx(plan.live_pairs / num_tasks, rel=1e-2)


@pytest.mark.parametrize("num_tasks", [2**18 + 1, 10**8, 10**30, 10**400])
def test_too_many_tasks_are_rejected_at_once(num_tasks):
    with pytest.raises(ValueError, match="num_tasks must be at most 262144, got "):
        make_plan(70, num_tasks=num_tasks)
    with pytest.raises(ValueError, match="num_tasks must be at most 1024, got "):
        make_plan(70, num_tasks=num_tasks, pattern=causal())


@pytest.mark.parametrize("num_tasks", range(1, 40))
def test_a_task_holds_the_groups_of_its_quorum(num_tasks):
    plan = make_plan(100 * num_tasks, num_tasks=num_tasks)
    assert plan.interest_set == load_interest_set(num_tasks)
    for task in plan.tasks:
        assert task.held_groups == quorum(task.index, plan.interest_set, num_tasks)


def test_the_interest_set_of_the_caller_is_used():
    plan = make_plan(70, num_tasks=7, kind=Quorums([2, 0, 3]))
    assert plan.interest_set == (0, 2, 3)
    assert plan.task(1).held_groups == (1, 3, 4)
    plan.validate()


def test_plans_are_values_that_describe_themselves():
    plan = make_plan(70, num_tasks=7)
    assert plan == make_plan(70, 70, num_tasks=7, kind=Quorums((0, 1, 3)))
    assert plan != make_plan(70, num_tasks=7, is_causal=True)
    assert len({plan, make_plan(70, num_tasks=7)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seqlen_q = 71
    text = str(make_plan(70, 90, num_tasks=7, is_causal=True))
    assert all(part in text for part in ("7 tasks", "70 x 90", "causal", "(0, 1, 3)"))
