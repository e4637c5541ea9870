"""Attention over shards is that over the whole, whoever holds what."""

import logging
import re
from dataclasses import replace
from unittest import TestCase

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import (
    ShardedProblem,
    complaint,
    cuts_of,
    deviating_calls,
    even_cuts,
    fail_in_computation,
    largest_error,
    largest_errors,
)

import cqs.distributed
from benchmarks.cases import Case
from cqs.executors.distributed import attention
from cqs.executors.distributed.agreement import calls_on, make_control_group, swap
from cqs.patterns import from_mask
from cqs.scheduler import Grid2D, Quorums
from cqs.scheduler.head_groups import possible_head_parallel

pytestmark = pytest.mark.slow

SHAPES = (
    Case("square", 67, 67, num_heads=4, num_kv_heads=4, batch=2),
    Case("gqa", 67, 67, num_heads=8, num_kv_heads=2),
    Case("few-queries", 40, 90, num_heads=4, num_kv_heads=2),
    Case("many-queries", 90, 40, num_heads=4, num_kv_heads=1),
    Case("tiny", 3, 3, num_heads=2, num_kv_heads=2),
    Case("no-keys", 5, 0, num_heads=2, num_kv_heads=2),
)


@pytest.mark.parametrize(
    "num_ranks", [2, 3, 8, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4, 5, 6, 7))]
)
def test_every_world_is_exact(ranks, num_ranks):
    """With every head-parallel degree."""
    problems = []
    for number, case in enumerate(SHAPES):
        case = replace(case, is_causal=(number + num_ranks) % 2 > 0)
        degrees = possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)
        for seed, head_parallel in enumerate(["auto", *degrees]):
            options = {"head_parallel": head_parallel, "num_chunks": 1 + seed % 4}
            problems.append((case, cuts_of(case, num_ranks, seed), options))
    for errors in ranks.run(num_ranks, largest_errors, problems):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("options", [{}, {"max_bytes": 40_000}], ids=["", "max_bytes"])
def test_every_run_is_bitwise_identical(ranks, options):
    case = Case("bits", 130, 130, 4, 2, is_causal=True)
    assert ranks.run(7, deviating_calls, 3, case, cuts_of(case, 7, 2), options) == [[]] * 7


def error_beside_messages(group, *problem):
    """Return the error while a message of the caller, as long as one of ours, is being sent."""
    rank, own = dist.get_rank(group), torch.full((512,), 7.0, dtype=torch.float64)
    sent = dist.isend(own, group=group, group_dst=0) if rank == 1 else None
    error = largest_error(group, *problem)
    if sent is not None:
        sent.wait()
    if rank == 0:
        received = torch.zeros_like(own)
        dist.recv(received, group=group, group_src=1)
        assert torch.equal(received, own)
    return error


def error_after_failure(group, *problem):
    """Return the error after a call that failed on all ranks with messages in flight."""
    with pytest.MonkeyPatch.context() as patch:
        fail_in_computation(patch)
        with pytest.raises(torch.OutOfMemoryError):
            largest_error(group, *problem)
    return largest_error(group, *problem)


@pytest.mark.parametrize("program", [error_beside_messages, error_after_failure])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_else_a_group_does_is_no_matter(ranks, program, num_ranks):
    case = Case("square", 64, 64, 4, 4, head_dim=8, is_causal=num_ranks == 3)
    options = {"head_parallel": 1, "num_chunks": 4}
    assert max(ranks.run(num_ranks, program, case, cuts_of(case, num_ranks, 0), options)) < 1e-10


def gradient_of_query(group, case, is_written):
    """Return a gradient, whether keys and values are written to after the call or not."""
    problem = ShardedProblem(group, case, even_cuts(60, 3))
    query, *others = problem.tensors
    key, value = (tensor.detach() for tensor in others)
    output = cqs.distributed.attention(query, key, value, group=group, is_causal=True)
    if is_written:
        key.zero_(), value.zero_()
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    return gradient


def test_keys_may_be_written_to_before_the_backward_pass(ranks):
    """Though one of three ranks sends and receives no rows of theirs."""
    case = Case("square", 60, 60, 4, 4)
    gradients, others = (ranks.run(3, gradient_of_query, case, each) for each in (False, True))
    assert all(map(torch.equal, gradients, others))


def swap_with_unequal_groups(group):
    """Exchange numbers by a control group, made where ranks know other numbers of groups."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    alone = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    control = make_control_group(group)
    for each in alone:
        dist.destroy_process_group(each)
    return swap(control, [rank] * (rank + 1), range(1, num_ranks + 1))


def test_ranks_may_know_other_numbers_of_groups(ranks):
    assert ranks.run(3, swap_with_unequal_groups) == 3 * [[0, 1, 1, 2, 2, 2]]


def dropped(group, case, cuts, options):
    """Return the output with dropout; every rank would draw another seed."""
    torch.manual_seed(dist.get_rank(group))
    return ShardedProblem(group, case, cuts, torch.float32).attend(**options).detach()


@pytest.mark.parametrize(
    ("num_ranks", "head_parallel", "seed"),
    [(4, 1, 5), (4, 2, 5), (4, 4, 5), (2, 1, None), (2, 2, None)],
)
def test_dropout_is_that_of_one_process(ranks, num_ranks, head_parallel, seed):
    """Without a seed all ranks drop what the first one draws."""
    case = Case("dropout", 67, 67, 4, 4, batch=2, is_causal=True)
    problem, options = case.make(), {"dropout_p": 0.3, "seed": seed, "backend": "reference"}
    torch.manual_seed(0)
    tensors = problem.query, problem.key, problem.value
    whole = cqs.attention(*tensors, is_causal=True, **options)
    options |= {"head_parallel": head_parallel, "num_chunks": 2}
    shards = ranks.run(num_ranks, dropped, case, cuts_of(case, num_ranks, 3), options)
    torch.testing.assert_close(torch.cat(shards, dim=2), whole)


def tensors_of(*shapes, **options):
    return {"tensors": [torch.zeros(1, *shape, **options) for shape in shapes]}


USUAL = (4, 8, 16)
DISAGREEMENTS = {
    "has scale 2.0": {"scale": 2.0},
    "has max_bytes 1000000, rank 0 has None": {"max_bytes": 10**6},
    "has links Links.bandwidth=1000000000.0": {"links": (1e9, 1e-5)},
    "has plan Quorums.interest_set=.0, 1, 2..": {"plan": Quorums([0, 1, 2])},
    "has head_dim 0": tensors_of((4, 8, 0), (4, 8, 0), USUAL),
    "has value_dim 8": tensors_of(USUAL, USUAL, (4, 8, 8)),
    "has dtype torch.float64": tensors_of(USUAL, USUAL, USUAL, dtype=torch.float64),
    "failed: ValueError.*key": tensors_of(USUAL, USUAL, (4, 9, 16)),
    "failed: TypeError.*query": {"tensors": [None] * 3},
    "failed: ValueError.*max_bytes": {"max_bytes": -5},
    "failed: TypeError.*max_bytes": {"max_bytes": 1e6},
}
"""What rank 2 changes, by what all other ranks say of it; random programs have other arguments."""


@pytest.mark.parametrize(("message", "changed"), DISAGREEMENTS.items(), ids=DISAGREEMENTS)
def test_ranks_that_disagree_find_out(ranks, message, changed):
    found = ranks.run(4, complaint, 2, changed, {})
    own = found.pop(2)
    for error, text in found:
        assert error is ValueError and re.match(f"rank 2 of the group {message}", text)
    assert own == found[0] or message.startswith(f"failed: {own[0].__name__}")
    assert ranks.run(4, complaint, 2, {}, {}) == [None] * 4  # and the group still works


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {"dropout_p": 0}),
        ({"dropout_p": 0.5, "seed": 3}, {"seed": np.int64(3)}),
        ({"plan": Quorums([0, 1])}, {"plan": Quorums(np.array([0, 1]))}),
    ],
    ids=["dropout_p", "seed", "plan"],
)
def test_equal_numbers_of_other_types_are_no_difference(ranks, options, changed):
    assert ranks.run(2, complaint, 1, changed, options) == [None] * 2


def complaint_of_state(group, is_captured, num_sends):
    """Return what is raised where rank 1 captures a graph, or has sent so often."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(attention, "is_captured", lambda _: is_captured)
            patch.setattr(calls_on(group), "num_sends", num_sends)
        return complaint(group, None, {}, {})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((True, 0), "is_captured True, rank 0 has False"),
        ((False, 7), "exchanges since the group was made 7, rank 0 has 0"),
    ],
)
def test_ranks_in_another_state_find_out(ranks, state, message):
    """One captures a graph, or has sent less often, as after a call that failed on it alone."""
    found = ranks.run(3, complaint_of_state, *state)
    assert found == [(ValueError, f"rank 1 of the group has {message}")] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_parallel": 3}, "it must divide the number of ranks, 4"),
        ({"head_parallel": "all"}, "an integer or 'auto'"),
        ({"plan": Quorums([0, 1])}, "no difference cover modulo"),
        ({"plan": Grid2D(2, 3)}, "the number of tasks, 4"),
        ({"max_bytes": 7}, "max_bytes must be at least "),
        ({"pattern": from_mask(torch.ones(5, 5, dtype=torch.bool))}, "requires lengths"),
    ],
)
def test_wrong_options_are_refused_on_every_rank(ranks, options, message):
    found = ranks.run(4, complaint, 0, {}, {"head_parallel": 1, **options})
    assert all(error is ValueError and message in text for error, text in found)


def test_a_backend_that_declines_does_so_on_every_rank(ranks):
    """Also on ranks that have nothing to compute."""
    tensors = {"tensors": [torch.zeros(1, 4, 1, 16) for _ in range(3)]}
    options = {"backend": "cudnn", "is_causal": True, "head_parallel": 1}
    found = ranks.run(8, complaint, 0, tensors, options, 0)
    assert {error for error, _ in found} == {NotImplementedError}


def test_without_a_group_there_is_an_error():
    tensors = (torch.zeros(1, 1, 2, 4) for _ in range(3))
    with pytest.raises(RuntimeError, match="not initialized"):
        cqs.distributed.attention(*tensors)


def logged_by(group, length):
    """Return what this rank logs in a forward and a backward pass."""
    tensors = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    with TestCase().assertLogs("cqs", logging.DEBUG) as logged:
        cqs.distributed.attention(*tensors, group=group).sum().backward()
    return [record.getMessage() for record in logged.records]


def test_every_rank_logs_its_passes(ranks):
    for forward, backward in ranks.run(3, logged_by, 20):
        assert forward.startswith("forward: 3 tasks") and backward.startswith("backward: 3 tasks")
        assert "backend cpu" in forward and f"{3 * 2 * 20 * 16 * 4} bytes" in forward
