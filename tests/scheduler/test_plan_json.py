import json
import time
from pathlib import Path

import pytest

from cqs.scheduler import Plan, Quorums, load_interest_set, make_plan

PLANS = {
    "full": make_plan(60, num_tasks=7),
    "even-causal": make_plan(61, num_tasks=8, is_causal=True),
    "cross-causal": make_plan(40, 75, num_tasks=7, is_causal=True),
    "other-set": make_plan(60, num_tasks=7, kind=Quorums((0, 2, 3))),
    "one-worker": make_plan(5, num_tasks=1),
    "nothing": make_plan(0, num_tasks=3),
    "long": make_plan(10**9, num_tasks=31, is_causal=True),
}
NUMBERS = {"version", "num_tasks", "seqlen_q", "seqlen_kv", "is_causal", "interest_set"}
LISTED = {"token_groups", "responsibility_ratio", "tasks"}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_survives_json_of_the_promised_fields(plan):
    for list_tasks in (False, True):
        text = plan.to_json(list_tasks=list_tasks)
        again = Plan.from_json(text)
        assert again == plan and again.tasks == plan.tasks
        assert again.to_json(list_tasks=list_tasks) == text
        written = json.loads(text)
        assert set(written) == (NUMBERS | LISTED if list_tasks else NUMBERS)


CHANGES = {
    "version": (1,),
    "seqlen_q": (62, -1, "61", 61.5),
    "seqlen_kv": (62, None),
    "num_tasks": (7,),
    "is_causal": (False, 1),
    "interest_set": ([0, 1, 3, 4], [0, 1], None),
    "responsibility_ratio": (8.0,),
    "tasks": ([],),
    "comment": ("mine",),
}
CHANGES_WITHIN = {
    "group-cut": lambda plan: plan["token_groups"][0].__setitem__(1, 6),
    "block-moved": lambda plan: plan["tasks"][3]["blocks"][0].__setitem__(0, 0),
    "block-dropped": lambda plan: plan["tasks"][3]["blocks"].pop(),
    "task-dropped": lambda plan: plan["tasks"].pop(),
    "tasks-swapped": lambda plan: plan["tasks"].reverse(),
    "held-groups": lambda plan: plan["tasks"][2]["held_groups"].pop(),
    "live-pairs": lambda plan: plan["tasks"][2].__setitem__("live_pairs", 1),
}


def test_a_falsified_plan_is_refused():
    text = PLANS["even-causal"].to_json(list_tasks=True)
    written = json.loads(text)
    falsified = [written | {name: value} for name, values in CHANGES.items() for value in values]
    for change in CHANGES_WITHIN.values():
        falsified.append(json.loads(text))
        change(falsified[-1])
    for plan in (written, json.loads(PLANS["full"].to_json())):
        falsified += [{key: plan[key] for key in plan if key != name} for name in plan]
    for each in falsified:
        with pytest.raises(ValueError, match=r"not a plan|must be|interest_set"):
            Plan.from_json(json.dumps(each))


def written_for(num_tasks, **changes):
    """JSON of a plan for so many tasks, few bytes whatever their number."""
    interest_set = list(load_interest_set(min(num_tasks, 2**18)))
    plan = {"version": 2, "num_tasks": num_tasks, "seqlen_q": 10, "seqlen_kv": 10}
    return json.dumps({**plan, "is_causal": False, "interest_set": interest_set, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (written_for(2**18 + 1), "num_tasks must be at most 262144, got 262145"),
        (written_for(10**30, interest_set=[]), "num_tasks must be at most 262144, got 1000"),
        (written_for(2**18, interest_set=None), "not a plan"),
        (written_for(2**18, interest_set=[0, 1]), "no two elements differ by 2"),
        (written_for(10**4, token_groups=[], tasks=[]), "num_tasks must be at most 4096"),
        (written_for(7, seqlen_q=10**4000), "seqlen_q must be at most .* got 13288 bits"),
        (written_for(7, tile=10**30), "tile must be at most"),
        (written_for(7, interest_set=[0, 10**30]), r"interest_set must lie in range\(7\)"),
        (written_for(7, interest_set=[0] * 5000), "interest_set must have at most 4096"),
        ("[" * 10**5, "not a plan"),
        (written_for(7)[:-1] + f', "tasks": {"[" * 10**5}{"]" * 10**5}}}', "not a plan"),
    ],
    ids=range(11),
)
def test_a_short_text_is_refused_at_once_whatever_it_says(text, message):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)
    assert time.process_time() - start < 5


def test_more_tasks_than_can_be_listed_are_refused():
    plan = make_plan(10, num_tasks=4097)
    for use in (
        lambda: plan.tasks,
        lambda: plan.responsibility_ratio,
        lambda: plan.to_json(list_tasks=True),
        plan.validate,
    ):
        with pytest.raises(ValueError, match="num_tasks must be at most 4096 .*, got 4097"):
            use()


@pytest.mark.parametrize("version", [2, 3])
def test_a_frozen_file_of_this_format_is_read_and_written_alike(version):
    text = Path(__file__).with_name(f"plan-format-{version}.json").read_text()
    assert Plan.from_json(text).to_json(list_tasks=True) + "\n" == text
