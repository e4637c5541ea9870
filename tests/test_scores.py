"""Options of the scores, on every executor, against a definition in float64."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from random_problems import random_case, random_problem
from support.exact import assert_tracks_exact
from torch.utils.checkpoint import checkpoint

import cqs
from benchmarks.cases import Case, visible_mask
from cqs.patterns import causal, per_head, sliding_window

NUM_CASES = 240
BATCH = 10
CASE = Case("sinks", 41, 50, num_heads=4, num_kv_heads=2, batch=2)


def define(problem, sinks, factors=1.0):
    """Output and LSE from the definition: capped scores, a softmax with one more column of them."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    key, value = (t.repeat_interleave(group_size, 1) for t in (problem.key, problem.value))
    scores = problem.scale * problem.query @ key.mT
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if (mask := visible_mask(problem)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    whole = torch.cat([scores, column], -1)
    return (whole.softmax(-1)[..., :-1] * factors) @ value, whole.logsumexp(-1)


def draw_sinks(problem, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(problem.query.shape[1], generator=generator, dtype=torch.float64)
    return (2 * drawn).to(dtype).requires_grad_()


def leaves(problem):
    return [
        t.detach().clone().requires_grad_() for t in (problem.query, problem.key, problem.value)
    ]


def with_gradients(compute, tensors, sinks):
    """Output, LSE, and the gradients of a random function of the output."""
    output, lse = compute(*tensors)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return [output, lse, *torch.autograd.grad(output, (*tensors, sinks), grad)]


def options_of(problem):
    return {"is_causal": problem.is_causal, "pattern": problem.pattern, "scale": problem.scale}


def scores_of(problem, sinks):
    return cqs.Scores(sinks=sinks, softcap=problem.softcap or None)


def with_softcap(problem, generator):
    """The problem with a soft cap, in two of three cases."""
    return cqs.problem.replace(problem, softcap=generator.choice([0.0, 0.5, 3.0]))


def expected(problem, sinks):
    given = [*leaves(problem)]

    def compute(*tensors):
        names = zip(("query", "key", "value"), tensors, strict=True)
        return define(cqs.problem.replace(problem, **dict(names)), sinks)

    return with_gradients(compute, given, sinks)


def assert_equal(found, exact):
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def compute_by(call, problem, **options):
    """Results of a function of cqs."""
    sinks = draw_sinks(problem)
    given = (
        options_of(problem) | options | {"return_lse": True, "scores": scores_of(problem, sinks)}
    )
    return with_gradients(partial(call, **given), leaves(problem), sinks)


@pytest.mark.sample(8)
@pytest.mark.parametrize("batch", range(NUM_CASES // BATCH))
def test_random_problems_are_exact(batch):
    generator = random.Random(batch)
    for _ in range(BATCH):
        problem = with_softcap(random_case(generator).make(torch.float64), generator)
        exact = expected(problem, draw_sinks(problem))
        number = generator.choice([1, 2, 5, 13, 64])
        assert_equal(compute_by(cqs.attention, problem, num_tasks=number, verify=True), exact)
        stream = partial(cqs.streaming.attention, memory_budget=400_000, device="cpu")
        assert_equal(compute_by(stream, problem), exact)


def test_parts_of_a_long_sequence_are_exact():
    case = Case("long", 600, 700, num_heads=4, num_kv_heads=2, head_dim=8, is_causal=True)
    problem = cqs.problem.replace(case.make(torch.float64), softcap=2.0)
    stream = partial(cqs.streaming.attention, memory_budget=300_000, device="cpu", verify=True)
    assert_equal(compute_by(stream, problem), expected(problem, draw_sinks(problem)))


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sinks_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_dtype(backend, dtype, sinks_dtype):
    if backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter has no bfloat16")
    problem = CASE.make(dtype)
    sinks = draw_sinks(problem, sinks_dtype)
    options = options_of(problem) | {"return_lse": True, "backend": backend, "num_tasks": 3}
    compute = partial(cqs.attention, scores=cqs.Scores(sinks=sinks), **options)
    found = with_gradients(compute, leaves(problem), sinks)
    assert [each.dtype for each in found] == [dtype, torch.float32, *[dtype] * 3, sinks_dtype]
    wide = CASE.make(torch.float64)
    wide = cqs.problem.replace(
        wide, **{n: getattr(problem, n).double() for n in ("query", "key", "value")}
    )
    exact = expected(wide, sinks.detach().double().requires_grad_())
    eager = expected(problem, sinks.detach().requires_grad_())
    for got, plain, right in zip(found, eager, exact, strict=True):
        assert_tracks_exact(got, plain, right, slack=8)


def test_heads_with_patterns_of_their_own():
    problem = CASE.make(torch.float64)
    windows = [sliding_window(9, 0), causal(), sliding_window(3, 3), causal()]
    problem = cqs.problem.replace(problem, pattern=per_head([windows]))
    exact = expected(problem, draw_sinks(problem))
    assert_equal(compute_by(cqs.attention, problem, num_tasks=4, verify=True), exact)


def test_dropout_spares_sinks():
    problem = CASE.make(torch.float64)
    dropped = cqs.problem.check_problem(
        problem.query, problem.key, problem.value, dropout_p=0.3, seed=7
    ).dropout
    ranges = [range(41)], [range(50)]
    factors = dropped.kept(dropped.random_bits(problem.query, *ranges)).double() * dropped.scale
    sinks = draw_sinks(problem)
    tensors = leaves(problem)
    names = dict(zip(("query", "key", "value"), tensors, strict=True))
    exact = with_gradients(
        lambda *_: define(cqs.problem.replace(problem, **names), sinks, factors), tensors, sinks
    )
    found = compute_by(cqs.attention, problem, num_tasks=3, dropout_p=0.3, seed=7, verify=True)
    assert_equal(found, exact)


def test_sinks_without_gradients_and_infinite_sinks():
    problem = CASE.make(torch.float64)
    tensors = problem.query, problem.key, problem.value
    sinks = torch.tensor([-torch.inf, 0.0, 1e4, -1e4], dtype=torch.float64)
    output, lse = cqs.attention(*tensors, scores=cqs.Scores(sinks=sinks), return_lse=True)
    plain, plain_lse = cqs.attention(*tensors, return_lse=True)
    for head in (0, 3):
        assert torch.equal(output[:, head], plain[:, head])
        assert torch.equal(lse[:, head], plain_lse[:, head])
    assert (output[:, 2] == 0).all() and (lse[:, 2] == 1e4).all()
    assert torch.equal(cqs.attention(*tensors, scores=cqs.Scores()), plain)
    empty = cqs.attention(
        tensors[0],
        tensors[1][:, :, :0],
        tensors[2][:, :, :0],
        scores=cqs.Scores(sinks=sinks),
        return_lse=True,
    )
    assert (empty.output == 0).all() and torch.equal(empty.lse, sinks.view(-1, 1).expand(2, 4, 41))


def errors_on_rank(group, problems):
    """Largest error of each random problem on this rank."""
    found, rank = [], dist.get_rank(group)
    for case, cuts, options in problems:
        problem = with_softcap(case.make(torch.float64), random.Random(str(options)))
        sinks = draw_sinks(problem)
        exact = expected(problem, sinks)
        rows, columns = (slice(*marks[rank : rank + 2]) for marks in cuts)
        parts = rows, columns, columns
        shards = [t[:, :, part].detach() for t, part in zip(leaves(problem), parts, strict=True)]
        shards = [shard.clone().requires_grad_() for shard in shards]
        given = (
            options_of(problem) | options | {"scores": scores_of(problem, sinks), "group": group}
        )
        output, lse = cqs.distributed.attention(*shards, return_lse=True, **given)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(exact[0].shape, generator=generator, dtype=torch.float64)
        *gradients, of_sinks = torch.autograd.grad(output, (*shards, sinks), grad[:, :, rows])
        without = cqs.distributed.attention(*(s.detach() for s in shards), **given)
        (of_these,) = torch.autograd.grad(without, sinks, grad[:, :, rows])
        changes = [
            (one - other).abs().max()
            for one, other in ((without, output), (of_these, of_sinks))
            if one.numel()
        ]
        dist.all_reduce(of_sinks, group=group)
        of_rank = [
            each[:, :, part] for each, part in zip(exact[:5], (rows, rows, *parts), strict=True)
        ]
        pairs = zip([output, lse, *gradients, of_sinks], [*of_rank, exact[-1]], strict=True)
        errors = [(got - want).abs().max().item() for got, want in pairs if got.numel()]
        errors += [change.item() for change in changes]
        found.append(max(errors))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_ranks_are_exact(ranks, num_ranks):
    generator = random.Random(num_ranks)
    problems = [random_problem(generator, num_ranks) for _ in range(30)]
    for of_rank in ranks.run(num_ranks, errors_on_rank, problems):
        for error, problem in zip(of_rank, problems, strict=True):
            assert error < 1e-10, problem


def disagree(group):
    rank = dist.get_rank(group)
    q = torch.randn(1, 2, 5, 4)
    scores = cqs.Scores(sinks=torch.zeros(2)) if rank else None
    with pytest.raises(ValueError, match="softcap"):
        capped = cqs.Scores(softcap=1.0 + rank)
        cqs.distributed.attention(q, q, q, scores=capped, group=group)
    with pytest.raises(ValueError, match="has_sinks"):
        cqs.distributed.attention(q, q, q, scores=scores, group=group)
    prepared = cqs.distributed.prepare(q, q, q, scores=cqs.Scores(torch.zeros(2)), group=group)
    with pytest.raises(ValueError, match="has_sinks must be as prepared, True, got False"):
        prepared(q, q, q)
    sinks = cqs.Scores(torch.tensor([0.5, -0.5]))
    direct = cqs.distributed.attention(q, q, q, scores=sinks, group=group)
    return torch.equal(prepared(q, q, q, scores=sinks), direct)


def test_ranks_agree_on_sinks(ranks):
    assert all(ranks.run(2, disagree))


@pytest.mark.ray
def test_ray_tasks_are_exact(cluster):
    generator = random.Random(3)
    for _ in range(8):
        problem = with_softcap(random_case(generator).make(torch.float64), generator)
        exact = expected(problem, draw_sinks(problem))
        assert_equal(compute_by(cluster.attention, problem, num_tasks=5, verify=True), exact)
    problem = CASE.make(torch.float64)
    sinks = draw_sinks(problem)
    output, lse, *_ = expected(problem, sinks)
    tensors = problem.query, problem.key, problem.value
    options = options_of(problem) | {"return_lse": True}
    with pytest.raises(ValueError, match=r"scores\.sinks must not require gradients"):
        cluster.submit(*tensors, scores=cqs.Scores(sinks=sinks), **options)
    with pytest.raises(ValueError, match=r"scores\.sinks must not require gradients"):
        cluster.attention(cluster.shard(*tensors), scores=cqs.Scores(sinks=sinks), **options)
    options["scores"] = cqs.Scores(sinks=sinks.detach())
    assert_equal(cluster.submit(*tensors, **options).result(), [output, lse])
    sharded = cluster.attention(cluster.shard(*tensors), **options).to_local()
    assert_equal(sharded, [output, lse])


def compile_whole(attention):
    def attend(*tensors, **options):
        return attention(*tensors, **options)

    return torch.compile(attend, fullgraph=True, backend="aot_eager")


def test_graphs_and_checkpoints(ranks):
    problem = CASE.make(torch.float64)
    exact = expected(problem, draw_sinks(problem))
    compiled = compile_whole(cqs.attention)
    assert_equal(compute_by(compiled, problem, num_tasks=3), exact)
    problem = cqs.problem.replace(problem, pattern=sliding_window(9, 0), softcap=2.0)
    exact = expected(problem, draw_sinks(problem))
    assert_equal(compute_by(compiled, problem, dropout_p=0.0), exact)
    again = partial(checkpoint, cqs.attention, use_reentrant=False)
    assert_equal(compute_by(again, problem), exact)
    assert all(ranks.run(2, graph_on_rank))


def graph_on_rank(group):
    problem = CASE.make(torch.float64)
    for dtype in (torch.float64, torch.float32):
        results = []
        compiled = compile_whole(cqs.distributed.attention)
        for call in (cqs.distributed.attention, compiled):
            sinks = draw_sinks(problem, dtype)
            scores = cqs.Scores(sinks=sinks, softcap=2.0)
            given = {"return_lse": True, "scores": scores, "group": group}
            results.append(with_gradients(partial(call, **given), leaves(problem), sinks))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton", "cudnn", "reference"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tasks", [1, 5])
def test_sinks_on_a_gpu(backend, dtype, num_tasks):
    case = Case("gpu", 700, 900, num_heads=4, num_kv_heads=2, head_dim=64, is_causal=True)
    problem = case.make(dtype, "cuda")
    sinks = draw_sinks(problem, torch.float32).detach().cuda().requires_grad_()
    options = options_of(problem) | {"return_lse": True, "backend": backend, "num_tasks": num_tasks}
    scores = cqs.Scores(sinks=sinks, softcap=3.0 if backend == "reference" else None)
    problem = cqs.problem.replace(problem, softcap=scores.softcap or 0.0)
    compute = partial(cqs.attention, scores=scores, **options)
    found = with_gradients(compute, leaves(problem), sinks)
    tensors = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    exact = expected(
        cqs.problem.replace(problem, **tensors), sinks.detach().double().requires_grad_()
    )
    eager = expected(problem, sinks)
    for got, plain, right in zip(found, eager, exact, strict=True):
        assert_tracks_exact(got, plain, right, slack=8)


def test_fused_kernels_refuse_a_soft_cap():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(NotImplementedError, match="backend 'cpu' does not support a soft cap"):
        cqs.attention(q, q, q, scores=cqs.Scores(softcap=1.0), backend="cpu")


BAD = [
    (cqs.Scores(softcap=0), ValueError, r"scores\.softcap must be positive and finite, got 0"),
    (cqs.Scores(softcap=torch.inf), ValueError, "must be positive and finite, got inf"),
    (cqs.Scores(softcap="1"), TypeError, r"scores\.softcap must be a number or None, got '1'"),
    (torch.zeros(2), TypeError, "scores must be cqs.Scores or None, got Tensor"),
    (cqs.Scores([0.0, 0.0]), TypeError, r"scores\.sinks must be a tensor or None, got list"),
    (cqs.Scores(torch.zeros(2, dtype=int)), TypeError, r"scores\.sinks must be float64, float32"),
    (cqs.Scores(torch.zeros(3)), ValueError, r"must be \[num_heads\], \[2\], got \[3\]"),
    (cqs.Scores(torch.zeros(1, 2)), ValueError, r"must be \[num_heads\], \[2\], got \[1, 2\]"),
    (
        cqs.Scores(torch.zeros(2, device="meta")),
        ValueError,
        "on the device of query, cpu, got meta",
    ),
]


@pytest.mark.parametrize("call", [cqs.attention, cqs.streaming.attention], ids=["memory", "parts"])
@pytest.mark.parametrize(("scores", "error", "message"), BAD)
def test_bad_options_raise(call, scores, error, message):
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(error, match=message):
        call(q, q, q, scores=scores)
