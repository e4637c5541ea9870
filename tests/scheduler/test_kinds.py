"""Plans by rows, grids and hosts, worked out by hand."""

import json
import pickle
import time
from dataclasses import replace

import pytest

from cqs.patterns import causal, documents, padded, sliding_window
from cqs.scheduler import AttentionShape, Grid2D, Hosts, Plan, Quorums, make_plan
from cqs.scheduler.cost_model import predict
from cqs.scheduler.machines import Machine
from cqs.scheduler.validate import validate_single_tasks
from cqs.scheduler.workload import Workload


def table(plan):
    """List the (queries, keys) of every block of every task, as (first, last) tokens."""
    return [
        [(*_ends(block.queries), *_ends(block.keys)) for block in task.blocks]
        for task in plan.tasks
    ]


def _ends(tokens):
    return tokens.start, tokens.stop - 1


def test_rows_are_queries_with_all_keys():
    plan = make_plan(5, 7, num_tasks=3, kind="rows")
    assert table(plan) == [[(0, 0, 0, 6)], [(1, 2, 0, 6)], [(3, 4, 0, 6)]]
    assert plan.kind == Grid2D(1, 3) and plan.kind.num_groups == (1, 3)


def test_rows_that_are_not_balanced_stay_with_their_task():
    kind = Grid2D(1, 3, is_balanced=False)
    plan = make_plan(12, num_tasks=3, is_causal=True, kind=kind)
    plan.validate()
    assert [task.live_pairs for task in plan.tasks] == [10, 26, 42]
    assert max(task.live_pairs for task in plan.tasks) < kind.busiest * 26
    assert str(kind) == "a grid of 1 query groups x 3 key groups, not balanced"
    assert Plan.from_json(plan.to_json()) == plan
    assert plan != make_plan(12, num_tasks=3, is_causal=True, kind="rows")
    with pytest.raises(TypeError, match="is_balanced must be a bool, got 1"):
        Grid2D(1, 3, is_balanced=1)


@pytest.mark.parametrize(
    ("bandwidth", "kind"), [(1.25e6, Grid2D(1, 4, is_balanced=False)), (1e11, Quorums((0, 1, 2)))]
)
def test_slow_links_are_worth_unequal_work(bandwidth, kind):
    machine = Machine(60e9, 60e9, 0.0, devices_per_node=1, between=bandwidth, latency=1e-6)
    workload = Workload(1680, AttentionShape(8, 64, num_kv_heads=2, itemsize=4), is_causal=True)
    assert predict("cqs", workload, 8, machine, plan="any", head_parallel=2).kind == kind


def test_causal_columns_are_zigzag_and_their_rows_balanced():
    plan = make_plan(8, num_tasks=4, is_causal=True, kind=Grid2D(2, 2))
    assert table(plan) == [
        [(0, 1, 0, 1), (2, 3, 0, 1), (4, 4, 0, 1)],  # keys of groups 0 and 3; row 4 of task 3
        [(2, 3, 2, 3), (4, 4, 2, 3), (4, 4, 4, 4)],  # keys of groups 1 and 2; row 4 of task 2
        [(5, 5, 2, 4), (5, 5, 5, 5), (6, 7, 2, 5)],
        [(5, 5, 0, 1), (6, 7, 0, 1), (6, 7, 6, 7)],
    ]
    assert [task.live_pairs for task in plan.tasks] == [9, 6, 12, 9]


def test_ranks_of_a_host_share_the_rows_of_its_task():
    plan = make_plan(12, num_tasks=6, kind=Hosts(Quorums((0, 1)), 2))
    outer = make_plan(12, num_tasks=3, kind=Quorums((0, 1)))
    assert table(outer)[1] == [(4, 7, 4, 11), (8, 11, 4, 7)]
    assert table(plan)[2:4] == [[(4, 5, 4, 11), (8, 9, 4, 7)], [(6, 7, 4, 11), (10, 11, 4, 7)]]


def test_rows_of_a_pattern_hold_its_live_keys_only():
    pattern = documents([0, 10, 40], is_causal=False) & padded([30])
    plan = make_plan(40, num_tasks=4, kind="rows", pattern=pattern)
    assert table(plan) == [
        [(0, 9, 0, 9)],
        [(13, 19, 10, 29)],
        [(23, 29, 10, 29)],
        [(10, 12, 10, 29), (20, 22, 10, 29)],  # no own rows are live: it has 6 of the 6.25 it lacks
    ]


@pytest.mark.parametrize(
    "kind",
    [Grid2D(1, 24), Grid2D(2, 12), Grid2D(6, 4), Hosts(Quorums(), 4), Hosts(Grid2D(3, 4), 2)],
    ids=str,
)
@pytest.mark.parametrize("pattern", [None, causal(), sliding_window(500)], ids=str)
def test_causal_work_is_balanced(kind, pattern):
    plan = make_plan(24_000, num_tasks=24, is_causal=pattern is None, kind=kind, pattern=pattern)
    most = max(task.live_pairs for task in plan.tasks)
    assert 24 * most <= 1.01 * plan.live_pairs + 24 * 24_000


def test_a_pattern_that_includes_causality_has_the_tasks_of_a_causal_plan():
    for kind in ("rows", "grid", Hosts(Quorums(), 2)):
        one = make_plan(400, num_tasks=8, is_causal=True, kind=kind)
        other = make_plan(400, num_tasks=8, pattern=causal(), kind=kind)
        for ours, theirs in zip(one.tasks, other.tasks, strict=True):
            assert ours.live_pairs == theirs.live_pairs
            assert ours.held_queries == theirs.held_queries


@pytest.mark.parametrize("kind", [Grid2D(2, 3), Hosts(Grid2D(3, 1), 2), Hosts(Quorums((0, 1)), 2)])
def test_kinds_survive_json_and_pickle(kind):
    plan = make_plan(50, num_tasks=6, is_causal=True, kind=kind)
    assert plan.tasks == pickle.loads(pickle.dumps(plan)).tasks
    for list_tasks in (False, True):
        text = plan.to_json(list_tasks=list_tasks)
        assert '"version": 3' in text
        assert Plan.from_json(text) == plan
    with pytest.raises(ValueError, match="must be the number of tasks, 4|8|modulo 4"):
        Plan.from_json(text.replace('"num_tasks": 6', '"num_tasks": 8'))


@pytest.mark.parametrize(
    "kind", [{"grid": 5}, {"grid": [1, 2, 3]}, {"hosts": [{"hosts": [{"grid": [1, 3]}, 1]}, 2]}]
)
def test_a_wrong_kind_is_refused(kind):
    plan = {"version": 3, "seqlen_q": 5, "seqlen_kv": 5, "num_tasks": 6, "is_causal": False}
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(json.dumps(plan | kind))


def test_a_row_with_two_tasks_is_noticed():
    tasks = make_plan(20, num_tasks=4, kind=Grid2D(2, 2)).tasks
    with pytest.raises(ValueError, match=r"queries 0..5 have keys in two steps"):
        validate_single_tasks(tasks)
    step = tasks[0].steps[0]
    last = step._replace(queries=step.queries[-1:])
    with pytest.raises(ValueError, match=r"queries 4..5 have keys in two steps"):
        validate_single_tasks([replace(tasks[0], steps=(step, last))])


@pytest.mark.slow
def test_large_plans_take_a_second():
    for kind in ("rows", "grid", Hosts(Grid2D(5, 25), 8)):
        start = time.process_time()
        plan = make_plan(10**9, num_tasks=1000, is_causal=True, kind=kind, tile=128)
        assert max(plan.task(w).live_pairs for w in range(0, 1000, 37)) > 0
        assert time.process_time() - start < 2
