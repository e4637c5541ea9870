"""Attention over shards on GPUs: as on CPUs, with the rounding of each dtype."""

import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import (
    ShardedProblem,
    check_tracks_exact,
    complaint,
    cut,
    cuts_of,
    deviating_calls,
    smallest_limit,
)

import cqs.distributed
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
LONG = Case("bits", 2050, 2050, 8, 8, 128, is_causal=True)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=[1, 2, 3, 4, 8])
def num_ranks(request):
    return request.param


@pytest.fixture
def ranks(request, num_ranks):
    """A GPU each if there are enough, else some share one."""
    is_enough = num_ranks <= torch.cuda.device_count()
    return request.getfixturevalue("gpu_ranks" if is_enough else "crowded_ranks")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_case
def test_every_dtype_tracks_exact(ranks, num_ranks, case, dtype):
    for seed, head_parallel in enumerate(("auto", 1)):
        for num_chunks in (1, 2, 3):
            options = {"head_parallel": head_parallel, "num_chunks": num_chunks}
            cuts = cuts_of(case, num_ranks, seed + num_chunks)
            ranks.run(num_ranks, check_tracks_exact, case, cuts, options, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_joint_tokens_track_exact(gpu_ranks, is_causal, dtype):
    number = torch.cuda.device_count()
    case = Case("gpus", 1100, 1100, 8, 2, head_dim=64, is_causal=is_causal)
    for position, joint in (("front", (77, 77)), ("rear", (None, 13)), ("front", (number, number))):
        cuts = cut([1100 - (each or 0) for each in joint], number, 1)
        given = {"joint": joint, "position": position}
        gpu_ranks.run(number, check_tracks_exact, case, cuts, {}, dtype, "cuda", **given)


def check_within(group, case, cuts, factors):
    """Check results against float64 within limits, and that equal calls are bitwise identical."""

    def check(options):
        check_tracks_exact(group, case, cuts, options, torch.bfloat16, "cuda")

    least = smallest_limit(check, {})
    for factor in factors:
        options = {"max_bytes": factor * least}
        check(options)
        assert not deviating_calls(group, 2, case, cuts, options, "cuda", torch.bfloat16)


@each_case
def test_a_limit_of_memory_keeps_results_exact(ranks, num_ranks, case):
    if num_ranks > 1:  # one rank receives nothing
        ranks.run(num_ranks, check_within, case, cuts_of(case, num_ranks, 3), (1, 2, 4))


def delay(generator):
    """Keep this rank's GPU busy for a while, so that GPUs become uneven."""
    torch.cuda._sleep(int(torch.randint(4_000_000, (), generator=generator)))


def passes(problem, **options):
    """Return the output of a call and the gradients of its leaves."""
    output = problem.attend(**options)
    return output.detach(), *torch.autograd.grad(output, problem.leaves, output.detach())


def calls_that_deviate(group, case, all_cuts):
    """List calls whose bits are others when calls follow each other at once, on uneven GPUs."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    problems = [ShardedProblem(group, case, cuts, torch.bfloat16, "cuda") for cuts in all_cuts]
    calls = [
        partial(passes, problem, head_parallel=head_parallel, num_chunks=num_chunks)
        for problem in problems
        for head_parallel in ("auto", 1)
        for num_chunks in (1, 2, 4)
    ]
    expected, found = [], []
    for call in calls:
        expected.append(call())
        torch.cuda.synchronize()
    for call in calls * 3:
        delay(generator)
        found.append(call())
    return [
        number
        for number, results in enumerate(found)
        if not all(map(torch.equal, results, expected[number % len(calls)]))
    ]


@pytest.mark.parametrize("is_causal", [False, True])
def test_calls_may_follow_each_other_at_once(ranks, num_ranks, is_causal):
    case = Case("in-a-row", 3000, 3000, 8, 8, 64, is_causal=is_causal)
    all_cuts = [cuts_of(case, num_ranks, seed) for seed in (2, 3)]
    assert ranks.run(num_ranks, calls_that_deviate, case, all_cuts) == [[]] * num_ranks


def test_ranks_that_disagree_find_out(ranks, num_ranks):
    """Before anything is sent: the group still works."""
    found = ranks.run(num_ranks, complaint, num_ranks - 1, {"scale": 2.0}, {}, device="cuda")
    if num_ranks > 1:
        assert all(error is ValueError and "has scale 2.0" in text for error, text in found)
    assert ranks.run(num_ranks, complaint, 0, {}, {}, device="cuda") == [None] * num_ranks


def replays_that_deviate(group, case, cuts, options, **joint):
    """List turns whose replay of a CUDA graph has other bits than the calls, on uneven GPUs."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    on_gpu = torch.Generator("cuda")
    problem = ShardedProblem(group, case, cuts, torch.bfloat16, "cuda", **joint)
    problem.arguments["scale"] = 0.1
    passes(problem, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # at once: what the call before had begun may not be done
        captured = passes(problem, **options)
    replayed, expected = [], []
    for turn in range(6):
        delay(generator)
        with torch.no_grad():
            for tensor in problem.leaves:  # equal seeds: joint tokens are the same on all ranks
                tensor.normal_(generator=on_gpu.manual_seed(turn))
        graph.replay()
        replayed.append([each.clone() for each in captured])
        if turn % 2:
            problem.arguments["scale"] = 0.2
            passes(problem, **options)
            problem.arguments["scale"] = 0.1
        expected.append(passes(problem, **options))
    return [turn for turn in range(6) if not all(map(torch.equal, replayed[turn], expected[turn]))]


@pytest.mark.parametrize("head_parallel", ["auto", 1])
@each_case
def test_replays_have_the_bits_of_calls(ranks, num_ranks, case, head_parallel):
    for changed in ({"num_chunks": 1}, {"num_chunks": 4}, {"dropout_p": 0.3, "seed": 5}):
        options = {"head_parallel": head_parallel, **changed}
        cuts = cuts_of(case, num_ranks, changed.get("num_chunks", 0))
        assert ranks.run(num_ranks, replays_that_deviate, case, cuts, options) == [[]] * num_ranks


@pytest.mark.parametrize("is_causal", [False, True])
def test_replays_have_joint_tokens(gpu_ranks, is_causal):
    number = torch.cuda.device_count()
    case = Case("graphs", 1100, 1100, 8, 2, head_dim=64, is_causal=is_causal)
    cuts = cut((1023, 1023), number, 1)
    deviating = gpu_ranks.run(number, replays_that_deviate, case, cuts, {}, joint=(77, 77))
    assert deviating == [[]] * number


def deviation_of_graphed_training(group, case, cuts):
    """Return the largest difference of two steps' gradients, captured as PyTorch does it or not."""
    tensors = ShardedProblem(group, case, cuts, torch.bfloat16, "cuda").tensors

    def attend(query, key, value):
        return cqs.distributed.attention(query, key, value, group=group, is_causal=case.is_causal)

    graphed = torch.cuda.make_graphed_callables(attend, tuple(tensors))
    worst = 0.0
    for scale in (1.0, -0.5):
        changed = [(tensor.detach() * scale).requires_grad_() for tensor in tensors]
        gradients, expected = (
            torch.autograd.grad(call(*changed).square().sum(), changed)
            for call in (graphed, attend)
        )
        errors = [float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True)]
        worst = max(worst, *errors)
    return worst


def test_training_is_captured_as_pytorch_does_it(ranks, num_ranks):
    deviation = ranks.run(
        num_ranks, deviation_of_graphed_training, LONG, cuts_of(LONG, num_ranks, 0)
    )
    assert deviation == [0.0] * num_ranks


def capture_something_else(group):
    """Capture for longer than it takes until somebody asks whether a call is done."""
    tensors = [torch.randn(1, 4, 8, 16, device="cuda") for _ in range(3)]
    cqs.distributed.attention(*tensors, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = tensors[0] * 2
        time.sleep(2.5)
    graph.replay()
    assert torch.equal(double, tensors[0] * 2)


def test_captures_of_other_work_are_not_disturbed(ranks, num_ranks):
    ranks.run(num_ranks, capture_something_else)


def complaint_in_a_graph(group, rows):
    """Return what is raised where a CUDA graph is captured of a call longer than any before."""
    gc.collect()  # a graph that is freed during a capture ends it
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        return complaint(group, 0, {}, {}, rows, device="cuda")


def test_first_calls_are_not_captured(ranks, num_ranks):
    """Sizes of which there has been no call, or which need more memory than any call."""
    for rows in (9, 300_000):
        for error, text in ranks.run(num_ranks, complaint_in_a_graph, rows):
            assert error is RuntimeError and "call once with the same arguments" in text
