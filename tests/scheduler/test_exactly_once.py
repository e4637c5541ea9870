import math
from itertools import pairwise

import numpy as np
import pytest

from cqs.scheduler import make_plan

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
CROSS = [0, 1, 2, 5, 13, 40]


def live_mask(plan):
    """Which pairs attention needs, from the definition."""
    lengths = plan.seqlen_q, plan.seqlen_kv
    if plan.pattern is not None:
        return plan.pattern.to_mask(*lengths)
    mask = np.ones(lengths, dtype=bool)
    return np.tril(mask, plan.seqlen_kv - plan.seqlen_q) if plan.is_causal else mask


def assert_owned_once(plan):
    """Count the owners of every single pair; tasks hold exactly the groups of their pairs."""
    blind = max(plan.seqlen_q - plan.seqlen_kv, 0) if plan.is_causal else 0
    query_groups = [range(max(group.start, blind), group.stop) for group in plan.token_groups]
    live = live_mask(plan)
    counts = np.zeros(live.shape, dtype=int)
    for task in plan.tasks:
        own = np.zeros_like(counts)
        for block in task.blocks:
            part = own[slice_of(block.queries), slice_of(block.keys)]
            assert part.shape == (len(block.queries), len(block.keys)), "outside the score matrix"
            part += np.tri(*part.shape, dtype=int) if block.is_causal else 1
        counts += own
        own = own if plan.pattern is None else own & live
        queries = [i for i, group in enumerate(query_groups) if own[slice_of(group)].any()]
        keys = [i for i, group in enumerate(plan.key_groups) if own[:, slice_of(group)].any()]
        assert task.held_queries == tuple(query_groups[i] for i in queries), plan
        assert task.held_keys == tuple(plan.key_groups[i] for i in keys), plan
        held = {*queries, *(i % plan.num_tasks for i in keys)}
        assert task.held_groups == tuple(sorted(held)), plan
    assert counts.max(initial=0) <= 1 and (counts[live] == 1).all(), plan
    assert plan.pattern is not None or counts.sum() == live.sum(), plan
    assert sum(task.live_pairs for task in plan.tasks) == plan.live_pairs == live.sum()
    plan.validate()


def slice_of(tokens):
    return slice(tokens.start, tokens.stop)


@pytest.mark.sample(4)
@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("which", range(4))
def test_every_live_pair_has_one_owner_and_all_tasks_have_equal_work(which, is_causal):
    """Beyond 64 tasks each length has every twelfth number, odd or even."""
    for num_tasks in (*range(1, 65), *range(65 + which, 201, 12)):
        seqlen = (num_tasks // 2, num_tasks, 7 * num_tasks + 3, 10**9)[which]
        plan = make_plan(seqlen, num_tasks=num_tasks, is_causal=is_causal)
        plan.validate()
        work = [task.live_pairs for task in plan.tasks]
        total = seqlen * (seqlen + 1) // 2 if is_causal else seqlen * seqlen
        assert sum(work) == total == plan.live_pairs
        group = math.ceil(seqlen / num_tasks)
        allowed = num_tasks * (num_tasks * (2 * group + 1) + group)
        assert max(abs(num_tasks * pairs - total) for pairs in work) <= allowed


@KINDS
@pytest.mark.parametrize("num_tasks", [*range(1, 17), 31, 48])
def test_every_single_pair_is_owned_once_for_short_sequences(record_bits, num_tasks, is_causal):
    for seqlen in {*range(12), num_tasks - 1, num_tasks, 2 * num_tasks + 1, 41}:
        plan = make_plan(seqlen, num_tasks=num_tasks, is_causal=is_causal)
        assert_owned_once(plan)
        record_bits(plan.to_json(list_tasks=True))


@KINDS
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 7, 8, 12, 20])
def test_every_single_pair_is_owned_once_when_lengths_differ(record_bits, num_tasks, is_causal):
    for seqlen_q in CROSS:
        for seqlen_kv in CROSS:
            plan = make_plan(seqlen_q, seqlen_kv, num_tasks=num_tasks, is_causal=is_causal)
            assert_owned_once(plan)
            record_bits(plan.to_json(list_tasks=True))


@KINDS
@pytest.mark.parametrize("num_tasks", [*range(1, 17), 31, 32])
def test_blocks_steps_and_counts_of_a_task_agree(num_tasks, is_causal):
    for lengths in [(3, 3), (50, 50), (50, 75), (75, 50)]:
        for task in make_plan(*lengths, num_tasks=num_tasks, is_causal=is_causal).tasks:
            assert task.blocks == tuple(b for step in task.steps for b in step.blocks())
            assert all(block.num_pairs for block in task.blocks)
            assert task.live_pairs == sum(block.num_pairs for block in task.blocks)
            for step in task.steps:
                assert step.live_pairs == sum(block.num_pairs for block in step.blocks())
                assert all(a.stop < b.start for a, b in pairwise(step.keys))
