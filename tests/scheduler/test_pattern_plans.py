import json
import pickle
import random
import time

import numpy as np
import pytest
from sparse_cases import random_pattern

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
    longformer,
    sliding_window,
    strided,
)
from cqs.scheduler import Plan, make_plan
from tests.scheduler.test_exactly_once import assert_owned_once, slice_of


def random_documents(seqlen, number, seed):
    cuts = random.Random(seed).sample(range(1, seqlen), number - 1)
    return documents([0, *sorted(cuts), seqlen])


def random_plans(num_tasks, number):
    """Plans of lengths that are often equal, without work or below the number of tasks."""
    for seed in range(number):
        draw = random.Random(f"{num_tasks} {seed}")
        choices = [0, 1, 2, 5, num_tasks - 1, num_tasks, 20, 37, 60]
        seqlen_q = draw.choice(choices)
        lengths = seqlen_q, draw.choice([seqlen_q, seqlen_q, draw.choice(choices)])
        ends = [[0, *sorted(draw.randint(0, n) for _ in range(3)), n] for n in lengths]
        packed = documents(*ends, is_causal=draw.random() < 0.5)
        yield make_plan(
            *lengths,
            num_tasks=num_tasks,
            is_causal=draw.random() < 0.3,
            tile=draw.choice([1, 1, 2, 8]),
            pattern=random_pattern(draw, max(lengths), draw.randint(1, 12), [packed]),
        )


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 8, 13])
def test_every_live_pair_is_computed_once(record_bits, num_tasks):
    for plan in random_plans(num_tasks, 120):
        assert_owned_once(plan)
        record_bits(plan.to_json(list_tasks=True))
        mask = plan.pattern.to_mask(plan.seqlen_q, plan.seqlen_kv)
        for task in plan.tasks:
            rows_of_steps = [row for step in task.steps for row in step.queries]
            assert len({*rows_of_steps}) == len(rows_of_steps), f"{plan}: a row in two steps"
            for step in task.steps:
                live = np.zeros_like(mask)
                for keys in step.keys:
                    place = slice_of(step.queries), slice_of(keys)
                    live[place] = mask[place]
                rows = np.flatnonzero(live.any(axis=1))
                assert step.queries == range(rows[0], rows[-1] + 1), plan
                assert step.live_pairs == live.sum() and step.causal_keys is None, plan


def balance(plan):
    """Live pairs of the busiest task over the mean."""
    return plan.num_tasks / plan.responsibility_ratio


def patterns_with_work(seqlen, num_tasks):
    """Patterns with enough work for all tasks, by name."""
    group = seqlen // num_tasks
    layout = np.random.default_rng(0).random((-(-seqlen // 128),) * 2)
    return {
        "causal": causal(),
        "window-2.5-groups": sliding_window(int(2.5 * group)),
        "window-quarter": sliding_window(seqlen // 4),
        "window-narrow": sliding_window(group // 16),
        "window-lopsided": sliding_window(seqlen // 5, seqlen // 9),
        "strided": strided(1000),
        "fixed": fixed(512, 32),
        "blocks-1000": block_diagonal(1000),
        "blocks-fifth": block_diagonal(seqlen // 5),
        "documents": random_documents(seqlen, 32, 0),
        "dilated": dilated(64, 64, 8),
        "longformer": longformer(512, 64),
        "bigbird": bigbird(),
        "random-blocks": block_sparse(layout < 0.1, 128),
        "random-blocks-skewed": block_sparse(layout < np.linspace(0, 0.3, len(layout)), 128),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_tasks", [4, 7, 8, 13, 31])
@pytest.mark.parametrize("name", patterns_with_work(65536, 4))
def test_the_busiest_task_has_hardly_more_than_the_mean(record_bits, name, num_tasks):
    """And holds at most one group more than a quorum."""
    for seqlen in (65536, 65521):
        pattern = patterns_with_work(seqlen, num_tasks)[name]
        plan = make_plan(seqlen, num_tasks=num_tasks, pattern=pattern)
        assert 1 <= balance(plan) <= 1.011
        size = len(plan.interest_set)
        assert max(len(task.held_groups) for task in plan.tasks) <= size + 1
        record_bits(plan.to_json(list_tasks=True))


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


@pytest.mark.parametrize("num_tasks", [7, 13, 31])
def test_few_queries_are_shared_out_by_keys(num_tasks):
    for seqlen_q, most in ((1, 1.001), (16, 1.07)):
        plan = make_plan(seqlen_q, 10**6, num_tasks=num_tasks, pattern=causal())
        assert balance(plan) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seqlen", "num_tasks", "pattern"),
    [
        (65536, 183, documents([0, 50577, 65536])),
        (65536, 211, causal() - sliding_window(31219)),
        (10**9, 111, random_documents(10**9, 32, 0)),
    ],
    ids=range(3),
)
def test_much_work_for_few_is_balanced_in_seconds(seqlen, num_tasks, pattern):
    """Long paths lead from the tasks that have it to those that lack it."""
    start = time.process_time()
    plan = make_plan(seqlen, num_tasks=num_tasks, pattern=pattern)
    assert balance(plan) <= 1.011
    assert time.process_time() - start < 10
    plan.validate()


@pytest.mark.parametrize("num_tasks", [7, 8])
def test_groups_are_cut_at_tiles(num_tasks):
    """Rows end at a tile, at the end of a group or of the live rows."""
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
    for lengths in [(60, 60), (40, 75), (75, 40)]:
        plain = make_plan(*lengths, num_tasks=7, is_causal=lengths != (75, 40))
        plan = make_plan(*lengths, num_tasks=7, pattern=strided(4))
        assert plan.token_groups == plain.token_groups and plan.key_groups == plain.key_groups


def test_plans_of_patterns_are_values():
    plan = make_plan(60, num_tasks=7, pattern=strided(4))
    assert plan == make_plan(60, 60, num_tasks=7, pattern=strided(4))
    assert plan != make_plan(60, num_tasks=7, pattern=strided(5)) != make_plan(60, num_tasks=7)
    assert pickle.loads(pickle.dumps(plan)).tasks == plan.tasks
    window = sliding_window(3, 3)
    plan = make_plan(50, num_tasks=7, pattern=window, is_causal=True)
    assert plan.pattern == window & causal() and not plan.is_causal
    assert plan is make_plan(50, num_tasks=7, pattern=window & causal())
    window = make_plan(700, num_tasks=7, pattern=sliding_window(5))
    assert "over 700 x 700 sliding_window(5, 0) attention, quorums of 3 groups" in str(window)


def single_pair(key):
    mask = np.zeros((64, 64), dtype=bool)
    mask[3, key] = True
    return from_mask(mask)


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (sliding_window(9, 4), sliding_window(2, 7)),
        (strided(5), None),
        (single_pair(5), single_pair(6)),
        (single_pair(5) | strided(4), single_pair(6) | strided(4)),
        (block_sparse([[1, 0]] * 2, 32), block_sparse([[0, 1]] * 2, 32)),
        (acsr([0] * 64, [1] * 64, [3] * 64), acsr([1] * 64, [1] * 64, [3] * 64)),
        (None, causal()),
    ],
    ids=repr,
)
def test_a_plan_is_not_read_with_another_pattern(pattern, other):
    plan = make_plan(64, num_tasks=7, pattern=pattern)
    for list_tasks in (False, True):
        text = plan.to_json(list_tasks=list_tasks)
        assert json.loads(text).get("pattern") == (pattern and repr(pattern))
        again = Plan.from_json(text, pickle.loads(pickle.dumps(pattern)))
        assert again == plan and again.tasks == plan.tasks
        assert again.to_json(list_tasks=list_tasks) == text
        with pytest.raises(ValueError, match=r"the pattern of the plan is .*, got .*: pass"):
            Plan.from_json(text, other)
