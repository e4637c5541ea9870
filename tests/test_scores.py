"""Options of the scores: errors, special values, gradients of what functions read, and graphs."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from option_table import TERMS
from score_cases import (
    Drawn,
    assert_equal,
    assert_tracks_definition,
    compute_by,
    expected,
    relative,
    tensors_of,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cqs
from benchmarks.cases import Case
from cqs.patterns import sliding_window

CASE = Case("sinks", 41, 50, num_heads=4, num_kv_heads=2, batch=2)


def draw(problem, *names, seed=5):
    return Drawn(problem, random.Random(seed), names)


@pytest.mark.parametrize("options", [{}, {"num_tasks": 3}, {"backend": "reference"}], ids=str)
def test_a_sink_of_infinity_takes_all_weight(options):
    tensors = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.tensor([torch.inf, 0.0], requires_grad=True)
    output = cqs.attention(*tensors, scores=cqs.Scores(sinks=sinks), **options)
    assert (output[:, 0] == 0).all() and (output[:, 1] != 0).all()
    gradients = torch.autograd.grad(output.sum(), [*tensors, sinks])
    assert all(each.isfinite().all() for each in gradients)
    assert (gradients[0][:, 0] == 0).all() and gradients[3][0] == 0


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
    empty = problem.query, problem.key[:, :, :0], problem.value[:, :, :0]
    empty = cqs.attention(*empty, scores=cqs.Scores(sinks=sinks), return_lse=True)
    assert (empty.output == 0).all() and torch.equal(empty.lse, sinks.view(-1, 1).expand(2, 4, 41))


def disagree(group):
    rank = dist.get_rank(group)
    q, zeros = torch.randn(1, 2, 5, 4), torch.zeros(2)
    for options, error, message in (
        ({"softcap": 1.0 + rank}, ValueError, "softcap"),
        ({"sinks": zeros} if rank else {}, ValueError, "has_sinks"),
        ({"alibi_slopes": zeros} if rank else {}, ValueError, "score_terms"),
        ({"bias": torch.zeros(5 if rank else 1, 10)}, ValueError, "one row on all ranks"),
        ({"score_mod": lambda s, *_: s} if rank else {}, ValueError, "score_terms"),
        ({"bias": torch.zeros(5, 10, requires_grad=rank > 0)}, ValueError, "score_terms"),
        ({"bias": torch.zeros(1, 1 + rank, 5, 10)}, ValueError, "bias"),
        ({"score_mod": lambda *_: None}, TypeError, "score_mod must return"),
        ({"bias": torch.zeros(5, 5)}, ValueError, "whole sequence, 1 or 10, got 5"),
    ):
        with pytest.raises(error, match=message):
            cqs.distributed.attention(q, q, q, scores=cqs.Scores(**options), group=group)
    prepared = cqs.distributed.prepare(q, q, q, scores=cqs.Scores(zeros), group=group)
    for scores, message in (
        (None, "has_sinks must be as prepared, True, got False"),
        (cqs.Scores(zeros, bias=torch.zeros(1, 10)), "score_terms must be as prepared"),
        (cqs.Scores(zeros, softcap=2.0), "softcap must be as prepared, 0.0, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(q, q, q, scores=scores)


def test_ranks_agree_on_scores(ranks):
    ranks.run(2, disagree)


@pytest.mark.ray
def test_clusters_reject_scores_that_they_cannot_compute(cluster):
    q, leaf = torch.randn(1, 2, 8, 4), torch.zeros((), requires_grad=True)
    for name, value in (
        ("sinks", leaf.expand(2)),
        ("bias", leaf),
        ("alibi_slopes", leaf.expand(2)),
        ("score_mod", lambda score, b, h, i, j: score + leaf),
    ):
        scores, message = cqs.Scores(**{name: value}), rf"scores\.{name} must not require gradients"
        with pytest.raises(ValueError, match=message):
            cluster.submit(q, q, q, scores=scores)
        with pytest.raises(ValueError, match=message):
            cluster.attention(cluster.shard(q, q, q), scores=scores)
    for wrong, error in ((lambda *_: None, TypeError), (lambda s, *_: s.item(), ValueError)):
        with pytest.raises(error, match=r"scores\.score_mod must"):
            cluster.attention(q, q, q, num_tasks=3, scores=cqs.Scores(score_mod=wrong))
    with pytest.raises(NotImplementedError, match="'cpu' does not support scores with .*score_mod"):
        cluster.attention(q, q, q, backend="cpu", scores=cqs.Scores(score_mod=lambda s, *_: s))


def test_score_functions_without_a_derivative_or_with_writes_have_gradients():
    problem = CASE.make(torch.float64)
    written = cqs.Scores(score_mod=lambda s, *_: s.mul_(0.5))
    halved = cqs.Scores(score_mod=lambda s, *_: s * 0.5)
    gradients = []
    for scores in (written, halved):
        leaves = tensors_of(problem)
        output = cqs.attention(*leaves, num_tasks=3, scores=scores)
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    assert_equal(*gradients)
    leaves = tensors_of(problem)
    constant = cqs.Scores(score_mod=lambda s, *_: torch.zeros_like(s))
    output = cqs.attention(*leaves, num_tasks=3, scores=constant)
    query, key, value = torch.autograd.grad(output.sum(), leaves)
    assert (query == 0).all() and (key == 0).all()
    torch.testing.assert_close(value, torch.full_like(value, 2 * 41 / 50))


class Table(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, score, batch, head, query, key):
        return score * self.values[head]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score, factor):
        return 2 * score * factor

    setup_context = staticmethod(lambda context, inputs, _: context.save_for_backward(*inputs))

    @staticmethod
    def backward(context, gradient):
        score, factor = context.saved_tensors
        return 2 * gradient * factor, 2 * gradient * score


def test_tensors_have_gradients_however_a_function_reads_them():
    query, key, value = (torch.randn(1, 4, 6, 8) for _ in range(3))
    leaf = torch.randn(4, requires_grad=True)
    functions = [
        lambda score, b, h, i, j, values=leaf: score * values[h],
        Table(leaf),
        Table(leaf * 1).forward,  # an attribute that is no parameter
        lambda score, b, h, i, j: Doubled.apply(score, leaf[h]) / 2,
        lambda score, b, h, i, j: score * Doubled.apply(leaf, torch.ones(4))[h] / 2,
    ]
    wanted = None
    for function in [lambda score, b, h, i, j: score * leaf[h], *functions]:
        found = cqs.attention(query, key, value, scores=cqs.Scores(score_mod=function), num_tasks=3)
        (gradient,) = torch.autograd.grad(found.square().sum(), leaf)
        wanted = gradient if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted)
    assert wanted.abs().max() > 0


def test_functions_of_float32_scores_have_gradients_for_narrow_tensors():
    query, ones = torch.randn(1, 4, 6, 8, dtype=torch.bfloat16), torch.ones(1)
    leaf = torch.randn(4, requires_grad=True)
    scores = cqs.Scores(score_mod=lambda s, b, h, i, j: s.reshape(1) @ ones * leaf[h])
    cqs.attention(query, query, query, scores=scores, num_tasks=3).sum().backward()
    assert leaf.grad is not None


def test_what_a_function_reads_without_its_gradient_needs_none():
    query, leaf = torch.randn(1, 4, 6, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    scores = cqs.Scores(score_mod=lambda s, b, h, i, j: s * leaf.detach()[h] / leaf.shape[0])
    cqs.attention(query, query, query, scores=scores, num_tasks=3).sum().backward()
    assert leaf.grad is None and query.grad is not None


@pytest.mark.parametrize("name", ["sinks", "bias", "score_mod", "alibi_slopes"])
def test_writes_between_the_passes_raise(name):
    problem = CASE.make(torch.float64)
    leaf = torch.zeros(4, 1, 1, dtype=torch.float64, requires_grad=True)
    values = {
        "sinks": leaf.view(4),
        "bias": leaf,
        "alibi_slopes": leaf.detach().view(4),
        "score_mod": lambda score, batch, head, query, key: score + leaf[head, 0, 0],
    }
    scores = cqs.Scores(**{name: values[name]})
    query = problem.query.requires_grad_()
    output = cqs.attention(query, problem.key, problem.value, scores=scores)
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_graphs_modes_and_checkpoints(ranks):
    problem = CASE.make(torch.float64)
    drawn = draw(problem, *TERMS)
    drawn.has_slopes_gradient = True
    exact = expected(problem, drawn)
    compiled = torch.compile(cqs.attention, backend="aot_eager")
    again = partial(checkpoint, cqs.attention, use_reentrant=False)
    for attend in cqs.attention, partial(compiled, num_tasks=3), again:
        with FlopCounterMode(display=False):
            assert_equal(compute_by(attend, problem, drawn), exact)
        assert_equal(compute_by(attend, problem, drawn), exact)
    drawn = draw(problem, "sinks", "softcap", "alibi_slopes", "bias")
    torch._dynamo.reset()
    compiled = torch.compile(cqs.attention, fullgraph=True, backend="aot_eager")
    for pattern, num_tasks in ((None, 3), (sliding_window(9, 0), None)):
        problem = replace(problem, pattern=pattern)
        found = compute_by(compiled, problem, drawn, num_tasks=num_tasks)
        assert_equal(found, expected(problem, drawn))
    ranks.run(2, graph_on_rank)


def graph_on_rank(group):
    attend = cqs.distributed.attention
    torch._dynamo.reset()  # of frames that were skipped in other programs
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float64, torch.float32):
        problem = CASE.make(dtype)
        drawn = draw(problem, "sinks", "softcap", "alibi_slopes")
        one, other = (
            compute_by(partial(call, group=group), problem, drawn) for call in (attend, compiled)
        )
        assert all(map(torch.equal, one, other))


GPU_CALLS = [
    *((backend, torch.float16, ["sinks"], 410, True) for backend in (None, "triton", "cudnn")),
    *((backend, torch.bfloat16, ["sinks"], 410, True) for backend in ("triton", "reference")),
    ("flex", torch.bfloat16, ["score_mod"], 300, True),
    ("flex", torch.bfloat16, ["score_mod", "softcap", "alibi_slopes"], 410, False),
    ("flex", torch.float32, ["score_mod", "bias", "softcap"], 410, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tasks", [1, 5])
@pytest.mark.parametrize(
    ("backend", "dtype", "names", "seqlen_kv", "is_causal"), GPU_CALLS, ids=str
)
def test_scores_on_a_gpu(backend, dtype, names, seqlen_kv, is_causal, num_tasks):
    problem = Case("gpu", 300, seqlen_kv, 4, 2, 64, is_causal=is_causal).make(dtype, "cuda")
    drawn = draw(problem, *names)
    drawn.has_bias_gradient, drawn.score_mod = False, drawn.score_mod and bias_of_distance
    options = {"backend": backend, "num_tasks": num_tasks, "verify": True}
    found = compute_by(cqs.attention, problem, drawn, **options)
    assert_tracks_definition(found, problem, drawn, slack=8)


def bias_of_distance(table):
    """Return a function like ``relative`` that asks for no gradient of its table."""
    return relative(table.detach())
