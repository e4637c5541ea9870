"""Every pair is met once, in whatever order and pieces; what is held fits the budget."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from cqs.executors.streaming.plan import START, Position
from cqs.patterns import causal, global_tokens, sliding_window
from cqs.scheduler import AttentionShape
from cqs.scheduler.machines import MACHINES
from cqs.streaming import Pass, StreamPlan, make_stream_plan

SHAPE, CPU = AttentionShape(4, 16, batch=2, num_kv_heads=2), MACHINES["CPU"]
LENGTHS = [(1, 1), (700, 700), (300, 1000), (1000, 300), (0, 5), (5, 0)]
PATTERN = sliding_window(40, 3) | global_tokens(2)


def make(lengths, which, is_causal, pattern, tiles=(1, 1)):
    bound = None if pattern is None else pattern.bind(*lengths)
    rows, chunk = (128 * number for number in tiles)
    plan = StreamPlan(*lengths, SHAPE, 10**9, is_causal, bound, CPU, which)
    return replace(plan, rows=rows, chunk=chunk)


@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("is_causal", "pattern"), [(False, None), (True, None), (False, PATTERN)])
@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (9, 1)])
def test_every_live_pair_is_met_once(which, lengths, is_causal, pattern, tiles):
    plan = make(lengths, which, is_causal, pattern, tiles)
    seen = causal() if is_causal else pattern or sliding_window(None, None)
    live = seen.to_mask(*lengths)
    counts = np.zeros((plan.num_groups, *lengths), int)
    blocks = list(plan.blocks())
    ends = [START, *(block.end for block in blocks)]
    for block, tokens in ((each, tokens) for each in blocks for tokens in each.chunks):
        group = block.batch * SHAPE.kv_heads + block.kv_heads.start
        assert list(block.heads) == [2 * block.kv_heads.start, 2 * block.kv_heads.start + 1]
        queries, keys = plan.sides(block.tokens, tokens)
        found = np.zeros(lengths, int)
        for step in plan.steps(queries, keys):
            for part in step.blocks():
                rows, columns = (slice(r.start, r.stop) for r in (part.queries, part.keys))
                size = len(part.queries), len(part.keys)
                found[rows, columns] += np.tri(*size, dtype=int) if part.is_causal else 1
        if plan.pattern is not None:
            found = found * live
        assert found.sum() == plan.count(block.tokens, tokens) > 0, "an empty chunk"
        counts[group] += found
    assert (counts == live).all()
    assert plan.live_pairs == live.sum()
    assert ends == sorted(set(ends)), "results become final in order"
    if blocks:
        assert ends[-1] == Position(plan.num_groups, 0)
        assert list(plan.blocks(ends[-1])) == []
        for number in (1, len(ends) // 2):
            assert list(plan.blocks(ends[number])) == blocks[number:]


@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("machine", [CPU, MACHINES["H200"]], ids=["CPU", "GPU"])
def test_plans_fit_and_the_larger_the_budget_the_less_is_moved(which, machine):
    shape = AttentionShape(8, 128, num_kv_heads=4)
    moved = []
    for budget in (2**28, 2**30, 2**32):
        for is_causal, length in itertools.product((False, True), (2**14, 2**20, 2**22)):
            options = {"is_causal": is_causal, "machine": machine, "which": which}
            plan = make_stream_plan(length, length, shape, budget=budget, **options)
            assert plan.peak_bytes <= budget
            assert plan.seconds >= plan.flops / max(machine.rate, machine.backward_rate)
        moved.append(plan.bytes_uploaded)
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[-1]


def test_a_billion_tokens_are_planned_without_delay():
    shape = AttentionShape(8, 128)
    start = time.process_time()
    for which in Pass:
        plan = make_stream_plan(10**9, 10**9, shape, budget=2**31, is_causal=True, which=which)
        next(plan.blocks())
    plan = make_stream_plan(2**22, 2**22, shape, budget=2**26)
    chunks = (tokens for block in plan.blocks() for tokens in block.chunks)
    assert len(list(itertools.islice(chunks, 10**4))) == 10**4
    assert time.process_time() - start < 4
