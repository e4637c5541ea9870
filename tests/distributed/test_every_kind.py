"""Plans of every kind: each live pair has one owner, and results are exact on every world."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from programs import ShardedProblem, count_bytes, even_cuts, largest_errors
from random_problems import kinds_of, random_case, random_problems

import cqs.distributed
from benchmarks.cases import Case
from cqs.distributed import Strategy
from cqs.executors.distributed import layout, prepared
from cqs.executors.distributed.transport import connections
from cqs.executors.distributed.transport.connections import Links
from cqs.scheduler import Grid2D, Hosts, Plan, Quorums, make_plan
from cqs.scheduler.cost_model import predict

NUM_PROBLEMS = 3000
BATCH = 50


@pytest.mark.sample(16)
@pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))
def test_random_plans_are_valid(record_bits, batch):
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
        record_bits(plan.to_json(list_tasks=True))


@pytest.mark.slow
@pytest.mark.sample(40)
@pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))
def test_random_problems_are_exact(ranks, record_bits, batch):
    num_ranks = 1 + (batch + 5) % 8
    problems = random_problems(batch, BATCH, num_ranks)
    problems += random_problems(batch, BATCH // 6, num_ranks, is_packed=True)
    for *errors, problem in zip(
        *ranks.run(num_ranks, largest_errors, problems), problems, strict=True
    ):
        assert max(errors) < 1e-10, problem
        record_bits(errors)


def bytes_sent(group, case, options):
    """Return the bytes that this rank sends in a forward pass, and in a backward pass."""
    cuts = even_cuts(case.seqlen_q, dist.get_world_size(group))
    problem = ShardedProblem(group, case, cuts, torch.float32)
    with count_bytes() as of_forward:
        output = problem.attend(return_lse=True, **options).output
    with count_bytes() as of_backward:
        output.sum().backward()
    return [sum(of_forward), sum(of_backward)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "plan", "num_queries", "num_keys"),
    [
        (7, Quorums(), 3, 3),
        (8, "rows", 1, 8),
        (8, Grid2D(8, 1), 8, 1),
        (8, Grid2D(2, 4), 2, 4),
        (8, Hosts(Grid2D(2, 2), 2), 2, 4),
        (6, Hosts(Quorums(), 2), 2, 4),
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
    sent = ranks.run(num_ranks, bytes_sent, case, {"plan": plan, "head_parallel": 1})
    assert sent == [[forward, backward]] * num_ranks


def on_hosts(patch, group, hosts):
    """Have ranks be on hosts, with links that have not been measured."""
    patch.setattr(connections, "_hosts", {})
    patch.setattr(connections, "_host", lambda: hosts[dist.get_rank(group)])
    patch.setattr(connections, "_measured", {})
    patch.setattr(prepared, "_placements", {})


def call_on_hosts(group, hosts, links=None):
    """Return ranks per host, kind of plan and degree that a call chooses, and what it measures.

    The last are the links that this rank uses afterwards, twice.
    """
    choices, calls, measure = [], [], connections._measure

    def predict_and_note(method, workload, num_ranks, machine, *arguments, **options):
        prediction = predict(method, workload, num_ranks, machine, *arguments, **options)
        choices.append((machine.devices_per_node, prediction.kind, prediction.head_parallel))
        return prediction

    with pytest.MonkeyPatch.context() as patch:
        on_hosts(patch, group, hosts)
        patch.setattr(layout, "predict", predict_and_note)
        patch.setattr(connections, "_measure", lambda *a: calls.append(a[2:]) or measure(*a))
        layout.lay_out.cache_clear()
        tensors = [torch.randn(1, heads, 20, 8) for heads in (4, 1, 1)]
        cqs.distributed.attention(*tensors, group=group, strategy=Strategy(links=links))
        (chosen,), measured = choices, list(calls)
        assert chosen[0] == connections.ranks_per_host(group)
        device = torch.device("cpu")
        return chosen, measured, [connections.probe_links(group, device) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("links", "kind"), [((1e5, 1e-3), Grid2D(1, 7)), (None, Quorums((0, 1, 3)))], ids=str
)
def test_links_decide_the_plan_of_all_ranks(ranks, links, kind):
    for chosen, *_ in ranks.run(7, call_on_hosts, [0] * 7, links):
        assert chosen == (7, kind, 1)


HOSTS = [
    *[([0, 0, 0, 0], 4), ([0, 0, 1, 1], 2), ([0, 0, 1, 1, 2, 2], 2), ([0, 0, 0, 1], 1)],
    *[([0, 1, 0, 1], 1), ([0, 1, 1, 2], 1)],
]


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "per_host"), HOSTS, ids=str)
def test_links_between_hosts_are_measured_once(ranks, hosts, per_host):
    """By rank 0 and the first on another host; ranks of a host are neighbours of equal number."""
    found = ranks.run(len(hosts), call_on_hosts, hosts)
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    measuring = set() if other is None else {0, other}
    for rank, ((number, *_), calls, links) in enumerate(found):
        assert number == per_host and len(calls) == (rank in measuring)
        assert links == found[0][2] and links[0] == links[1]
    if measuring:
        _, calls, (links, _) = found[0]
        assert calls == [(other, per_host)]
        assert links.bandwidth > 0 and links.latency > 0


def links_of_later_groups(group, hosts, links):
    """Return the links that a group pins, without and with those of an earlier group."""
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        on_hosts(patch, group, hosts)
        measured = connections.pin_links(group, None, device)
        # An earlier group's links are not measured again.
        patch.setattr(connections, "_measure", None)
        pinned = connections.pin_links(group, links, device)
        return measured, pinned, connections.probe_links(group, device)


def test_a_later_group_keeps_the_links_of_an_earlier_one(ranks):
    links = Links(5e6, 1e-3)
    for measured, pinned, used in ranks.run(3, links_of_later_groups, [0, 1, 1], links):
        assert measured is not None and pinned == used == links
    for measured, *_ in ranks.run(3, links_of_later_groups, [0, 0, 0], links):
        assert measured is None


@pytest.mark.parametrize("rate", [5e5, 1.25e6, 1.25e8])
@pytest.mark.parametrize("burst", [0, 36_000])
def test_bytes_that_pass_at_once_do_not_count(monkeypatch, rate, burst):
    def round_trip(group, device, other, num_bytes):
        return 2 * (1e-4 + max(num_bytes - burst, 0) / rate)

    nothing = SimpleNamespace(get_rank=lambda group: 0, send=lambda *each, **options: None)
    monkeypatch.setattr(connections, "dist", nothing)
    monkeypatch.setattr(connections, "_round_trip", round_trip)
    links = connections._measure(None, torch.device("cpu"), 1, 1)
    assert links.bandwidth == pytest.approx(rate, rel=1e-3)
    assert links.latency == pytest.approx(1e-4, rel=0.03)
    shared = connections._measure(None, torch.device("cpu"), 1, 2)
    assert shared.bandwidth == pytest.approx(rate / 2, rel=1e-3)
