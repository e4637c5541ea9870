"""Attention over shards is that over the whole, whoever holds what."""

import random

import numpy as np
import pytest
import torch
from programs import (
    attend_with_shared_keys,
    bits,
    check_local,
    check_tracks_exact,
    complaint,
    complaint_of_one,
    dropped,
    error_after_failure,
    error_beside_messages,
    gradients_after_writing,
    largest_error,
    logged_by,
    seen_of_hosts,
    swap_with_unequal_groups,
)
from sparse_cases import NAMES, with_pattern

import cqs.distributed
from benchmarks.cases import Case
from cqs.patterns import block_sparse, documents, from_mask, sliding_window
from cqs.scheduler import Grid2D, Quorums
from cqs.scheduler.head_groups import possible_head_parallel

pytestmark = pytest.mark.slow

WORLDS = range(1, 9)
SHAPES = (
    Case("square", 67, 67, num_heads=4, num_kv_heads=4, batch=2),
    Case("gqa", 67, 67, num_heads=8, num_kv_heads=2),
    Case("few-queries", 40, 90, num_heads=4, num_kv_heads=2),
    Case("many-queries", 90, 40, num_heads=4, num_kv_heads=1),
    Case("tiny", 3, 3, num_heads=2, num_kv_heads=2),
    Case("no-keys", 5, 0, num_heads=2, num_kv_heads=2),
)


def cut(case, num_ranks, seed):
    """Cut both sides at random: some shards are empty."""
    generator = random.Random(seed)

    def marks(length):
        return [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]

    return marks(case.seqlen_q), marks(case.seqlen_kv)


def degrees(case, num_ranks):
    """The head-parallel degrees of a case."""
    return ["auto", *possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_world_is_exact(ranks, num_ranks, case, is_causal):
    case = Case(**{**vars(case), "is_causal": is_causal})
    for seed, head_parallel in enumerate(degrees(case, num_ranks)):
        options = {"head_parallel": head_parallel, "num_chunks": 1 + seed % 4}
        errors = ranks.run(num_ranks, largest_error, case, cut(case, num_ranks, seed), options)
        assert max(errors) < 1e-10


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_patterns_are_exact(ranks, number):
    for num_ranks in (2 + number % 3, 5 + number % 4):
        case = with_pattern(SHAPES[(number + num_ranks) % 4], NAMES[number])
        options = {"num_chunks": 1 + num_ranks % 4}
        errors = ranks.run(num_ranks, largest_error, case, cut(case, num_ranks, number), options)
        assert max(errors) < 1e-10


def test_heads_may_have_patterns_of_their_own(ranks):
    layouts = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    case = Case("heads", 67, 67, 4, 2, batch=2, pattern=block_sparse(layouts, 16))
    assert max(ranks.run(3, largest_error, case, cut(case, 3, 0), {})) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_ranks", [3, 8])
def test_every_dtype_tracks_exact(ranks, num_ranks, dtype):
    for case in (
        Case("causal", 130, 130, 8, 2, 32, is_causal=True),
        Case("documents", 130, 130, 8, 8, 32, pattern=documents([0, 31, 90, 130])),
    ):
        for head_parallel in ("auto", 1):
            options = {"head_parallel": head_parallel, "num_chunks": 2}
            cuts = cut(case, num_ranks, 1)
            ranks.run(num_ranks, check_tracks_exact, case, dtype, cuts, options)


def test_every_run_is_bitwise_identical(ranks):
    case = Case("bits", 130, 130, 4, 2, is_causal=True)
    runs = [ranks.run(7, bits, case, cut(case, 7, 2), {}) for _ in range(3)]
    for other in runs[1:]:
        for ours, theirs in zip(runs[0], other, strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("program", [error_beside_messages, error_after_failure])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_else_a_group_does_is_no_matter(ranks, program, num_ranks, is_causal):
    case = Case("square", 64, 64, 4, 4, head_dim=8, is_causal=is_causal)
    options = {"head_parallel": 1, "num_chunks": 4}
    assert max(ranks.run(num_ranks, program, case, cut(case, num_ranks, 0), options)) < 1e-10


def test_keys_may_be_written_to_before_the_backward_pass(ranks):
    """Though one of three ranks sends and receives no rows of theirs."""
    case = Case("square", 60, 60, 4, 4, is_causal=True)
    cuts = 2 * ([0, 20, 40, 60],)
    gradients, others = (
        ranks.run(3, gradients_after_writing, case, cuts, is_written)
        for is_written in (False, True)
    )
    assert all(map(torch.equal, gradients, others))


def test_ranks_may_know_other_numbers_of_groups(ranks):
    assert ranks.run(3, swap_with_unequal_groups) == 3 * [[0, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("head_parallel", [1, 2, 4])
def test_dropout_is_that_of_one_process(ranks, head_parallel):
    case = Case("dropout", 67, 67, 4, 2, batch=2)
    problem = case.make()
    options = {"is_causal": True, "dropout_p": 0.3, "seed": 5, "backend": "reference"}
    whole = cqs.attention(problem.query, problem.key, problem.value, **options)
    options |= {"head_parallel": head_parallel, "num_chunks": 2}
    found = ranks.run(4, dropped, case, cut(case, 4, 3), options)
    torch.testing.assert_close(torch.cat(found, dim=2), whole)


@pytest.mark.parametrize("head_parallel", [1, 2])
def test_without_a_seed_all_ranks_drop_what_the_first_draws(ranks, head_parallel):
    case = Case("dropout", 64, 64, 4, 4)
    problem = case.make()
    torch.manual_seed(0)
    options = {"dropout_p": 0.5, "backend": "reference"}
    whole = cqs.attention(problem.query, problem.key, problem.value, **options)
    options["head_parallel"] = head_parallel
    found = ranks.run(2, dropped, case, ([0, 32, 64], [0, 32, 64]), options)
    torch.testing.assert_close(torch.cat(found, dim=2), whole)


def test_a_batch_of_one_is_that_of_the_others(ranks):
    shards, outputs, gradients = zip(*ranks.run(3, attend_with_shared_keys), strict=True)
    query, key, value = (torch.cat(parts, dim=2) for parts in zip(*shards, strict=True))
    output = cqs.attention(query, key.requires_grad_(), value)
    torch.testing.assert_close(torch.cat(outputs, dim=2), output.detach())
    expected = torch.autograd.grad(output.sum(), key)
    torch.testing.assert_close((torch.cat(gradients, dim=2),), expected)


def test_one_rank_is_one_process(ranks):
    ranks.run(1, check_local, Case("alone", 50, 50), {"is_causal": True})


TENSORS = {
    "heads": [torch.zeros(1, 2, 8, 16) for _ in range(3)],
    "kv_heads": [torch.zeros(1, 4, 8, 16), *(torch.zeros(1, 2, 8, 16) for _ in range(2))],
    "head_dim": [*(torch.zeros(1, 4, 8, 8) for _ in range(2)), torch.zeros(1, 4, 8, 16)],
    "value_dim": [*(torch.zeros(1, 4, 8, 16) for _ in range(2)), torch.zeros(1, 4, 8, 8)],
    "batch": [torch.zeros(2, 4, 8, 16) for _ in range(3)],
    "dtype": [torch.zeros(1, 4, 8, 16, dtype=torch.float64) for _ in range(3)],
    "shape": [torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 9, 16)],
    "gradient": [torch.zeros(1, 4, 8, 16).requires_grad_() for _ in range(3)],
    "none": [None, None, None],
    "no_head_dim": [*(torch.zeros(1, 4, 8, 0) for _ in range(2)), torch.zeros(1, 4, 8, 16)],
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_causal": True}, "rank 2 of the group has is_causal True, rank 0 has False"),
        ({"pattern": sliding_window(3, 3)}, "rank 2 of the group has pattern sliding_window"),
        ({"scale": 2.0}, "rank 2 of the group has scale 2.0"),
        ({"dropout_p": 0.1}, "rank 2 of the group has dropout_p 0.1"),
        ({"head_parallel": 1}, "rank 2 of the group has head_parallel 1"),
        ({"num_chunks": 2}, "rank 2 of the group has num_chunks 2"),
        ({"num_chunks": 0}, "rank 2 of the group failed: ValueError"),
        ({"backend": "reference"}, "rank 2 of the group has backend"),
        ({"return_lse": True}, "rank 2 of the group has return_lse True"),
        ({"tensors": TENSORS["heads"]}, "rank 2 of the group has num_heads 2"),
        ({"tensors": TENSORS["kv_heads"]}, "rank 2 of the group has num_kv_heads 2"),
        ({"tensors": TENSORS["head_dim"]}, "rank 2 of the group has head_dim 8"),
        ({"tensors": TENSORS["value_dim"]}, "rank 2 of the group has value_dim 8"),
        ({"tensors": TENSORS["batch"]}, "rank 2 of the group has batch 2"),
        ({"tensors": TENSORS["no_head_dim"]}, "rank 2 of the group has head_dim 0"),
        ({"seed": 3}, "rank 2 of the group has seed 3"),
        ({"plan": "ring"}, "rank 2 of the group failed: ValueError"),
        ({"max_bytes": 10**6}, "rank 2 of the group has max_bytes 1000000, rank 0 has None"),
        ({"max_bytes": 0}, "rank 2 of the group failed: ValueError"),
        ({"max_bytes": -5}, "rank 2 of the group failed: ValueError"),
        ({"max_bytes": True}, "rank 2 of the group failed: TypeError"),
        ({"max_bytes": 1e6}, "rank 2 of the group failed: TypeError"),
        ({"links": (1e9, 1e-5)}, "rank 2 of the group has links Links(bandwidth=1000000000.0"),
        ({"links": (1e9,)}, "rank 2 of the group failed: TypeError"),
        ({"links": (0, 1e-5)}, "rank 2 of the group failed: ValueError"),
        ({"plan": (0, 1, 2)}, "rank 2 of the group failed: TypeError"),
        (
            {"plan": Quorums([0, 1, 2])},
            "rank 2 of the group has plan Quorums(interest_set=(0, 1, 2))",
        ),
        ({"tensors": TENSORS["dtype"]}, "rank 2 of the group has dtype torch.float64"),
        ({"tensors": TENSORS["gradient"]}, "rank 2 of the group has requires_grad True"),
        ({"tensors": TENSORS["shape"]}, "rank 2 of the group failed: ValueError"),
        ({"tensors": TENSORS["none"]}, "rank 2 of the group failed: TypeError"),
        ({"head_parallel": 3}, "rank 2 of the group failed: ValueError"),
        ({"backend": "fastest"}, "rank 2 of the group failed: ValueError"),
        ({"pattern": "causal"}, "rank 2 of the group failed: TypeError"),
        ({"return_lse": 1}, "rank 2 of the group failed: TypeError"),
    ],
    ids=lambda each: each if isinstance(each, str) else "".join(each),
)
def test_ranks_that_disagree_find_out(ranks, changed, message):
    found = ranks.run(4, complaint, 2, changed, {})
    own = found.pop(2)
    assert all(error is ValueError and text.startswith(message) for error, text in found)
    if "failed" in message:
        assert own[0].__name__ in message
    else:
        assert own == found[0]
    assert ranks.run(4, complaint, 2, {}, {}) == [None] * 4  # and the group still works


def test_what_differs_is_shown_in_part(ranks):
    changed = {"pattern": documents(range(10_000))}
    for _, text in ranks.run(2, complaint, 1, changed, {}, rows=5000):
        assert text.startswith("rank 1 of the group has pattern documents") and len(text) < 500


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


@pytest.mark.parametrize(
    ("hosts", "number"),
    [([7, 7, 7, 7], 4), ([7, 7, 9, 9], 2), ([7, 7, 7, 9], 1), ([7, 9, 7, 9], 1), ([7], 1)],
    ids=str,
)
def test_auto_degrees_depend_on_hosts(ranks, hosts, number):
    found = ranks.run(len(hosts), seen_of_hosts, hosts)
    assert found == [(number, number)] * len(hosts)


def test_ranks_of_which_one_captures_a_graph_find_out(ranks):
    found = ranks.run(2, complaint_of_one, 1, "is_captured", True)
    assert found == [(ValueError, "rank 1 of the group has is_captured True, rank 0 has False")] * 2


def test_ranks_that_have_sent_less_often_find_out(ranks):
    """As after a call that failed on some ranks alone."""
    found = ranks.run(3, complaint_of_one, 1, "count_sends", 7)
    message = "rank 1 of the group has exchanges since the group was made 7, rank 0 has 0"
    assert found == [(ValueError, message)] * 3


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
    tensors = [torch.zeros(1, 4, 1, 16) for _ in range(3)]
    options = {"backend": "cudnn", "is_causal": True, "head_parallel": 1}
    found = ranks.run(8, complaint, 0, {"tensors": tensors}, options, 0)
    assert {error for error, _ in found} == {NotImplementedError}


def test_without_a_group_there_is_an_error():
    tensors = (torch.zeros(1, 1, 2, 4) for _ in range(3))
    with pytest.raises(RuntimeError, match="not initialized"):
        cqs.distributed.attention(*tensors)


def test_every_rank_logs_its_passes(ranks):
    for messages in ranks.run(3, logged_by, 20):
        forward, backward = messages
        assert forward.startswith("forward: 3 tasks") and backward.startswith("backward: 3 tasks")
        assert "backend cpu" in forward and f"{3 * 2 * 20 * 16 * 4} bytes" in forward
