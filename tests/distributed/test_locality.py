"""Splitting steps: every pair once, and on the right side."""

import random
from itertools import chain

import numpy as np
import pytest

from cqs.executors.distributed.layout import keys_of, see_only, split_steps
from cqs.scheduler import make_plan


def pairs_of(steps, shape):
    """Count how often steps have each pair."""
    counts = np.zeros(shape, dtype=int)
    for step in steps:
        for block in step.blocks():
            rows, columns = block.queries, block.keys
            ones = np.ones((len(rows), len(columns)), dtype=int)
            counts[rows.start : rows.stop, columns.start : columns.stop] += (
                np.tril(ones) if block.is_causal else ones
            )
    return counts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 8])
def test_every_pair_is_on_one_side(num_tasks, is_causal):
    generator = random.Random(num_tasks)
    for _ in range(40):
        seqlen_q = generator.randint(1, 60)
        seqlen_kv = seqlen_q + generator.randint(0, 20)
        plan = make_plan(seqlen_q, seqlen_kv, num_tasks=num_tasks, is_causal=is_causal)
        queries, keys = (
            range(*sorted(generator.randint(0, length) for _ in range(2)))
            for length in (seqlen_q, seqlen_kv)
        )
        for task in plan.tasks:
            split = split_steps(task.steps, queries, keys)
            shape = seqlen_q, seqlen_kv
            here, home, away = (pairs_of(part, shape) for part in split)
            there = home + away
            assert (here + there == pairs_of(task.steps, shape)).all()
            assert not home[: queries.start].any() and not home[queries.stop :].any()
            assert not away[queries.start : queries.stop].any()
            assert see_only(keys, split.own) and not (split.home and see_only(keys, split.home))
            seen = {key for tokens in keys_of(split.away) for key in tokens}
            assert seen == set(np.flatnonzero(away.any(0)))
            here[queries.start : queries.stop, keys.start : keys.stop] = 0
            assert not here.any()
            if not is_causal:
                assert not there[queries.start : queries.stop, keys.start : keys.stop].any()
            for step in chain(*split):
                assert step.live_pairs == pairs_of([step], shape).sum()
                assert all(a.stop < b.start for a, b in zip(step.keys, step.keys[1:], strict=False))


def test_groups_that_are_shards_are_split_whole():
    """As with equal shards: all of the diagonal is own work, causal or not."""
    for is_causal in (False, True):
        plan = make_plan(70, num_tasks=7, is_causal=is_causal)
        for task in plan.tasks:
            shard = range(10 * task.index, 10 * task.index + 10)
            split = split_steps(task.steps, shard, shard)
            assert sum(step.live_pairs for step in split.own) == (55 if is_causal else 100)
