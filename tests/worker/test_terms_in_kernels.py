"""Score terms in the kernels of the backend ``triton``, compared with float64.

Without a GPU Triton's interpreter runs the plain kernels. On a Hopper GPU, half precision up to
head_dim 128 runs the Hopper kernels, unless there is a bias or dropout.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.exact import assert_tracks_exact

import cqs
from benchmarks.cases import Case, visible_mask
from cqs.patterns import dilated, from_mask, sliding_window
from cqs.problem.score_terms import ScoreTerms
from cqs.worker import HeldTokens, Worker

pytest.importorskip("triton")

from cqs.worker.triton.hopper_pairs import TERMS

EVERY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def define(problem, terms, query, key, value, mask):
    """Output and LSE from the definition; 0 and -inf or the sink for rows without a live pair."""
    group_size = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group_size, 1) for t in (key, value))
    scores = problem.scale * query @ key.mT
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.alibi_slopes is not None:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[2:])
        apart = (rows[:, None] + len(columns) - len(rows) - columns).abs()
        scores = scores - terms.alibi_slopes.to(scores.dtype)[..., None, None] * apart
    if terms.bias is not None:
        scores = scores + terms.bias.to(scores.dtype)
    scores = scores.masked_fill(~mask, -torch.inf)
    if problem.sinks is not None:
        sinks = problem.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    is_blind = (lse == -torch.inf).unsqueeze(-1)
    return scores.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0) @ value, lse


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


def draw_terms(generator, problem, *, has_bias=True):
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
    return ScoreTerms(
        softcap=generator.choice([0.0, 0.7, 5.0, 50.0, 1000.0]),
        alibi_slopes=None if slopes is None else slopes.to(device),
        bias=None if bias is None else bias.to(device),
        distance=seqlen_kv - seqlen_q,
    )


def draw_sinks(generator, problem):
    """Sinks below, among and above the scores, in any dtype, every second one in memory."""
    sinks = 3 * torch.randn(2 * problem.query.shape[1], device=problem.query.device)
    sinks[torch.rand(len(sinks)) < 0.2] = -torch.inf
    sinks = sinks.to(generator.choice([torch.float64, torch.float32, torch.bfloat16]))
    return generator.choice([None, sinks[::2]])


def mask_of(problem):
    mask = visible_mask(problem)
    lengths = problem.query.shape[2], problem.key.shape[2]
    return (
        torch.ones(lengths, dtype=torch.bool, device=problem.query.device) if mask is None else mask
    )


def with_gradients(compute, tensors, grad_output):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output, lse = compute(*tensors)
    gradients = torch.autograd.grad(output, tensors, grad_output.to(output))
    return output.detach(), lse.detach(), gradients


def assert_same(found, problem, terms, mask=None):
    """Compare output, LSE and gradients of a problem with float64."""
    mask = mask_of(problem) if mask is None else mask
    tensors = problem.query, problem.key, problem.value
    grad_output = found[3]

    def compute(*tensors):
        return define(problem, terms, *tensors, mask)

    exact = with_gradients(compute, [t.double() for t in tensors], grad_output)
    eager = with_gradients(compute, tensors, grad_output)
    assert_tracks_exact(found[0], eager[0], exact[0], slack=4)
    is_live = exact[1] > -torch.inf
    assert torch.equal(found[1] > -torch.inf, is_live)
    atol = 3e-5 if problem.query.dtype == torch.float32 else 1e-4
    torch.testing.assert_close(found[1][is_live], exact[1][is_live].float(), rtol=3e-6, atol=atol)
    for name, *grads in zip("query key value".split(), found[2], eager[2], exact[2], strict=True):
        assert_tracks_exact(*grads, slack=4, name=f"gradient of {name}")


def dtypes_of(device):
    return [torch.float32, torch.float16] + [torch.bfloat16] * 2 * (device == "cuda")


@EVERY_DEVICE
@pytest.mark.parametrize("seed", range(16))
def test_random_terms_are_right(device, seed):
    generator = random.Random(seed)
    dtype = generator.choice(dtypes_of(device))
    problem = draw_case(generator, on_hopper=device == "cuda").make(dtype, device)
    value_dim = generator.choice([16, problem.query.shape[-1]])
    problem = cqs.problem.replace(problem, value=problem.value[..., :value_dim])
    terms = draw_terms(generator, problem, has_bias=device == "cpu" or seed % 3 == 0)
    problem = cqs.problem.replace(problem, sinks=draw_sinks(generator, problem))
    scores = cqs.Scores(
        problem.sinks, terms.softcap or None, alibi_slopes=terms.alibi_slopes, bias=terms.bias
    )
    options = {"is_causal": problem.is_causal, "pattern": problem.pattern, "scale": problem.scale}
    options |= {"num_tasks": generator.choice([1, 3, 7]), "backend": "triton"}

    def compute(*tensors):
        return cqs.attention(*tensors, scores=scores, return_lse=True, **options)

    tensors = problem.query, problem.key, problem.value
    grad_output = torch.randn(*problem.query.shape[:3], value_dim, dtype=dtype, device=device)
    found = with_gradients(compute, tensors, grad_output)
    assert_same((*found, grad_output), problem, terms)


def hold(tensor, ranges):
    return HeldTokens((each, tensor[:, :, each.start : each.stop].clone()) for each in ranges)


@EVERY_DEVICE
@pytest.mark.parametrize("pattern", [None, dilated(8, 4, 2)], ids=["dense", "dilated"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tasks_that_hold_several_ranges_are_right(device, is_causal, pattern):
    """Adjacent rows of their tensors are not adjacent in the sequence."""
    if is_causal and pattern is not None:
        pytest.skip("patterns say themselves whether they are causal")
    options = {"is_causal": is_causal, "pattern": pattern}
    options["head_dim"], dtype = (64, torch.bfloat16) if device == "cuda" else (16, torch.float32)
    case = Case("held", 59, 90, 2, 1, **options)
    problem = case.make(dtype, device)
    terms = ScoreTerms(
        softcap=2.0,
        alibi_slopes=torch.rand(1, 2, device=device),
        bias=torch.randn(1, 2, 59, 90) if device == "cpu" else None,
        distance=90 - 59,
    )
    problem = cqs.problem.replace(problem, terms=terms)
    worker, whole = Worker.of(problem, "triton"), mask_of(problem)
    tensors = [problem.query, problem.key, problem.value]
    exact = define(problem, terms, *(t.double() for t in tensors), whole)
    grad_output = torch.randn_like(problem.query)
    of_queries = [grad_output, exact[0].to(dtype), exact[1].float()]
    sums = [torch.zeros(t.shape, device=device) for t in tensors]
    num_apart = 0
    for task in problem.make_plan(7).tasks:
        sides = (task.held_queries, task.held_keys, task.held_keys)
        num_apart += len(task.held_keys) > 1 and len(task.held_queries) > 1
        held = [hold(t, ranges) for t, ranges in zip(tensors, sides, strict=True)]
        for step, part in zip(task.steps, worker.run_steps(task.steps, *held), strict=True):
            seen = torch.zeros_like(whole)
            for block in step.blocks():
                keys = block.keys
                seen[step.queries.start : step.queries.stop, keys.start : keys.stop] = True
            rows = slice(step.queries.start, step.queries.stop)
            want = define(problem, terms, *(t.double() for t in tensors), seen & whole)
            eager = define(problem, terms, *tensors, seen & whole)[0]
            assert_tracks_exact(part.output, eager[:, :, rows], want[0][:, :, rows], slack=4)
            torch.testing.assert_close(part.lse, want[1][:, :, rows].float(), rtol=3e-6, atol=1e-4)
        held += [hold(t, task.held_queries) for t in of_queries]
        found = worker.run_backward(task.steps, *held)
        for total, gradient, ranges in zip(sums, found, sides, strict=True):
            first = 0
            for r in ranges:
                total[:, :, r.start : r.stop] += gradient[:, :, first : (first := first + len(r))]
    assert num_apart
    found = exact[0].to(dtype), exact[1].float(), [s.to(dtype) for s in sums], grad_output
    assert_same(found, problem, terms)


@EVERY_DEVICE
def test_terms_and_dropout_are_right(device):
    """The reference drops the same pairs."""
    problem = Case("dropped", 90, 130, 4, 2, head_dim=64, is_causal=True).make(device=device)
    bias, slopes = (torch.randn(shape, device=device) for shape in ((1, 1, 90, 130), (1, 4)))
    scores = cqs.Scores(softcap=3.0, alibi_slopes=slopes, bias=bias)
    options = {"is_causal": True, "dropout_p": 0.3, "seed": 1, "scores": scores, "num_tasks": 3}
    grad_output = torch.randn_like(problem.query)
    tensors = problem.query, problem.key, problem.value

    def compute(*tensors, backend="triton"):
        return cqs.attention(*tensors, **options, backend=backend, return_lse=True)

    found = with_gradients(compute, tensors, grad_output)
    expected = with_gradients(partial(compute, backend="reference"), tensors, grad_output)
    for got, want in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_the_polynomial_of_a_soft_cap_is_accurate():
    """In float32, with the powers of a factor in its coefficients as in the Hopper kernel."""
    x = torch.linspace(0, 0.6, 100_001)
    for factor in (1e-5, 2e-3, 1e4):
        products, found = x / factor, torch.zeros_like(x)
        for power, term in reversed(list(enumerate(TERMS))):
            coefficient = torch.tensor(term * factor ** (2 * power + 1))
            found = torch.addcmul(coefficient, found, products.square())
        error = (found * products).double() - (products.double() * factor).tanh()
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
    problem = cqs.problem.replace(problem, query=query, key=key)
    terms = ScoreTerms(softcap=softcap)
    grad_output = torch.randn_like(query)

    def compute(*tensors):
        options = {"is_causal": True, "return_lse": True, "backend": "triton", "num_tasks": 3}
        return cqs.attention(*tensors, scores=cqs.Scores(softcap=softcap), **options)

    found = with_gradients(compute, (query, key, problem.value), grad_output)
    assert_same((*found, grad_output), problem, terms)


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
