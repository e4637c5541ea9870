"""Joint tokens give the attention of the whole sequence, wherever their rows are computed."""

import random
import re

import pytest
import torch
from joint_programs import (
    check_captured_joint,
    check_joint_tracks_exact,
    count_joint_bytes,
    has_contiguous_copies,
    joint_bits,
    joint_complaint,
    joint_dtensors,
    joint_score_errors,
    largest_joint_errors,
)
from random_problems import kinds_of
from sparse_cases import NAMES, with_pattern

import cqs
from benchmarks.cases import Case
from cqs.scheduler.head_groups import possible_head_parallel

pytestmark = pytest.mark.slow

CASES = (
    Case("square", 47, 47, 4, 4, head_dim=8, batch=2),
    Case("gqa", 47, 47, 4, 2, head_dim=8),
    Case("causal", 47, 47, 4, 1, head_dim=8, is_causal=True),
    Case("cross", 40, 61, 4, 2, head_dim=8),
    Case("few", 6, 6, 2, 2, head_dim=8),
)
JOINT = {"few": (3, 3), "none": (0, 0), "many": (5, 5), "keys": (None, 4), "queries": (3, None)}


def cut(lengths, num_ranks, seed):
    """Cut both sides at random: some shards are empty."""
    generator = random.Random(seed)
    return [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in lengths
    ]


def problems_of(case, num_ranks):
    degrees = ["auto", *possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)]
    for seed, (joint, position) in enumerate(
        (joint, position) for joint in JOINT.values() for position in ("front", "rear")
    ):
        lengths = case.seqlen_q - (joint[0] or 0), case.seqlen_kv - (joint[1] or 0)
        options = {"head_parallel": degrees[seed % len(degrees)], "num_chunks": 1 + seed % 2}
        yield case, cut(lengths, num_ranks, seed), joint, position, options


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_every_world_is_exact(ranks, num_ranks, case):
    problems = [*problems_of(case, num_ranks)]
    for errors in ranks.run(num_ranks, largest_joint_errors, problems):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_patterns_count_joint_tokens(ranks, number):
    case = with_pattern(CASES[number % 2], NAMES[number])
    for errors in ranks.run(
        2 + number % 3, largest_joint_errors, [*problems_of(case, 2 + number % 3)]
    ):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_kind_of_plan_is_exact(ranks, is_causal):
    case = Case("kinds", 47, 47, 4, 2, head_dim=8, is_causal=is_causal)
    problems = [
        (case, cut((42, 42), 4, seed), (5, 5), ("front", "rear")[seed % 2], {"plan": plan})
        for seed, plan in enumerate(kinds_of(4))
    ]
    problems = [
        (*each, options | {"head_parallel": 1, "verify": i % 3 == 0})
        for i, (*each, options) in enumerate(problems)
    ]
    for errors in ranks.run(4, largest_joint_errors, problems):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.name)
def test_every_dtype_tracks_exact(ranks, case, dtype):
    cuts = cut((40, 40), 3, 1)
    ranks.run(3, check_joint_tracks_exact, case, cuts, (7, 7), "front", dtype)


@pytest.mark.parametrize(
    "names",
    [("sinks", "bias"), ("slopes",), ("table", "bias")],
    ids=["sinks-bias", "slopes", "function-bias"],
)
@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.name)
def test_terms_of_scores_count_joint_tokens(ranks, case, names):
    for position, joint in (("front", (5, 3)), ("rear", (3, 5))):
        cuts = cut((case.seqlen_q - joint[0], case.seqlen_kv - joint[1]), 3, 2)
        for errors in ranks.run(3, joint_score_errors, case, cuts, joint, position, names):
            assert max(errors) < 1e-9


@pytest.mark.parametrize("number", [1, 2, 5])
def test_joint_rows_are_sent_from_contiguous_memory(ranks, number):
    case = CASES[0]
    cuts = cut([47 - number] * 2, 2, 1)
    found = ranks.run(2, has_contiguous_copies, case, cuts, (number, number), "front")
    assert found == [[True]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gpus_track_exact(gpu_ranks, is_causal, dtype):
    number = torch.cuda.device_count()
    case = Case("gpus", 1100, 1100, 8, 2, head_dim=64, is_causal=is_causal)
    for position, joint in (("front", (77, 77)), ("rear", (None, 13)), ("front", (number, number))):
        cuts = cut([1100 - (each or 0) for each in joint], number, 1)
        options = case, cuts, joint, position, dtype, "cuda"
        gpu_ranks.run(number, check_joint_tracks_exact, *options)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_cuda_graphs_have_joint_tokens(gpu_ranks, is_causal):
    number = torch.cuda.device_count()
    case = Case("graphs", 1100, 1100, 8, 2, head_dim=64, is_causal=is_causal)
    gpu_ranks.run(number, check_captured_joint, case, cut((1023, 1023), number, 1), (77, 77))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.3, "seed": 5},
        {"scores": cqs.Scores(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]), softcap=2.0)},
    ],
    ids=["dropout", "scores"],
)
@pytest.mark.parametrize("position", ["front", "rear"])
def test_dropout_and_scores_are_those_of_one_process(ranks, position, options):
    problem = CASES[0].make()
    options = options | {"backend": "reference"}
    whole = cqs.attention(problem.query, problem.key, problem.value, **options)
    cuts, joint = cut((41, 41), 3, 3), (6, 6)
    found = ranks.run(3, joint_bits, CASES[0], cuts, joint, position, options)
    order = slice(6) if position == "front" else slice(-6, None)
    others = slice(6, None) if position == "front" else slice(-6)
    for output, is_alike in found:
        assert is_alike
        torch.testing.assert_close(output[:, :, order], whole[:, :, order])
    shards = [output[:, :, others] for output, _ in found]
    torch.testing.assert_close(torch.cat(shards, dim=2), whole[:, :, others])


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2, "seed": 3}, {"num_chunks": 2}])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_prepared_calls_take_other_numbers_of_joint_tokens(ranks, num_ranks, options):
    cuts, joint = cut((41, 41), num_ranks, 3), (6, 6)
    for _, is_alike in ranks.run(num_ranks, joint_bits, CASES[1], cuts, joint, "rear", options):
        assert is_alike


def test_every_rank_sends_its_part_of_the_joint_tokens(ranks):
    """Three of nine beside 20 rows: 15 % more, on every rank."""
    without, joined = (ranks.run(3, count_joint_bytes, number) for number in (0, 9))
    assert min(without) > 0 and joined == [sent * 23 // 20 for sent in without]


def test_replicated_dtensors(ranks):
    assert ranks.run(3, joint_dtensors) == [True] * 3


SHAPES = (2, 4, 3, 16), (2, 2, 3, 16), (2, 2, 3, 16)
FEWER = {
    "joint_query": torch.zeros(2, 4, 2, 16),
    "joint_key": torch.zeros(2, 2, 2, 16),
    "joint_value": torch.zeros(2, 2, 2, 16),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (FEWER, r"JointRows\(position='front', queries=2, keys=2\), rank 0 has Joint.*queries=3"),
        ({"joint_position": "rear"}, "JointRows.position='rear'.* rank 0 has .*'front'"),
        (dict.fromkeys(FEWER), "queries=0, keys=0"),
        ({"joint_query": None}, "queries=0, keys=3"),
    ],
    ids=["numbers", "position", "forgotten", "no-queries"],
)
def test_ranks_with_other_joint_tokens_find_out(ranks, changed, message):
    for error, text in ranks.run(3, joint_complaint, 1, SHAPES, changed):
        assert error is ValueError
        assert re.match("rank 1 of the group has joint tokens .*" + message, text)


def query(*shape, **options):
    return {"joint_query": torch.zeros(*shape, **options)}


BAD = {
    "position": ({"joint_position": "middle"}, ValueError, "joint_position .*'middle'"),
    "key-alone": ({"joint_value": None}, ValueError, "joint_value=None"),
    "value-alone": ({"joint_key": None}, ValueError, "joint_key=None"),
    "lengths": ({"joint_key": FEWER["joint_key"]}, ValueError, "joint_value .*joint_key, 2, got 3"),
    "heads": (query(2, 2, 3, 16), ValueError, r"joint_query .*\[2, 2, 3, 16\]"),
    "head_dim": (query(2, 4, 3, 8), ValueError, r"joint_query .*\[2, 4, 3, 8\]"),
    "batch": (query(3, 4, 3, 16), ValueError, "joint_query must be .2 or 1,"),
    "dtype": (query(2, 4, 3, 16, dtype=torch.float64), ValueError, "joint_query .*dtype .*float64"),
    "device": (query(2, 4, 3, 16, device="meta"), ValueError, "joint_query .*device .*meta"),
    "dimensions": (query(4, 3, 16), ValueError, r"joint_query .*\[4, 3, 16\]"),
    "type": ({"joint_query": [1.0]}, TypeError, "joint_query .* got list"),
    "sparse": ({"joint_query": torch.zeros(2, 4, 3, 16).to_sparse()}, ValueError, "joint_query .*"),
}


@pytest.mark.parametrize(("changed", "expected", "message"), BAD.values(), ids=BAD)
def test_bad_joint_tokens_are_named_on_every_rank(ranks, changed, expected, message):
    for rank, (error, text) in enumerate(ranks.run(2, joint_complaint, 1, SHAPES, changed)):
        assert error is (expected if rank else ValueError) and re.search(message, text)
        assert rank or text.startswith("rank 1 of the group failed")
