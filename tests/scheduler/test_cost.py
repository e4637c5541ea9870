import pytest

from cqs.patterns import longformer, sliding_window
from cqs.scheduler import AttentionShape, make_plan, predict_cost

PLANS = {
    "full": make_plan(700, num_tasks=7),
    "ragged-even-causal": make_plan(701, num_tasks=8, is_causal=True),
    "cross-causal": make_plan(300, 801, num_tasks=13, is_causal=True),
    "more-queries-causal": make_plan(801, 300, num_tasks=6, is_causal=True),
    "more-workers-than-tokens": make_plan(9, num_tasks=31),
    "window": make_plan(701, num_tasks=7, pattern=sliding_window(50, 0)),
    "cross-longformer": make_plan(300, 801, num_tasks=8, pattern=longformer(64, 3)),
}
SHAPES = {
    "plain": AttentionShape(num_heads=8, head_dim=64),
    "gqa-batch": AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, batch=3),
    "value-dim-float32": AttentionShape(num_heads=4, head_dim=16, value_dim=24, itemsize=4),
    "float64": AttentionShape(num_heads=4, head_dim=16, itemsize=8),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@every_shape
@every_plan
def test_flops_count_two_products_per_live_pair(plan, shape):
    value_dim = shape.value_dim or shape.head_dim
    costs = [plan.predict_cost(index, shape) for index in range(plan.num_tasks)]
    per_pair = 2 * shape.head_dim + 2 * value_dim
    expected = per_pair * plan.live_pairs * shape.num_heads * shape.batch
    assert sum(cost.flops for cost in costs) == expected
    assert all(cost.peak_bytes >= cost.bytes_in + cost.bytes_out for cost in costs)


@every_shape
@every_plan
def test_bytes_in_are_those_of_the_groups_that_blocks_touch(plan, shape):
    value_dim = shape.value_dim or shape.head_dim
    kv_heads = shape.num_kv_heads or shape.num_heads
    for task in plan.tasks:
        queries = {q for block in task.blocks for q in block.queries}
        keys = {k for block in task.blocks for k in block.keys}
        num_queries = sum(len(g) for g in task.held_queries if queries & set(g))
        num_keys = sum(len(g) for g in task.held_keys if keys & set(g))
        elements = num_queries * shape.num_heads * shape.head_dim
        elements += num_keys * kv_heads * (shape.head_dim + value_dim)
        assert predict_cost(task, shape).bytes_in == elements * shape.batch * shape.itemsize


@every_shape
@every_plan
def test_bytes_out_are_an_output_and_an_lse_per_step_and_query(plan, shape):
    value_dim = shape.value_dim or shape.head_dim
    lse_bytes = 8 if shape.itemsize == 8 else 4
    for task in plan.tasks:
        rows = sum(step.queries.stop - step.queries.start for step in task.steps)
        row_bytes = value_dim * shape.itemsize + lse_bytes
        expected = rows * row_bytes * shape.num_heads * shape.batch
        assert predict_cost(task, shape).bytes_out == expected


def test_a_task_without_work_costs_nothing():
    cost = make_plan(0, num_tasks=3).predict_cost(1, AttentionShape(8, 64))
    assert (cost.flops, cost.bytes_in, cost.bytes_out, cost.peak_bytes) == (0, 0, 0, 0)
