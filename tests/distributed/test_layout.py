"""Routes: every token that a rank needs comes once, from whom it belongs to."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from layouts import lay_out_all
from programs import random_cuts

from cqs.executors.distributed.route import cut_shards
from cqs.patterns import sliding_window
from cqs.scheduler import AttentionShape, Grid2D, Hosts, Quorums
from cqs.scheduler.cost_model import predict, predict_plan
from cqs.scheduler.head_groups import possible_head_parallel
from cqs.scheduler.machines import MACHINES
from cqs.scheduler.workload import Workload


def choose_plan(case, num_ranks, with_gradients, machine=MACHINES["H200"], **options):
    """Return the kind of plan and the degree that a layout chooses."""
    passes = "both" if with_gradients else "forward"
    found = predict("cqs", case, num_ranks, machine, passes, slack=0.02, **options)
    return found.kind, found.head_parallel


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", range(1, 14))
def test_every_token_needed_comes_once_from_its_shard(num_ranks):
    generator = random.Random(num_ranks)
    for _ in range(10):
        totals = [generator.randint(0, 90) for _ in range(2)]
        cuts = random_cuts(generator, totals, num_ranks)
        lengths = [tuple(np.diff(each).tolist()) for each in cuts]
        options = {
            "head_parallel": generator.choice([h for h in (1, 2, 3, 4) if num_ranks % h == 0]),
            "pattern": generator.choice([None, sliding_window(9, 4)]),
        }
        options["is_causal"] = options["pattern"] is None and generator.random() < 0.5
        layouts = lay_out_all(AttentionShape(12, 16, num_kv_heads=2), *lengths, **options)
        for side, seqlens in zip(("query_route", "key_route"), lengths, strict=True):
            shards = cut_shards(seqlens)
            routes = [getattr(layout, side) for layout in layouts]
            for receiver, route in enumerate(routes):
                sent = [
                    shards[sender].start + row
                    for sender, each in enumerate(routes)
                    for rows in each.sends[receiver]
                    for row in rows
                ]
                assert sent == [token for tokens in route.held for token in tokens]
                assert list(route.receives) == [each.lengths[receiver] for each in routes]
            check_places(routes)


def check_places(routes):
    """Every rank knows where the others have packed what is for it, one after another."""
    for rank, route in enumerate(routes):
        sent = [0 if other == rank else number for other, number in enumerate(route.lengths)]
        back = [0 if other == rank else number for other, number in enumerate(route.receives)]
        assert route.stays == (not any(sent) and not any(back))
        for other, receiver in enumerate(routes):
            for is_home, numbers in enumerate((sent, back)):
                firsts, most = receiver.find_offsets(is_home=bool(is_home))
                assert firsts[rank] == sum(numbers[:other]) and most >= sum(numbers)


@pytest.mark.parametrize("num_chunks", [3, 4])
@pytest.mark.parametrize(("num_ranks", "head_parallel"), [(1, 1), (6, 1), (6, 2), (6, 6), (8, 4)])
def test_stages_have_every_head_once(num_ranks, head_parallel, num_chunks):
    """As many as divide the KV heads of a rank."""
    shape = AttentionShape(24, 16, num_kv_heads=12)
    options = {"head_parallel": head_parallel, "num_chunks": num_chunks}
    layout = lay_out_all(shape, (4,) * num_ranks, **options)[0]
    for side, number in (("query_heads", 24), ("kv_heads", 12)):
        found = [
            head
            for rank in range(head_parallel)
            for chunk in layout.chunks
            for head in getattr(chunk, side)[rank]
        ]
        assert sorted(found) == list(range(number))
    dividing = [n for n in range(1, num_chunks + 1) if 12 // head_parallel % n == 0]
    assert len(layout.chunks) == max(dividing)


ONE_BY_ONE = replace(MACHINES["CPU"], devices_per_node=1, between=5e6)


def test_between_hosts_the_kind_with_the_least_traffic_is_chosen():
    """With links of 40 Mbit/s: rows for few KV heads and ranks."""

    def kind(num_ranks, num_kv_heads, machine=ONE_BY_ONE, **options):
        case = Workload(2**15, AttentionShape(17, 128, num_kv_heads=num_kv_heads))
        return choose_plan(case, num_ranks, False, machine, **options)[0]

    assert [kind(num_ranks, 1) for num_ranks in (4, 7, 13)] == [Grid2D(1, n) for n in (4, 7, 13)]
    assert [len(kind(num_ranks, 17).interest_set) for num_ranks in (7, 13, 31)] == [3, 4, 6]
    assert [kind(num_ranks, 17) for num_ranks in (4, 12, 16)] == [
        Grid2D(2, 2), Grid2D(3, 4), Grid2D(4, 4)
    ]  # fmt: skip
    assert kind(7, 1, plan="quorums") == kind(7, 1, MACHINES["CPU"]) == Quorums((0, 1, 3))
    assert kind(16, 17, plan="grid") == Grid2D(4, 4)
    two_hosts = replace(ONE_BY_ONE, devices_per_node=4)
    assert isinstance(kind(28, 2, two_hosts), Hosts | Grid2D)


def test_a_kind_chooses_the_degree_that_it_fits():
    case = Workload(2**15, AttentionShape(16, 128))
    for plan, degree in ((Quorums((0, 1, 3)), 2), (Grid2D(2, 7), 1)):
        assert choose_plan(case, 14, with_gradients=True, plan=plan) == (plan, degree)
        layouts = lay_out_all(case.shape, (2,) * 14, plan=plan, with_gradients=True)
        assert layouts[0].plan.kind == plan
    with pytest.raises(ValueError, match="number of tasks, 14, got a grid of 1"):
        lay_out_all(case.shape, (2,) * 14, plan=Grid2D(1, 1))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 16), (32, 8), (40, 8), (8, 1)])
def test_heads_are_cut_so_that_no_split_is_much_faster(
    num_heads, num_kv_heads, with_gradients, is_causal
):
    """Without gradients, of up to 2^19 keys, as little as that allows."""
    shape, passes = AttentionShape(num_heads, 128, num_kv_heads=num_kv_heads), [False, True]
    for num_ranks, tokens in product((2, 6, 8, 16, 24, 64), (2**14, 2**17, 2**20)):
        case, machine = Workload(tokens, shape, is_causal), MACHINES["H200"]
        seconds = {
            n: sum(
                predict_plan(case, num_ranks, machine, n, is_backward=is_backward).seconds
                for is_backward in passes[: 1 + with_gradients]
            )
            for n in possible_head_parallel(num_ranks, num_heads, num_kv_heads)
        }
        nearly = [n for n in seconds if seconds[n] <= 1.02 * min(seconds.values())]
        _, chosen = choose_plan(case, num_ranks, with_gradients, plan="quorums")
        if with_gradients or tokens > 2**19:
            assert chosen in nearly
        else:
            assert chosen == min(nearly)
