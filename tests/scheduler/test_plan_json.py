import copy
import json

import pytest

from cqs.scheduler import Plan, make_plan

PLANS = {
    "full": make_plan(60, num_workers=7),
    "even-causal": make_plan(61, num_workers=8, is_causal=True),
    "cross-causal": make_plan(40, 75, num_workers=7, is_causal=True),
    "other-set": make_plan(60, num_workers=7, interest_set=(0, 2, 3)),
    "one-worker": make_plan(5, num_workers=1),
    "nothing": make_plan(0, num_workers=3),
    "long": make_plan(10**9, num_workers=31, is_causal=True),
}
FIELDS = {
    "num_workers",
    "seqlen_q",
    "seqlen_kv",
    "is_causal",
    "interest_set",
    "token_groups",
    "responsibility_ratio",
    "tasks",
}
TASK_FIELDS = {"worker", "held_groups", "blocks", "live_pairs"}


def every_plan():
    return pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@every_plan()
def test_a_plan_survives_json(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.tasks == plan.tasks
    assert again.to_json() == plan.to_json()


@every_plan()
def test_json_has_exactly_the_promised_fields(plan):
    written = json.loads(plan.to_json())
    assert set(written) == FIELDS
    for task in written["tasks"]:
        assert set(task) == TASK_FIELDS


@every_plan()
def test_json_says_what_the_plan_says(plan):
    written = json.loads(plan.to_json())
    for name in ("num_workers", "seqlen_q", "seqlen_kv", "is_causal", "responsibility_ratio"):
        assert written[name] == getattr(plan, name)
    assert tuple(written["interest_set"]) == plan.interest_set
    assert [range(*group) for group in written["token_groups"]] == list(plan.token_groups)
    for task, entry in zip(plan.tasks, written["tasks"], strict=True):
        assert entry["worker"] == task.worker
        assert tuple(entry["held_groups"]) == task.held_groups
        assert entry["live_pairs"] == task.live_pairs
        ranges = [(range(q0, q1), range(k0, k1)) for q0, q1, k0, k1 in entry["blocks"]]
        assert ranges == [(block.queries, block.keys) for block in task.blocks]


def changes():
    """Named functions that falsify one entry of a plan written as a dict."""

    def set_to(name, value):
        return lambda plan: plan.__setitem__(name, value)

    return {
        "other-length": set_to("seqlen_q", 62),
        "other-key-length": set_to("seqlen_kv", 62),
        "other-number-of-workers": set_to("num_workers", 7),
        "not-causal": set_to("is_causal", False),
        "other-interest-set": set_to("interest_set", [0, 1, 3, 4]),
        "no-cover": set_to("interest_set", [0, 1]),
        "negative-length": set_to("seqlen_q", -1),
        "length-as-text": set_to("seqlen_q", "61"),
        "length-as-float": set_to("seqlen_q", 61.5),
        "length-null": set_to("seqlen_kv", None),
        "interest-set-null": set_to("interest_set", None),
        "flag-as-number": set_to("is_causal", 1),
        "ratio": set_to("responsibility_ratio", 8.0),
        "no-tasks": set_to("tasks", []),
        "extra-field": set_to("comment", "mine"),
        "group-cut": lambda plan: plan["token_groups"][0].__setitem__(1, 6),
        "block-moved": lambda plan: plan["tasks"][3]["blocks"][0].__setitem__(0, 0),
        "block-dropped": lambda plan: plan["tasks"][3]["blocks"].pop(),
        "task-dropped": lambda plan: plan["tasks"].pop(),
        "tasks-swapped": lambda plan: plan["tasks"].reverse(),
        "held-groups": lambda plan: plan["tasks"][2]["held_groups"].pop(),
        "live-pairs": lambda plan: plan["tasks"][2].__setitem__("live_pairs", 1),
    }


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_a_falsified_plan_is_refused(change):
    written = json.loads(PLANS["even-causal"].to_json())
    assert Plan.from_json(json.dumps(written)) == PLANS["even-causal"]
    falsified = copy.deepcopy(written)
    change(falsified)
    assert json.dumps(falsified) != json.dumps(written)
    with pytest.raises(ValueError, match=r"not a plan|must be|interest_set"):
        Plan.from_json(json.dumps(falsified))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_plan_without_one_of_its_fields_is_refused(name):
    written = json.loads(PLANS["full"].to_json())
    del written[name]
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(json.dumps(written))
