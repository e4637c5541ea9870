import pytest

from cqs.scheduler import Plan, make_plan


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tasks", [1, 2, 7, 31, 64])
@pytest.mark.parametrize(
    "lengths", [(16384, 16384), (9999, 20001), (10**9, 10**6), (777_777, 10**9), (5, 10**9)]
)
def test_groups_end_at_tiles_where_they_have_one(lengths, num_tasks, is_causal):
    plan = make_plan(*lengths, num_tasks=num_tasks, is_causal=is_causal, tile=128)
    plan.validate()
    for groups in (plan.token_groups, plan.key_groups):
        assert groups[0].start == 0
        assert all(a.stop == b.start for a, b in zip(groups, groups[1:], strict=False))
    if lengths[0] == lengths[1] and lengths[0] >= 128 * num_tasks:
        assert all(group.stop % 128 == 0 for group in plan.token_groups)
        sizes = [len(group) for group in plan.token_groups]
        assert max(sizes) - min(sizes) <= 128
        steps = [step for task in plan.tasks for step in task.steps]
        assert all(step.queries.start % 128 == 0 for step in steps)


def test_sequences_too_short_for_tiles_are_cut_evenly():
    for num_tasks in (7, 8):
        plan = make_plan(500, num_tasks=num_tasks, tile=128)
        assert plan.token_groups == make_plan(500, num_tasks=num_tasks).token_groups


def test_a_tile_costs_little_balance():
    for is_causal in (False, True):
        plan = make_plan(2**17, num_tasks=31, is_causal=is_causal, tile=128)
        assert plan.responsibility_ratio > 30


def test_the_tile_is_part_of_a_written_plan():
    plan = make_plan(5000, num_tasks=7, tile=128)
    assert Plan.from_json(plan.to_json()) == plan != make_plan(5000, num_tasks=7)
    with pytest.raises(ValueError, match="tile must be at least 1, got 0"):
        make_plan(5000, num_tasks=7, tile=0)
