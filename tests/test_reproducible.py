"""Reproducible calls: bitwise identical in this process, on ranks, on workers and as streams."""

import random
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from programs import attend, raised, random_cuts
from random_problems import random_case, random_packed_case

import cqs
import cqs.distributed
import cqs.streaming
from benchmarks.cases import Case
from cqs.distributed import Strategy
from cqs.executors.distributed import attention as distributed_attention
from cqs.scheduler.head_groups import possible_head_parallel

NUM_PROBLEMS, BATCH = 300, 12
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
BUDGETS = "2MiB", "16MiB", "1GiB"


def draw_problem(generator):
    """Return a case, the dtype of its tensors, and options without tensors."""
    case = (random_packed_case if generator.random() < 0.2 else random_case)(generator)
    options = {"is_causal": case.is_causal, "pattern": case.pattern, "scale": case.scale}
    options["num_tasks"] = generator.choice([None, *range(1, 32)])
    if generator.random() < 0.2:
        options |= {"dropout_p": 0.3, "seed": 5}
    scores = generator.choice([None, None, "sinks", "softcap", "alibi_slopes"])
    return case, generator.choice(DTYPES), options, scores


def results(call, tensors, weights, options, scores=None):
    """Return output, LSE, and the gradients of query, key, value and sinks."""
    leaves, scored = [tensor.detach().requires_grad_() for tensor in tensors], {}
    heads = torch.linspace(-1, 1, tensors[0].shape[1])
    if scores == "sinks":
        leaves.append(heads.clone().requires_grad_())
        scored = {"scores": cqs.Scores(sinks=leaves[3])}
    elif scores is not None:
        values = {"softcap": 2.0, "alibi_slopes": heads / 50}
        scored = {"scores": cqs.Scores(**{scores: values[scores]})}
    answer = call(*leaves[:3], return_lse=True, reproducible=True, **options, **scored)
    return [*map(torch.Tensor.detach, answer), *torch.autograd.grad(answer.output, leaves, weights)]


def make_tensors(case, dtype, device="cpu"):
    """Return query, key and value, and the gradient of the output."""
    problem = case.make(dtype, device)
    shape = problem.query.mT.shape  # another order of strides than that of the output
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(7)).mT
    return (problem.query, problem.key, problem.value), weights.to(device, dtype)


def expected_results(case, dtype, options, scores, device="cpu"):
    tensors, weights = make_tensors(case, dtype, device)
    return results(cqs.attention, tensors, weights, options, scores)


def results_of_shard(group, case, dtype, options, scores, cuts, degree, device="cpu"):
    """Return the results of this rank's shard; the gradient of the sinks is a share."""
    rank, (tensors, weights) = dist.get_rank(group), make_tensors(case, dtype, device)
    queries, keys = (slice(*list(pairwise(marks))[rank]) for marks in cuts)
    shards = [t[:, :, rows] for t, rows in zip(tensors, (queries, keys, keys), strict=True)]
    call = partial(cqs.distributed.attention, group=group, strategy=Strategy(head_parallel=degree))
    return results(call, shards, weights[:, :, queries], options, scores)


def joined(shards):
    """Return the results of whole sequences: their tokens in rank order, and sums of shares."""
    columns = list(zip(*shards, strict=True))
    return [torch.cat(c, dim=2) for c in columns[:5]] + [sum(c) for c in columns[5:]]


def assert_equal(actual, expected, *problem):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), problem


def assert_all_equal(batch, calls):
    """Compare results of this process, with one or two threads, with those of calls in turn."""
    generator = random.Random(batch)
    for number in range(BATCH):
        case, dtype, *problem = draw_problem(generator)
        tensors, weights = make_tensors(case, dtype)
        actual = results(calls[number % len(calls)], tensors, weights, *problem)
        torch.set_num_threads(1 + number % 2)
        assert_equal(actual, results(cqs.attention, tensors, weights, *problem), case, problem)


batches = pytest.mark.parametrize("batch", range(NUM_PROBLEMS // BATCH))


@pytest.mark.slow
@pytest.mark.sample(20)
@batches
def test_ranks_compute_the_bits_of_one_process(ranks, batch):
    generator = random.Random(batch)
    for number in range(BATCH):
        case, *problem = draw_problem(generator)
        num_ranks = 1 + (batch + number) % 8
        cuts = random_cuts(generator, (case.seqlen_q, case.seqlen_kv), num_ranks)
        degrees = possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)
        degree = 1 if case.pattern is not None else generator.choice(degrees)
        shards = ranks.run(num_ranks, results_of_shard, case, *problem, cuts, degree)
        assert_equal(joined(shards), expected_results(case, *problem), case, problem, cuts)


@pytest.mark.slow
@pytest.mark.sample(20)
@batches
def test_streams_compute_the_bits_of_one_call(one_thread, batch):
    streams = [
        partial(cqs.streaming.attention, memory_budget=most, device="cpu") for most in BUDGETS
    ]
    assert_all_equal(batch, streams)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 40])  # the plain kernels compute float32
def test_gpus_compute_the_bits_of_one_gpu(gpu_ranks, head_dim):
    num_ranks, dtype = torch.cuda.device_count(), DTYPES[head_dim > 40]
    case = Case("reproducible", 5000, 5000, 8, 4, head_dim)
    problem = dtype, {"is_causal": True}, None
    expected = [result.cpu() for result in expected_results(case, *problem, "cuda")]
    cuts = random_cuts(random.Random(0), (5000, 5000), num_ranks)
    shards = gpu_ranks.run(num_ranks, results_of_shard, case, *problem, cuts, 1, "cuda")
    assert_equal(joined([[part.cpu() for part in shard] for shard in shards]), expected)
    stream = partial(cqs.streaming.attention, memory_budget="1GiB", device="cuda")
    tensors, weights = make_tensors(case, dtype)
    assert_equal(results(stream, tensors, weights, {"is_causal": True}), expected)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.sample(20)
@batches
def test_workers_compute_the_bits_of_one_process(one_thread, cluster, batch):
    assert_all_equal(batch, [cluster.attention])


@pytest.mark.ray
def test_sharded_sequences_have_the_bits_of_one_process(cluster):
    tensors = [torch.randn(1, 2, 90, 8) for _ in range(3)]
    options = {"is_causal": True, "num_tasks": 5, "reproducible": True}
    output = cluster.attention(cluster.shard(*tensors), **options).to_local()
    assert torch.equal(output, cqs.attention(*tensors, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_depends_on_no_other_unit(one_thread, dtype):
    query, key = torch.randn(2, 4, 150, 16, dtype=dtype), torch.randn(2, 2, 150, 16, dtype=dtype)
    whole = cqs.attention(query, key, key, reproducible=True)
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    torch.set_num_threads(2)
    assert torch.equal(cqs.attention(strided, key, key, reproducible=True), whole)
    part = cqs.attention(query[1:, 2:], key[1:, 1:], key[1:, 1:], reproducible=True)
    assert torch.equal(part, whole[1:, 2:])


def test_reproducible_calls_are_exact(assert_right):
    problem = Case("reproducible", 150, 200, is_causal=True).make()
    tensors = problem.query, problem.key, problem.value
    options = {"is_causal": True, "reproducible": True, "return_lse": True}
    assert_right(problem, cqs.attention(*tensors, **options))
    attend_with_dropout = partial(cqs.attention, *tensors, dropout_p=0.3, seed=1)
    torch.testing.assert_close(attend_with_dropout(reproducible=True), attend_with_dropout())


def test_what_is_not_reproducible_is_refused():
    tensors = [torch.randn(1, 2, 300, 8) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="'triton' has no reproducible results"):
        cqs.attention(*tensors, reproducible=True, backend="triton")
    with pytest.raises(ValueError, match="num_tasks must be None without reproducible=True"):
        cqs.streaming.attention(*tensors, num_tasks=3)
    stream = partial(cqs.streaming.attention, *tensors, device="cpu", reproducible=True)
    with pytest.raises(ValueError, match=r"units of 24 tasks, got 20000: pass num_tasks=\d+"):
        stream(memory_budget=20000)
    batch = torch.zeros(2, 2, 300, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="batch of 1 is not broadcast"):
        cqs.attention(batch, *tensors[1:], reproducible=True)
    with pytest.raises(NotImplementedError, match="gradients of scores"):
        stream(scores=cqs.Scores(bias=torch.zeros(300, 300, requires_grad=True)))


def joint_tokens_are_equal(group):
    tensors, rank = make_tensors(Case("joint", 40, 40), torch.float32)[0], dist.get_rank(group)
    rows = [*range(10), *range(10 + 15 * rank, 25 + 15 * rank)]
    joint = cqs.distributed.JointTokens(*(tensor[:, :, :10] for tensor in tensors))
    shards = [tensor[:, :, rows[10:]] for tensor in tensors]
    output = cqs.distributed.attention(*shards, group=group, joint=joint, reproducible=True)
    return torch.equal(output, cqs.attention(*tensors, reproducible=True)[:, :, rows])


def test_joint_tokens_have_the_bits_of_one_sequence(ranks):
    assert all(ranks.run(2, joint_tokens_are_equal))


def other_environment(group):
    """Compute with another library on rank 1; return what is raised."""
    tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    described = (("torch", f"version {dist.get_rank(group)}"),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_attention, "describe_environment", lambda device: described)
        return raised(group, attend, tensors, {"reproducible": True})


def test_ranks_with_other_libraries_are_refused(ranks):
    for error, text in ranks.run(2, other_environment):
        assert error is ValueError and "environment" in text


def test_the_fingerprint_changes_with_what_the_bits_depend_on():
    tensors = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    one = cqs.fingerprint(*tensors)
    assert one == cqs.fingerprint(*(tensor + 1 for tensor in tensors))
    for options in ({"num_tasks": 7}, {"is_causal": True}, {"backend": "reference"}):
        assert cqs.fingerprint(*tensors, **options)["digest"] != one["digest"]


@pytest.mark.long
def test_a_llama_trains_alike_on_any_number_of_ranks(ranks):
    pytest.importorskip("transformers")
    from examples.reproducible_training import train

    torch.set_num_threads(1)
    expected = train(None)
    assert expected[0][-1] < expected[0][0] - 1
    for num_ranks in (1, 2, 3):
        for actual in ranks.run(num_ranks, train):
            assert_equal(actual, expected, num_ranks)
