"""What is said of workers is what their tasks need."""

import pytest

from cqs.executors.distributed.layout import keys_of, see_only, split_steps
from cqs.executors.distributed.route import cut_shards
from cqs.scheduler import make_plan
from cqs.scheduler.group_needs import group_needs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_tasks", [*range(1, 17), 26, 31, 40])
def test_needs_are_those_of_tasks(num_tasks, is_causal):
    """Of the workers that are looked at, one needs the most of anything."""
    size = 10
    plan = make_plan(*2 * [size * num_tasks], num_tasks=num_tasks, is_causal=is_causal)
    queries, keys = ([0] * num_tasks for _ in range(2))
    of_tasks, of_splits = set(), set()
    for task, own in zip(plan.tasks, cut_shards([size] * num_tasks), strict=True):
        _, home, away = split_steps(task.steps, own, own)
        is_mixed = not see_only(own, away) and any(set(each) & set(own) for each in keys_of(away))
        of_splits.add((sum(len(step.queries) for step in home) / size, is_mixed))
        rows = sum(len(step.queries) for step in task.steps)
        of_tasks.add((rows / size, sum(map(len, task.held_keys)) / size))
        for counts, held in (
            (queries, [step.queries for step in task.steps]),
            (keys, task.held_keys),
        ):
            for each in held:
                counts[each.start // size] += len(each) / size
    found = group_needs(plan.kind, num_tasks, is_causal=is_causal)
    most = [*map(max, zip(*of_tasks, strict=True)), max(queries), max(keys)]
    most += map(max, zip(*of_splits, strict=True))
    deviation = [a - b for a, b in zip(map(max, zip(*found, strict=True)), most, strict=True)]
    if num_tasks == 40:  # of which a few are counted
        assert all(abs(each) <= 1 for each in deviation)
    else:
        assert all(abs(each) < 1e-9 for each in deviation)
