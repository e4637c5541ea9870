"""Score terms in the kernels of the backend ``triton``, compared with float64.

Without a GPU Triton's interpreter runs the plain kernels. On a Hopper GPU, half precision up to
head_dim 128 runs the Hopper kernels, unless there is a bias or dropout.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from score_cases import define, gradient_of_output, options_of, tensors_of, with_gradients
from support.exact import assert_tracks_exact

import cqs
from benchmarks.cases import Case
from cqs.patterns import dilated, from_mask, sliding_window
from cqs.problem import check_problem
from cqs.report.passes import hold
from cqs.worker import Worker

pytest.importorskip("triton")

from cqs.worker.triton.hopper_pairs import TERMS
from tests.worker.hopper import mask_of

EVERY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def draw_case(generator, *, on_hopper=False):
    """Sizes, a mask, scale and terms."""
    num_kv_heads = generator.choice([1, 2])
    seqlen_q, seqlen_kv = (generator.randint(1, 150) for _ in range(2))
    dims = [64, 128, 320] if on_hopper else [16, 24, 72, 320]
    case = Case(
        "drawn",
        *(seqlen_q, seqlen_kv),
        num_heads=num_kv_heads * generator.choice([1, 2, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=generator.choice(dims),
        batch=generator.choice([1, 2]),
        is_causal=generator.random() < 0.4,
    )
    if not case.is_causal and generator.random() < 0.7:
        drawn = torch.rand(seqlen_q, seqlen_kv, generator=torch.Generator().manual_seed(3)) < 0.4
        patterns = [sliding_window(30, 5), dilated(8, 3, 3), from_mask(drawn)]
        case = replace(case, pattern=generator.choice(patterns))
    return case


def draw_scores(generator, problem, *, has_bias=True):
    """Scores whose sinks are below, among and above them, every second one in memory."""
    batch, num_heads, seqlen_q, _ = problem.query.shape
    seqlen_kv, device = problem.key.shape[2], problem.query.device
    slopes = generator.choice([None, torch.rand(1, num_heads), torch.rand(batch, num_heads)])
    shapes = [
        (1, num_heads, seqlen_q, seqlen_kv),
        (batch, 1, 1, seqlen_kv),
        (batch, num_heads, seqlen_q, 1),
    ]
    bias = None
    if has_bias and generator.random() < 0.6:
        bias = torch.randn(
            generator.choice(shapes), dtype=generator.choice([torch.float32, torch.float16])
        )
        bias.masked_fill_(torch.rand(bias.shape) < 0.1, -torch.inf)
        bias = bias.to(device)
    sinks = 3 * torch.randn(2 * num_heads, device=device)
    sinks[torch.rand(len(sinks)) < 0.2] = -torch.inf
    sinks = sinks.to(generator.choice([torch.float64, torch.float32, torch.bfloat16]))
    return cqs.Scores(
        sinks=generator.choice([None, sinks[::2]]),
        softcap=generator.choice([None, 0.7, 5.0, 50.0, 1000.0]),
        alibi_slopes=None if slopes is None else slopes.to(device),
        bias=bias,
    )


def by_definition(problem, scores, dtype=None):
    """Output, LSE and gradients, in a dtype; the default is that of the problem."""

    def compute(query, key, value):
        return define(replace(problem, query=query, key=key, value=value), scores)

    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors_of(problem)]
    return with_gradients(compute, leaves, [])


def by_cqs(problem, backend="triton", **options):
    options |= options_of(problem) | {"return_lse": True, "backend": backend}
    return with_gradients(partial(cqs.attention, **options), tensors_of(problem), [])


def assert_right(actual, problem, scores):
    """Compare output, LSE and gradients of a problem with float64."""
    exact, eager = by_definition(problem, scores, torch.float64), by_definition(problem, scores)
    lse, exact_lse = actual.pop(1), exact.pop(1)
    del eager[1]
    is_live = exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, is_live)
    atol = 3e-5 if problem.query.dtype == torch.float32 else 1e-4
    torch.testing.assert_close(lse[is_live], exact_lse[is_live].float(), rtol=3e-6, atol=atol)
    names = "output", "gradient of query", "gradient of key", "gradient of value"
    for name, *results in zip(names, actual, eager, exact, strict=True):
        assert_tracks_exact(*results, slack=4, name=name)


def dtypes_of(device):
    return [torch.float32, torch.float16] + [torch.bfloat16] * 2 * (device == "cuda")


@pytest.mark.sample(6)
@EVERY_DEVICE
@pytest.mark.parametrize("seed", range(16))
def test_random_terms_are_right(device, seed):
    generator = random.Random(seed)
    dtype = generator.choice(dtypes_of(device))
    problem = draw_case(generator, on_hopper=device == "cuda").make(dtype, device)
    value_dim = generator.choice([16, problem.query.shape[-1]])
    problem = replace(problem, value=problem.value[..., :value_dim])
    scores = draw_scores(generator, problem, has_bias=device == "cpu" or seed % 3 == 0)
    actual = by_cqs(problem, scores=scores, num_tasks=generator.choice([1, 3, 7]))
    assert_right(actual, problem, scores)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "triton"),
        ("cpu", "reference"),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("pattern", [None, dilated(8, 4, 2)], ids=["dense", "dilated"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tasks_that_hold_several_ranges_are_right(device, backend, is_causal, pattern):
    """Adjacent rows of their tensors are not adjacent in the sequence."""
    if is_causal and pattern is not None:
        pytest.skip("patterns say themselves whether they are causal")
    head_dim, dtype = (64, torch.bfloat16) if device == "cuda" else (16, torch.float32)
    case = Case("held", 59, 90, 2, 1, head_dim, is_causal=is_causal, pattern=pattern)
    problem = case.make(dtype, device)
    bias = torch.randn(1, 2, 59, 90) if device == "cpu" else None
    scores = cqs.Scores(softcap=2.0, alibi_slopes=torch.rand(1, 2, device=device), bias=bias)
    tensors = problem.query, problem.key, problem.value
    problem = check_problem(*tensors, **options_of(problem), scores=scores)
    worker, whole = Worker.of(problem, backend), mask_of(problem)
    output, lse, *_ = by_definition(problem, scores, torch.float64)
    answer = [output.detach().to(dtype), lse.detach().float()]
    sums = [torch.zeros(t.shape, device=device) for t in tensors]
    num_apart = 0
    for task in problem.make_plan(7).tasks:
        sides = (task.held_queries, task.held_keys, task.held_keys)
        num_apart += len(task.held_keys) > 1 and len(task.held_queries) > 1
        held = list(map(hold, tensors, sides))
        for step, part in zip(task.steps, worker.run_steps(task.steps, *held), strict=True):
            rows = slice(step.queries.start, step.queries.stop)
            seen = torch.zeros_like(whole)
            for block in step.blocks():
                seen[rows, block.keys.start : block.keys.stop] = True
            sub_problem = replace(problem, is_causal=False, pattern=from_mask((seen & whole).cpu()))
            eager = by_definition(sub_problem, scores)[0][:, :, rows]
            exact, exact_lse, *_ = by_definition(sub_problem, scores, torch.float64)
            assert_tracks_exact(part.output, eager, exact[:, :, rows], slack=4)
            torch.testing.assert_close(
                part.lse, exact_lse[:, :, rows].float(), rtol=3e-6, atol=1e-4
            )
        held += [hold(t, task.held_queries) for t in (gradient_of_output(answer[0]), *answer)]
        gradients = worker.run_backward(task.steps, *held)
        for total, gradient, ranges in zip(sums, gradients, sides, strict=True):
            first = 0
            for r in ranges:
                total[:, :, r.start : r.stop] += gradient[:, :, first : (first := first + len(r))]
    assert num_apart
    assert_right([*answer, *(gradient_sum.to(dtype) for gradient_sum in sums)], problem, scores)


@EVERY_DEVICE
def test_terms_and_dropout_are_right(device):
    """The reference drops the same pairs."""
    problem = Case("dropped", 90, 130, 4, 2, head_dim=64, is_causal=True).make(device=device)
    bias, slopes = (torch.randn(shape, device=device) for shape in ((1, 1, 90, 130), (1, 4)))
    scores = cqs.Scores(softcap=3.0, alibi_slopes=slopes, bias=bias)
    options = {"dropout_p": 0.3, "seed": 1, "scores": scores, "num_tasks": 3}
    actual, expected = (by_cqs(problem, name, **options) for name in ("triton", "reference"))
    for got, want in zip(actual, expected, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_the_polynomial_of_a_soft_cap_is_accurate():
    """In float32, with the powers of a factor in its coefficients as in the Hopper kernel."""
    x = torch.linspace(0, 0.6, 100_001)
    for factor in (1e-5, 2e-3, 1e4):
        products, series = x / factor, torch.zeros_like(x)
        for power, term in reversed(list(enumerate(TERMS))):
            coefficient = torch.tensor(term * factor ** (2 * power + 1))
            series = torch.addcmul(coefficient, series, products.square())
        error = (series * products).double() - (products.double() * factor).tanh()
        assert error.abs().max() < 8e-7


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1, 20])
@pytest.mark.parametrize("softcap", [16.0, 30.0, 50.0, 51.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_soft_caps_of_large_scores_are_right(head_dim, softcap, factor):
    """Scores beyond the range of the polynomial, and rows of which all scores are close to -cap."""
    case = Case("capped", 200, 300, 2, 1, head_dim, is_causal=True)
    problem = case.make(torch.bfloat16, "cuda")
    query, key = problem.query * factor, problem.key
    query[:, :, 50:60], key[:, :, :150] = -factor, 1
    problem, scores = replace(problem, query=query, key=key), cqs.Scores(softcap=softcap)
    assert_right(by_cqs(problem, scores=scores, num_tasks=3), problem, scores)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@EVERY_DEVICE
def test_nan_stays_in_its_row(device):
    """The Hopper kernels share reciprocals among pairs of a row."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    problem = Case("nan", 150, 150, 2, 2, head_dim=64).make(dtype, device)
    query, key, value = problem.query, problem.key, problem.value
    query[:, :, 17] = torch.nan
    options = {"scores": cqs.Scores(softcap=5.0), "backend": "triton"}
    whole = cqs.attention(query, key, value, **options)
    is_nan = torch.zeros(whole.shape, dtype=torch.bool, device=device)
    is_nan[:, :, 17] = True
    assert torch.equal(whole.isnan(), is_nan)
    query[:, :, 17] = 0
    key[:, :, 90] = torch.nan  # no later query sees it
    window = cqs.attention(query, key, value, pattern=sliding_window(5, 5), **options)
    is_nan[:] = False
    is_nan[:, :, 85:96] = True
    assert torch.equal(window.isnan(), is_nan)
