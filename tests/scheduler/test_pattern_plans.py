import json
import pickle
import random
import time
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from cqs.patterns import (
    acsr,
    bigbird,
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    global_tokens,
    longformer,
    per_head,
    sliding_window,
    strided,
)
from cqs.scheduler import Plan, make_plan
from cqs.scheduler.kinds import quorums as quorums_module
from cqs.scheduler.token_groups import TokenGroups
from cqs.scheduler.validate import validate_tasks

NUM_TASKS = pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 8, 13])


def random_documents(seqlen, number, seed):
    cuts = random.Random(seed).sample(range(1, seqlen), number - 1)
    return documents([0, *sorted(cuts), seqlen])


def random_pattern(draw, seqlen_q, seqlen_kv):
    """A pattern drawn from all families, with parameters below or a little beyond the lengths."""
    seqlen = max(seqlen_q, seqlen_kv)

    def below(limit):
        return draw.randrange(limit)

    def packed():
        """Cumulative lengths, of both sides if they differ."""
        if seqlen_q == seqlen_kv:
            return [[0, *sorted(below(seqlen + 1) for _ in range(3)), seqlen]]
        return [[0, *sorted(below(n + 1) for _ in range(3)), n] for n in (seqlen_q, seqlen_kv)]

    side = 1 + below(12)
    return draw.choice(
        [
            lambda: causal(),
            lambda: sliding_window(side),
            lambda: sliding_window(below(seqlen + 2), below(seqlen + 2)),
            lambda: dilated(below(4), below(4), side),
            lambda: strided(side),
            lambda: fixed(side, below(side + 1)),
            lambda: block_diagonal(side),
            lambda: longformer(below(9), {below(seqlen + 2) for _ in range(3)}),
            lambda: documents(*packed(), is_causal=below(2) == 0),
            lambda: bigbird(block=side, seed=below(100)),
            lambda: sliding_window(3) | global_tokens([0, seqlen // 2]),
        ]
    )()


def random_lengths(draw, num_tasks):
    """Both lengths: often equal, none of work or fewer than workers among them."""
    choices = [0, 1, 2, 5, num_tasks - 1, num_tasks, 20, 37, 60]
    seqlen_q = draw.choice(choices)
    return seqlen_q, draw.choice([seqlen_q, seqlen_q, draw.choice(choices)])


def random_plans(num_tasks, number):
    for seed in range(number):
        draw = random.Random(f"{num_tasks} {seed}")
        lengths = random_lengths(draw, num_tasks)
        yield make_plan(
            *lengths,
            num_tasks=num_tasks,
            is_causal=draw.random() < 0.3,
            tile=draw.choice([1, 1, 2, 8]),
            pattern=random_pattern(draw, *lengths),
        )


def rectangle(step, shape):
    """Where the pairs of a step lie, live or not."""
    inside = np.zeros(shape, dtype=bool)
    for keys in step.keys:
        inside[step.queries.start : step.queries.stop, keys.start : keys.stop] = True
    return inside


@NUM_TASKS
def test_every_live_pair_is_computed_once(num_tasks):
    for plan in random_plans(num_tasks, 120):
        mask = plan.pattern.to_mask(plan.seqlen_q, plan.seqlen_kv)
        owners = np.zeros(mask.shape, dtype=int)
        for task in plan.tasks:
            seen = np.zeros(plan.seqlen_q, dtype=int)
            for step in task.steps:
                inside = rectangle(step, mask.shape)
                owners += inside
                rows = np.flatnonzero((inside & mask).any(axis=1))
                assert step.queries.start == rows[0] and step.queries.stop == rows[-1] + 1, plan
                assert step.live_pairs == (inside & mask).sum() > 0, plan
                assert step.causal_keys is None
                seen[step.queries.start : step.queries.stop] += 1
            assert seen.max(initial=0) <= 1, f"{plan}: a row of worker {task.worker} in two steps"
        assert owners.max(initial=0) <= 1 and (owners[mask] == 1).all(), plan
        assert sum(task.live_pairs for task in plan.tasks) == plan.live_pairs == mask.sum()
        plan.validate()


@NUM_TASKS
def test_a_task_holds_exactly_the_groups_that_its_live_pairs_touch(num_tasks):
    for plan in random_plans(num_tasks, 60):
        mask = plan.pattern.to_mask(plan.seqlen_q, plan.seqlen_kv)
        for task in plan.tasks:
            live = np.zeros_like(mask)
            for step in task.steps:
                live |= rectangle(step, mask.shape) & mask
            queries = [i for i, g in enumerate(plan.token_groups) if live[g.start : g.stop].any()]
            keys = [i for i, g in enumerate(plan.key_groups) if live[:, g.start : g.stop].any()]
            assert task.held_queries == tuple(plan.token_groups[i] for i in queries), plan
            assert task.held_keys == tuple(plan.key_groups[i] for i in keys), plan
            assert task.held_groups == tuple(sorted({*queries, *(i % num_tasks for i in keys)}))


def balance(plan):
    """Live pairs of the busiest worker over the mean."""
    return plan.num_tasks / plan.responsibility_ratio


def levelled_patterns(seqlen, num_tasks):
    """Patterns with enough work for all workers, by name."""
    group = seqlen // num_tasks
    layout = np.random.default_rng(0).random((-(-seqlen // 128),) * 2)
    return {
        "causal": causal(),
        "window-1.3-groups": sliding_window(int(1.3 * group)),
        "window-2.5-groups": sliding_window(int(2.5 * group)),
        "window-quarter": sliding_window(seqlen // 4),
        "window-narrow": sliding_window(group // 16),
        "window-two-sided": sliding_window(int(1.5 * group), int(1.5 * group)),
        "window-lopsided": sliding_window(seqlen // 5, seqlen // 9),
        "strided": strided(256),
        "strided-1000": strided(1000),
        "fixed": fixed(512, 32),
        "blocks-1000": block_diagonal(1000),
        "blocks-fifth": block_diagonal(seqlen // 5),
        "blocks-3-groups": block_diagonal(3 * group),
        "documents-0": random_documents(seqlen, 32, 0),
        "documents-1": random_documents(seqlen, 32, 1),
        "documents-2": random_documents(seqlen, 32, 2),
        "dilated": dilated(64, 64, 8),
        "longformer": longformer(512, 64),
        "bigbird": bigbird(),
        "random-blocks": block_sparse(layout < 0.1, 128),
        "random-blocks-skewed": block_sparse(layout < np.linspace(0, 0.3, len(layout)), 128),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_tasks", [4, 7, 8, 13, 31])
@pytest.mark.parametrize("name", levelled_patterns(65536, 4))
def test_the_busiest_task_has_hardly_more_than_the_mean(name, num_tasks):
    """And holds at most one group more than a quorum."""
    for seqlen in (65536, 65521):
        pattern = levelled_patterns(seqlen, num_tasks)[name]
        plan = make_plan(seqlen, num_tasks=num_tasks, pattern=pattern)
        assert 1 <= balance(plan) <= 1.011
        size = len(plan.interest_set)
        assert max(len(task.held_groups) for task in plan.tasks) <= size + 1


@pytest.mark.parametrize("num_tasks", [4, 7, 8, 31])
def test_even_work_stays_with_its_plain_owners(num_tasks):
    seqlen = 1024 * num_tasks + 5
    for is_causal, pattern in ((True, causal()), (False, sliding_window(None, None))):
        plain = make_plan(seqlen, num_tasks=num_tasks, is_causal=is_causal)
        plan = make_plan(seqlen, num_tasks=num_tasks, pattern=pattern)
        assert balance(plan) == balance(plain)
        held = [task.held_groups for task in plain.tasks]
        assert [task.held_groups for task in plan.tasks] == held


@pytest.mark.parametrize("num_tasks", [8, 31])
def test_a_window_of_4k_on_groups_of_64k_needs_one_neighbour(num_tasks):
    plan = make_plan(65536 * num_tasks, num_tasks=num_tasks, pattern=sliding_window(4096))
    assert balance(plan) < 1.005
    for task in plan.tasks:
        first, *rest = task.held_groups
        assert rest in ([], [first + 1])


@pytest.mark.parametrize("num_tasks", [4, 13, 31])
def test_a_single_query_is_shared_out_by_keys(num_tasks):
    plan = make_plan(1, 10**6, num_tasks=num_tasks, pattern=causal())
    assert balance(plan) < 1.001


def test_few_queries_are_shared_out_row_by_row():
    for num_tasks in (7, 13, 31):
        plan = make_plan(16, 10**6, num_tasks=num_tasks, pattern=causal())
        assert balance(plan) < 1.07


@pytest.mark.slow
def test_a_thousand_million_tokens_are_levelled():
    seqlen, num_tasks = 10**9, 111
    for pattern in (random_documents(seqlen, 32, 0), longformer(512, 64), strided(1000)):
        plan = make_plan(seqlen, num_tasks=num_tasks, pattern=pattern)
        plan.validate()
        assert balance(plan) <= 1.011
        assert max(len(task.held_groups) for task in plan.tasks) <= len(plan.interest_set)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tasks", "pattern"),
    [
        (183, documents([0, 50577, 65536])),
        (133, documents([0, 60000, 65536])),
        (211, causal() - sliding_window(31219)),
    ],
)
def test_much_work_for_few_is_levelled_in_seconds(num_tasks, pattern):
    """Long ways lead from those who have it to those who lack it."""
    start = time.process_time()
    plan = make_plan(65536, num_tasks=num_tasks, pattern=pattern)
    assert balance(plan) <= 1.011
    assert time.process_time() - start < 10


@pytest.mark.parametrize("num_tasks", [7, 8])
def test_groups_are_cut_at_tiles(num_tasks):
    """Rows end at a tile, at the end of a group or of what is live."""
    seqlen = 128 * 40 * num_tasks + 77
    pattern = sliding_window(1000) | block_diagonal(seqlen // 3)
    plan = make_plan(seqlen, num_tasks=num_tasks, tile=128, pattern=pattern)
    plan.validate()
    assert balance(plan) < 1.05
    ends = {group.stop for group in plan.token_groups}
    sees = pattern.bind(seqlen).count
    steps = [step for task in plan.tasks for step in task.steps]
    assert len(steps) > num_tasks
    for step in steps:
        for edge, beyond in ((step.queries.start, -1), (step.queries.stop, 0)):
            row = range(edge + beyond, edge + beyond + 1)
            is_trimmed = not any(sees(row, keys) for keys in step.keys)
            assert edge % 128 == 0 or edge in ends or is_trimmed


def test_groups_and_prefix_are_those_of_causal_attention():
    for lengths in [(60, 60), (40, 75)]:
        plain = make_plan(*lengths, num_tasks=7, is_causal=True)
        plan = make_plan(*lengths, num_tasks=7, pattern=strided(4))
        assert plan.token_groups == plain.token_groups and plan.key_groups == plain.key_groups
    plan = make_plan(75, 40, num_tasks=7, pattern=strided(4))
    full = make_plan(75, 40, num_tasks=7)
    assert plan.token_groups == full.token_groups and plan.key_groups == full.key_groups


def test_a_causal_plan_of_a_pattern_is_of_what_both_allow():
    window = sliding_window(3, 3)
    plan = make_plan(50, num_tasks=7, pattern=window, is_causal=True)
    assert plan.pattern == window & causal() and not plan.is_causal
    assert plan is make_plan(50, num_tasks=7, pattern=window & causal())
    assert plan.live_pairs == (window & causal()).bind(50).num_pairs


def test_plans_of_patterns_are_values():
    plan = make_plan(60, num_tasks=7, pattern=strided(4))
    assert plan == make_plan(60, 60, num_tasks=7, pattern=strided(4))
    assert plan != make_plan(60, num_tasks=7, pattern=strided(5)) != make_plan(60, num_tasks=7)
    assert pickle.loads(pickle.dumps(plan)).tasks == plan.tasks
    window = make_plan(700, num_tasks=7, pattern=sliding_window(5))
    assert "over 700 x 700 sliding_window(5, 0) attention, quorums of 3 groups" in str(window)


def test_work_is_levelled_once_and_only_when_a_task_is_asked_for(monkeypatch):
    calls = []

    def balance_work(*arguments):
        calls.append(arguments)
        return original(*arguments)

    original = quorums_module.balance_work
    monkeypatch.setattr(quorums_module, "balance_work", balance_work)
    plan = make_plan(61, num_tasks=7, pattern=strided(6))
    assert not calls
    assert plan.task(3) == plan.task(3) == plan.tasks[3]
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", ["causal()", 3, True, np.ones((4, 4), dtype=bool), causal])
def test_what_is_no_pattern_is_refused(wrong):
    for call in (
        lambda: make_plan(4, num_tasks=2, pattern=wrong),
        lambda: Plan.from_json(make_plan(4, num_tasks=2).to_json(), wrong),
    ):
        with pytest.raises(TypeError, match=r"pattern must be a cqs.patterns.Pattern or None, got"):
            call()


def test_a_pattern_that_does_not_fit_is_refused():
    heads = per_head([[causal(), sliding_window(3)]])
    for is_causal in (False, True):
        with pytest.raises(ValueError, match="differs by head"):
            make_plan(8, num_tasks=2, pattern=heads, is_causal=is_causal)
    with pytest.raises(ValueError, match="requires lengths"):
        make_plan(8, num_tasks=2, pattern=from_mask(np.ones((4, 4), dtype=bool)))


PLANS = {
    "window": make_plan(60, num_tasks=7, pattern=sliding_window(9, 4)),
    "strided-even": make_plan(61, num_tasks=8, pattern=strided(5)),
    "more-keys": make_plan(40, 75, num_tasks=7, pattern=fixed(6, 2)),
    "more-queries": make_plan(75, 40, num_tasks=4, pattern=block_diagonal(9)),
    "tile": make_plan(5000, num_tasks=7, tile=128, pattern=bigbird()),
    "nothing": make_plan(0, num_tasks=3, pattern=causal()),
    "one-worker": make_plan(9, num_tasks=1, pattern=dilated(2, 2, 2)),
}
EVERY = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
EVERY_WITH_WORK = pytest.mark.parametrize(
    "plan", [plan for plan in PLANS.values() if plan.live_pairs > 9 * plan.num_tasks]
)


@EVERY
def test_a_plan_with_its_pattern_survives_json(plan):
    for list_tasks in (False, True):
        text = plan.to_json(list_tasks=list_tasks)
        assert json.loads(text)["pattern"] == repr(plan.pattern)
        again = Plan.from_json(text, plan.pattern)
        assert again == plan and again.tasks == plan.tasks
        assert again.to_json(list_tasks=list_tasks) == text


@EVERY
def test_a_plan_is_not_read_with_another_pattern(plan):
    text = plan.to_json()
    for other in (None, sliding_window(2, 7)):
        with pytest.raises(ValueError, match=r"the pattern of the plan is .*, got .*: pass"):
            Plan.from_json(text, other)
    plain = make_plan(60, num_tasks=7)
    assert "pattern" not in json.loads(plain.to_json())
    with pytest.raises(ValueError, match=r"is None, got causal\(\): pass"):
        Plan.from_json(plain.to_json(), causal())


def single_pair(key):
    mask = np.zeros((64, 64), dtype=bool)
    mask[3, key] = True
    return from_mask(mask)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (single_pair(5), single_pair(6)),
        (single_pair(5) | strided(4), single_pair(6) | strided(4)),
        (block_sparse([[1, 0]] * 2, 32), block_sparse([[0, 1]] * 2, 32)),
        (acsr([0] * 64, [1] * 64, [3] * 64), acsr([1] * 64, [1] * 64, [3] * 64)),
    ],
    ids=repr,
)
def test_patterns_of_arrays_are_told_apart(one, other):
    text = make_plan(64, num_tasks=2, pattern=one).to_json()
    again = Plan.from_json(text, pickle.loads(pickle.dumps(one)))
    assert again.pattern == one
    with pytest.raises(ValueError, match=r"the pattern of the plan is .*, got .*: pass"):
        Plan.from_json(text, other)


def test_a_falsified_plan_is_refused():
    plan = PLANS["strided-even"]
    for change in (
        lambda written: written["tasks"][3]["blocks"].pop(),
        lambda written: written["tasks"][2].__setitem__("live_pairs", 1),
        lambda written: written.__setitem__("is_causal", True),
        lambda written: written.__setitem__("seqlen_q", 62),
        lambda written: written.pop("pattern"),
    ):
        written = json.loads(plan.to_json(list_tasks=True))
        change(written)
        with pytest.raises(ValueError, match=r"not a plan|the pattern of the plan"):
            Plan.from_json(json.dumps(written), plan.pattern)


def refuse(plan, tasks, message):
    lengths = plan.seqlen_q, plan.seqlen_kv
    groups = TokenGroups(*lengths, 1, False, tile=1, pattern=plan.pattern.bind(*lengths))
    with pytest.raises(ValueError, match=message):
        validate_tasks(tasks, groups)


def changed_steps(plan, change):
    """For every step the tasks of a plan in which ``change(step)`` stands in its place."""
    for task in plan.tasks:
        for index, step in enumerate(task.steps):
            steps = (*task.steps[:index], *change(step), *task.steps[index + 1 :])
            tasks = list(plan.tasks)
            tasks[task.index] = replace(task, steps=steps)
            yield tasks


@EVERY_WITH_WORK
def test_a_task_left_out_or_done_twice_is_refused(plan):
    for index, task in enumerate(plan.tasks):
        refuse(plan, plan.tasks[:index] + plan.tasks[index + 1 :], "owned never")
        refuse(plan, (*plan.tasks, task), r"keys \d+\.\.\d+ of queries .* are owned twice")


@pytest.mark.slow
@EVERY_WITH_WORK
def test_a_changed_step_is_refused(plan):
    def shorter(queries):
        return range(queries.start + 1, queries.stop)

    wrong = {
        "holds no live pair|owned|holds": lambda step: [step._replace(keys=step.keys[1:])],
        "owned|holds no live pair": lambda step: [step._replace(queries=shorter(step.queries))],
        r"holds \d+ live pairs": lambda step: [step._replace(live_pairs=step.live_pairs - 1)],
        "owned twice": lambda step: [step, step],
        "owned never": lambda step: [],
        "reaches beyond the": lambda step: [step._replace(keys=(range(plan.seqlen_kv + 1),))],
        "reach beyond the": lambda step: [step._replace(queries=range(-1, 0))],
        "is a causal block": lambda step: [step._replace(causal_keys=step.queries)],
    }
    for message, change in wrong.items():
        for tasks in changed_steps(plan, change):
            refuse(plan, tasks, message)


def test_a_block_without_a_live_pair_is_refused():
    plan = make_plan(60, num_tasks=3, pattern=block_diagonal(10))
    task = plan.tasks[0]
    step = task.steps[0]
    beyond = step._replace(keys=(*step.keys, range(50, 60)))
    tasks = [replace(task, steps=(beyond, *task.steps[1:])), *plan.tasks[1:]]
    refuse(plan, tasks, r"keys=range\(50, 60\), is_causal=False\) holds no live pair")


@pytest.mark.parametrize(
    ("digest", "arguments"),
    [
        ("42b5fa264da8371b", {"seqlen_q": 60, "num_tasks": 7}),
        ("af7dd3ab2607e1f1", {"seqlen_q": 61, "num_tasks": 8, "is_causal": True}),
        (
            "b31e1f54b61d9b11",
            {"seqlen_q": 40, "seqlen_kv": 75, "num_tasks": 7, "is_causal": True},
        ),
        (
            "273d7a2d930d5fcb",
            {"seqlen_q": 75, "seqlen_kv": 40, "num_tasks": 4, "is_causal": True},
        ),
        (
            "8ac77fcbfeaf689e",
            {"seqlen_q": 9999, "seqlen_kv": 20001, "num_tasks": 13, "tile": 128},
        ),
        ("756956bdb4fed895", {"seqlen_q": 10**9, "num_tasks": 31, "is_causal": True}),
    ],
)
def test_plans_without_a_pattern_are_what_they_were(digest, arguments):
    """Digests of what was written before there were plans of patterns, under older names."""
    text = make_plan(**arguments).to_json(list_tasks=True).replace('"version": 2, ', "")
    text = text.replace('"num_tasks"', '"num_workers"').replace('"index"', '"worker"')
    assert sha256(text.encode()).hexdigest()[:16] == digest
