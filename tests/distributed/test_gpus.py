"""Attention over shards on GPUs: as on CPUs, with the rounding of each dtype."""

import pytest
import torch
from limited import check_within
from programs import (
    bits,
    calls_that_deviate,
    capture_something_else,
    check_tracks_exact,
    complaint,
    complaint_in_a_graph,
    deviation_of_graphed_training,
    replays_that_deviate,
)
from test_attention import cut

from benchmarks.cases import Case
from cqs.patterns import documents, longformer, sliding_window

pytestmark = pytest.mark.gpu

CASES = (
    Case("causal", 1030, 1030, 8, 8, 64, is_causal=True),
    Case("gqa", 1030, 1030, 8, 2, 128),
    Case("cross-causal", 515, 1100, 8, 4, 64, batch=2, is_causal=True),
    Case("documents", 1030, 1030, 8, 8, 64, pattern=documents([0, 31, 590, 1030])),
    Case("window", 1024, 1024, 8, 4, 64, pattern=sliding_window(100, 30)),
    Case("longformer", 1030, 1030, 8, 8, 64, pattern=longformer(64, 3)),
)


@pytest.fixture(params=[1, 2, 3, 4, 8])
def num_ranks(request):
    return request.param


@pytest.fixture
def ranks(request, num_ranks):
    """A GPU each if there are enough, else some share one."""
    is_enough = num_ranks <= torch.cuda.device_count()
    return request.getfixturevalue("gpu_ranks" if is_enough else "crowded_ranks")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_dtype_tracks_exact(ranks, num_ranks, case, dtype):
    for seed, head_parallel in enumerate(("auto", 1)):
        for num_chunks in (1, 2, 3):
            options = {"head_parallel": head_parallel, "num_chunks": num_chunks}
            cuts = cut(case, num_ranks, seed + num_chunks)
            ranks.run(num_ranks, check_tracks_exact, case, dtype, cuts, options, "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_limit_of_memory_keeps_results_exact(ranks, num_ranks, case):
    if num_ranks > 1:  # one rank receives nothing
        cuts = cut(case, num_ranks, 3)
        ranks.run(num_ranks, check_within, case, torch.bfloat16, cuts, (1, 2, 4), "cuda")


@pytest.mark.parametrize("head_parallel", ["auto", 1])
def test_every_run_is_bitwise_identical(ranks, num_ranks, head_parallel):
    case = Case("bits", 2050, 2050, 8, 8, 128, is_causal=True)
    options = {"head_parallel": head_parallel, "num_chunks": 2}
    cuts = cut(case, num_ranks, 2)
    runs = [ranks.run(num_ranks, bits, case, cuts, options, "cuda") for _ in range(5)]
    for other in runs[1:]:
        for ours, theirs in zip(runs[0], other, strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("is_causal", [False, True])
def test_calls_may_follow_each_other_at_once(ranks, num_ranks, is_causal):
    case = Case("in-a-row", 3000, 3000, 8, 8, 64, is_causal=is_causal)
    all_cuts = [cut(case, num_ranks, seed) for seed in (2, 3)]
    assert ranks.run(num_ranks, calls_that_deviate, case, all_cuts) == [[]] * num_ranks


def test_ranks_that_disagree_find_out(ranks, num_ranks):
    """Before anything is sent: the group still works."""
    found = ranks.run(num_ranks, complaint, num_ranks - 1, {"scale": 2.0}, {}, device="cuda")
    if num_ranks > 1:
        assert all(error is ValueError and "has scale 2.0" in text for error, text in found)
    assert ranks.run(num_ranks, complaint, 0, {}, {}, device="cuda") == [None] * num_ranks


@pytest.mark.parametrize("head_parallel", ["auto", 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replays_have_the_bits_of_calls(ranks, num_ranks, case, head_parallel):
    for num_chunks in (1, 4):
        options = {"head_parallel": head_parallel, "num_chunks": num_chunks}
        cuts = cut(case, num_ranks, num_chunks)
        assert ranks.run(num_ranks, replays_that_deviate, case, cuts, options) == [[]] * num_ranks


def test_replays_drop_what_the_captured_call_dropped(ranks, num_ranks):
    options = {"dropout_p": 0.3, "seed": 5}
    cuts = cut(CASES[0], num_ranks, 0)
    found = ranks.run(num_ranks, replays_that_deviate, CASES[0], cuts, options)
    assert found == [[]] * num_ranks


def test_training_is_captured_as_pytorch_does_it(ranks, num_ranks):
    case = Case("graphed", 2050, 2050, 8, 8, 128, is_causal=True)
    cuts = cut(case, num_ranks, 0)
    found = ranks.run(num_ranks, deviation_of_graphed_training, case, cuts)
    assert found == [0.0] * num_ranks


def test_captures_of_other_work_are_not_disturbed(ranks, num_ranks):
    ranks.run(num_ranks, capture_something_else)


def test_first_calls_are_not_captured(ranks, num_ranks):
    """Sizes of which there has been no call, or which need more memory than any call."""
    for rows in (9, 300_000):
        for error, text in ranks.run(num_ranks, complaint_in_a_graph, rows):
            assert error is RuntimeError and "call once with the same arguments" in text
