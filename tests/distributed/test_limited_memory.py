"""With ``max_bytes`` ranks hold at most as much, and results are exact."""

import gc
import random
import re
import weakref
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from programs import (
    ShardedProblem,
    check_tracks_exact,
    even_cuts,
    largest_error,
    raised,
    smallest_limit,
)
from random_problems import random_problems

from benchmarks.cases import Case
from cqs.executors.distributed import bounded, prepared
from cqs.executors.distributed.backward_pass import BackwardPass
from cqs.executors.distributed.chunk_pass import ForwardPass
from cqs.executors.distributed.layout import ShardedWork
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.distributed.token_order import predict_orders
from cqs.partial import RunningMerge
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import predict
from cqs.scheduler.held_bytes import most_bytes
from cqs.scheduler.machines import SENT, Machine
from cqs.scheduler.workload import Workload
from cqs.worker import Worker
from cqs.worker.memory import record_cpu_memory

pytestmark = pytest.mark.slow

NUM_PROBLEMS, BATCH = 500, 10
SCRATCH = [
    (Worker, "run_together"),
    (Worker, "run_steps"),
    (Worker, "run_backward"),
    (RunningMerge, "add_own"),
    (RunningMerge, "finish"),
    (ForwardPass, "add"),
    (BackwardPass, "add"),
    (RankTask, "new_gradients"),
]
"""Functions of whose memory only the tensors count that they return. PyTorch converts a half
precision tensor on the CPU before it adds it to a float32 sum."""
BEGIN, END = 1_000_003, 1_000_033
"""Bytes of tensors that mark the beginning and the end of such a function among allocations."""


class Measured(NamedTuple):
    """What a function returns, and the memory of the passes in it."""

    result: Any
    held: int
    """Most bytes that a pass of a task held on this rank."""
    predicted: int | None
    """Most bytes that any rank holds by prediction, if there is a limit."""
    is_bounded: bool
    """Whether an order of tokens was chosen."""


def measure(compute):
    """Run a function with passes of a task.

    Outputs, LSEs and gradients of the shard are not counted, nor is the memory of
    the functions in ``SCRATCH``, except the tensors that a worker returns.
    """
    passes, returned, predicted, are_bounded = [], [], [None], [False]

    def marked(owner, function, *arguments, **options):
        torch.empty(BEGIN, dtype=torch.uint8)
        found = function(owner, *arguments, **options)
        is_new = function.__name__[4:] in ("together", "backward") and not options.get("into")
        if is_new:  # without the rows to which a kernel of the CPU pads few queries
            found = type(found)(*(each.clone() if is_part(each) else each for each in found))
        returned.append(sum(tensor.nbytes for tensor in found) if is_new else 0)
        torch.empty(END, dtype=torch.uint8)
        return found

    def measured(task, function, is_forward, *arguments, **options):
        found, samples = record_cpu_memory(partial(function, task, *arguments, **options))
        of_shard = sum(tensor.nbytes for tensor in found[0]) if is_forward else 0
        are_bounded.append(task.layout.is_bounded)
        held, peak, depth, of_functions = 0, 0, 0, iter(returned)
        if not (is_forward or task.layout.is_bounded):
            kept = arguments[1] if task.layout.is_final else arguments[1][:-2]
            held = sum(tensor.nbytes for tensor in kept)
        for (_, before), (_, after) in pairwise(samples):
            change = after - before
            depth += (change == BEGIN) - (change == END)
            if change == END:
                held += next(of_functions)
            elif abs(change) not in (BEGIN, END) and not depth:
                held += change
            peak = max(peak, held)
        returned.clear()
        passes.append(peak - of_shard)
        return found

    def noted(*arguments, **options):
        predicted.append(most_bytes(*arguments, **options))
        return predicted[-1]

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SCRATCH:
            patch.setattr(owner, name, partialmethod(marked, getattr(owner, name)))
        for name, is_forward in (("attend", True), ("differentiate", False)):
            method = partialmethod(measured, getattr(RankTask, name), is_forward)
            patch.setattr(RankTask, name, method)
        patch.setattr(bounded, "most_bytes", noted)
        bounded._choose_order.cache_clear()
        gc.disable()  # it would free tensors of earlier calls during a pass
        result = compute()
        gc.enable()
        return Measured(result, max(passes), predicted[-1], are_bounded[-1])


def is_part(tensor):
    """Return whether the memory of a tensor is larger than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def errors_and_bytes(group, problems):
    """Return the largest error of every problem, and the bytes that its passes hold."""
    return [measure(partial(largest_error, group, *problem)) for problem in problems]


def smallest_limits(group, problems):
    return [
        smallest_limit(partial(largest_error, group, case, cuts), options)
        for case, cuts, options in problems
    ]


def bytes_within(group, case, cuts, factors, *arguments):
    """Check results against float64, and return limits and the bytes that the passes hold."""

    def compute(options):
        check_tracks_exact(group, case, cuts, options, *arguments)

    least = smallest_limit(compute, {})
    limits = [factor * least for factor in factors]
    return [(limit, measure(partial(compute, {"max_bytes": limit}))) for limit in limits]


def within_free_memory(group, case, cuts, free):
    """Return error and bytes of a call without a limit, if so much memory is free."""
    initialize = prepared._Placement.__init__

    def limited(placement, *arguments):
        initialize(placement, *arguments)
        placement.limit = free

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_placements", weakref.WeakKeyDictionary())
        patch.setattr(prepared._Placement, "__init__", limited)
        return measure(partial(largest_error, group, case, cuts, {}))


@pytest.mark.sample(20)
@pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))
def test_random_problems_hold_what_is_predicted_and_at_most_the_limit(ranks, batch):
    num_ranks, generator = 1 + batch % 8, random.Random(batch)
    problems = random_problems(1000 + batch, BATCH, num_ranks)
    smallest = ranks.run(num_ranks, smallest_limits, problems)
    assert all(each == smallest[0] for each in smallest)
    limits = [int(least * 2 ** generator.choice([0, 0, 0.5, 1, 2, 4])) for least in smallest[0]]
    limited = [
        (case, cuts, options | {"max_bytes": limit})
        for (case, cuts, options), limit in zip(problems, limits, strict=True)
    ]
    found = ranks.run(num_ranks, errors_and_bytes, limited)
    for problem, least, limit, *of_ranks in zip(limited, smallest[0], limits, *found, strict=True):
        errors, held, predicted, _ = zip(*of_ranks, strict=True)
        assert max(errors) < 1e-10 and max(held) <= limit, (problem, errors, held)
        if limit > 1:  # otherwise ranks hold nothing
            assert {*predicted} == {max(held)}, (problem, predicted, held)
        if limit == least > 1:
            assert max(held) == limit, problem


EVEN = even_cuts(112, 7)


def bytes_without_gradients(group, case, options):
    """Return the bytes that a call holds without a backward pass."""
    problem = ShardedProblem(group, case, EVEN)
    with torch.no_grad():
        return measure(partial(problem.attend, **options)).held


def test_one_byte_less_than_a_call_holds_is_not_exceeded(ranks):
    """Without gradients, and with a single head chunk."""
    case = Case("below", 112, 112, 4, 4)
    options = {"plan": "rows", "head_parallel": 1, "num_chunks": 1}
    held = max(ranks.run(7, bytes_without_gradients, case, options))
    options["max_bytes"] = held - 1
    assert max(ranks.run(7, bytes_without_gradients, case, options)) < held


@pytest.mark.parametrize(
    ("dtype", "is_causal"),
    [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)],
    ids=str,
)
def test_every_dtype_tracks_exact_and_holds_what_is_predicted(ranks, dtype, is_causal):
    case = Case("dtypes", 112, 112, 4, 2, 32, is_causal=is_causal)
    for of_ranks in zip(*ranks.run(7, bytes_within, case, EVEN, (1, 2, 4), dtype), strict=True):
        (limit, *_), measured = zip(*of_ranks, strict=True)
        held = max(each.held for each in measured)
        assert all(held == each.predicted <= limit for each in measured)


def test_the_error_gives_the_smallest_limit_on_every_rank(ranks):
    """Also if some ranks have the shards of an earlier call, for which it was another limit."""
    texts = []
    for marks in ([0, 10, 30], [0, 10, 80], [0, 40, 110], [0, 10, 30]):
        case = Case("lengths", marks[-1], marks[-1], 2, 2)
        found = ranks.run(2, raised, largest_error, case, [marks, marks], {"max_bytes": 3})
        assert found[0] == found[1] and found[0][0] is ValueError
        texts.append(found[0][1])
    assert texts[0] == texts[3] and len({*texts}) == 3


@pytest.mark.parametrize("free", [0, 100_000, 10**9])
def test_without_a_limit_the_free_memory_is_one(ranks, free):
    """An order that fits none is the one that holds the fewest bytes."""
    case = Case("free", 112, 112, 4, 2)
    ((least,), *_) = ranks.run(7, smallest_limits, [(case, EVEN, {})])
    for error, held, _, is_bounded in ranks.run(7, within_free_memory, case, EVEN, free):
        assert error < 1e-10 and is_bounded == (free < 10**9)
        assert held <= max(free, least)


def test_the_least_memory_is_two_shards_of_keys_and_less_with_head_chunks(ranks):
    """Forward, float32, with as many groups as ranks: keys streamed past resident queries."""
    case = Case("ring", 112, 112, 4, 4, 32)
    shard = 16 * 4 * 32 * 4
    for num_chunks, keys in ((1, 4 * shard), (4, shard)):
        options = {"num_chunks": num_chunks, "plan": "rows", "head_parallel": 1}
        ((least,), *_) = ranks.run(7, smallest_limits, [(case, EVEN, options)])
        # Two shards of keys and values in float64, beside what a ring holds of its queries.
        assert least <= 2 * (keys + keys) + 12 * 2 * shard / num_chunks


def test_at_a_billion_tokens_memory_is_at_most_that_of_a_ring():
    """On 4,096 devices, with less traffic and in less time; by the cost model."""
    machine = Machine(bandwidth=300e9, between=50e9, devices_per_node=8)
    for num_kv_heads, passes in ((8, "both"), (32, "forward")):
        shape = AttentionShape(32, 128, num_kv_heads=num_kv_heads)
        workload = Workload(10**9, shape)
        ring = predict("ring", workload, 4096, machine, passes)
        fitting = [
            each.prediction
            for each in predict_orders(workload, 4096, machine, passes)
            if each.prediction.peak_bytes <= ring.peak_bytes
        ]
        assert fitting[0].bytes_received < ring.bytes_received / 3
        assert fitting[0].seconds < ring.seconds


def test_many_ranks_take_an_order_that_fits():
    """Of 32 ranks on hosts of 8, not the bytes of every order are counted."""
    shape = AttentionShape(8, 64, num_kv_heads=4)
    options = {"is_causal": True, "plan": "any", "chunk_rule": SENT}
    options |= {"with_gradients": True, "machine": Machine(devices_per_node=8, between=50e9)}

    def lay_out(max_bytes):
        limit = bounded.Limit(max_bytes, True, shape, False, 2, True)
        work = ShardedWork((100,) * 32, (100,) * 32, shape, **options)
        return bounded.lay_out_within(limit, work, 3)

    with pytest.raises(ValueError, match="max_bytes must be at least") as error:
        lay_out(1)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert least < 32 * 100 * 4 * 64 * 2  # half of all keys and values
    layout = lay_out(least)
    assert layout.is_bounded and len(layout.rounds) > 1
    assert {step.queries for each in layout.rounds for step in each.steps} == {
        step.queries for step in layout.steps
    }
