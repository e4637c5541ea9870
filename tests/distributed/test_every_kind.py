"""Plans of every kind: each live pair has one owner, and results are exact on every world."""

import random

import pytest
from programs import (
    chosen_by_links,
    count_bytes,
    largest_errors,
    links_of_later_groups,
    probe_of_hosts,
)
from random_problems import kinds_of, random_case, random_problems

from benchmarks.cases import Case
from cqs.scheduler import Grid2D, Hosts, Plan, Quorums, make_plan
from cqs.scheduler.machines import Links

NUM_PROBLEMS = 3000
BATCH = 100


@pytest.mark.sample(8)
@pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))
def test_random_plans_are_valid(batch):
    generator = random.Random(batch)
    for _ in range(BATCH):
        case, num_tasks = random_case(generator), generator.choice([*range(1, 13), 16, 18, 24])
        plan = make_plan(
            case.seqlen_q,
            case.seqlen_kv,
            num_tasks=num_tasks,
            is_causal=case.is_causal,
            pattern=case.pattern,
            kind=generator.choice(kinds_of(num_tasks)),
            tile=generator.choice([1, 1, 4]),
        )
        plan.validate()
        assert Plan.from_json(plan.to_json(list_tasks=True), case.pattern) == plan
        assert sum(task.live_pairs for task in plan.tasks) == plan.live_pairs


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))
def test_random_problems_are_exact(ranks, batch):
    num_ranks = 1 + batch % 8
    problems = random_problems(batch, BATCH, num_ranks)
    for each in zip(*ranks.run(num_ranks, largest_errors, problems), problems, strict=True):
        *errors, problem = each
        assert max(errors) < 1e-10, problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "plan", "num_queries", "num_keys"),
    [
        (7, Quorums(), 3, 3),
        (8, "rows", 1, 8),
        (8, Grid2D(8, 1), 8, 1),
        (8, Grid2D(2, 4), 2, 4),
        (6, Grid2D(3, 2), 3, 2),
        (6, Hosts(Quorums(), 2), 2, 4),
        (8, Hosts(Grid2D(2, 2), 2), 2, 4),
    ],
    ids=str,
)
def test_ranks_send_the_bytes_of_the_formulas(ranks, num_ranks, plan, num_queries, num_keys):
    """In units of N x d per rank: 2 (a - 1) of queries and results, 2 g (b - 1) of keys."""
    case = Case("bytes", 24 * num_ranks, 24 * num_ranks, num_heads=4, num_kv_heads=2)
    queries, keys, lse = (24 * 4 * each for each in (4 * 16, 2 * 2 * 16, 4))
    if num_queries == 1:  # results of all keys are sent without an LSE if they are sent at all
        forward, backward = (num_ranks - 1) * keys, (num_ranks - 1) * keys
    else:
        forward = (num_queries - 1) * (2 * queries + lse) + (num_keys - 1) * keys
        backward = (num_queries - 1) * (3 * queries + lse) + (num_keys - 1) * keys
    found = ranks.run(num_ranks, count_bytes, case, {"plan": plan, "head_parallel": 1})
    assert found == [[forward, backward]] * num_ranks


@pytest.mark.slow
def test_links_decide_the_plan_of_all_ranks(ranks):
    rows = (Grid2D(1, 7), 1)
    assert ranks.run(7, chosen_by_links, (1e5, 1e-3)) == [[rows]] * 7
    assert ranks.run(7, chosen_by_links, None) == [[(Quorums((0, 1, 3)), 1)]] * 7


@pytest.mark.parametrize(
    ("hosts", "other", "sharing"), [([0, 0, 1, 1, 2, 2], 2, 2), ([0, 1, 1, 2], 1, 1)]
)
def test_rank_0_measures_the_links_between_hosts_once(ranks, hosts, other, sharing):
    (calls, first), *rest = ranks.run(len(hosts), probe_of_hosts, hosts)
    assert calls == [(other, sharing)]
    assert [len(calls) for calls, _ in rest] == [rank == other for rank in range(1, len(hosts))]
    assert all(links == first for _, links in rest) and first[0] == first[1]
    assert first[0].bandwidth > 0 and first[0].latency > 0


def test_links_within_a_host_are_not_measured(ranks):
    assert [calls for calls, _ in ranks.run(3, probe_of_hosts, [0, 0, 0])] == [[]] * 3


def test_a_later_group_keeps_the_links_of_an_earlier_one(ranks):
    links = Links(5e6, 1e-3)
    for measured, pinned, used in ranks.run(3, links_of_later_groups, [0, 1, 1], links):
        assert measured is not None and pinned == used == links
    for measured, *_ in ranks.run(3, links_of_later_groups, [0, 0, 0], links):
        assert measured is None
