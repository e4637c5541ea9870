"""Dropout: the same pairs for every cut, executor and backend, and gradients of what was kept."""

from dataclasses import replace

import pytest
import torch
from score_cases import define, factors_of
from support.exact import assert_tracks_exact, attend

import cqs
from benchmarks.cases import Case
from cqs.executors.verify import VerificationError, verify_rows
from cqs.partial import Partial
from cqs.problem.dropout import Dropout
from cqs.worker import BACKENDS

RAGGED = Case("ragged-causal", 67, 67, 2, 2, batch=2, is_causal=True)
GROUPED = Case("gqa-causal", 97, 97, 6, 2, is_causal=True)
CROSS = Case("cross-causal", 45, 150, 2, 2, batch=2, is_causal=True)
MORE_QUERIES = Case("more-queries-causal", 150, 45, 2, 2, batch=2, is_causal=True)


def assert_as_defined(output, problem, **dropout):
    """Compare an output with the definition in float64."""
    tensors = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    eager, exact = (
        define(each, cqs.Scores(), factors_of(each, **dropout))[0]
        for each in (problem, replace(problem, **tensors))
    )
    assert_tracks_exact(output, eager, exact)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("case", "num_tasks", "backend"),
    [
        (RAGGED, 8, "reference"),
        (GROUPED, 1, "triton"),
        (CROSS, 8, "triton"),
        (MORE_QUERIES, 8, "reference"),
        (replace(RAGGED, is_causal=False), 13, "triton"),
        (MORE_QUERIES, 8, "triton"),
    ],
)
def test_every_cut_drops_the_same_pairs(case, num_tasks, backend, device):
    problem = case.make(torch.float32, device)
    if reason := BACKENDS[backend].why_not(problem.query, problem.key, problem.value):
        pytest.skip(reason)
    options = {"num_tasks": num_tasks, "backend": backend, "verify": True}
    output, lse = attend(problem, dropout_p=0.3, seed=5, **options)
    assert_as_defined(output, problem, dropout_p=0.3, seed=5)
    torch.testing.assert_close(lse, attend(problem, backend="reference")[1])


@pytest.mark.slow
def test_gradcheck():
    leaves = [torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *t: cqs.attention(*t, num_tasks=3, dropout_p=0.5, seed=1), leaves
    )


def splitmix64(state, number):
    """Return element ``number`` of the sequence, in Python's integers."""
    z = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_masks_are_those_of_the_published_generator():
    dropout = Dropout(0.3, seed=2**63 - 1, first_batch=1, first_head=4)
    found = dropout.random_bits(
        torch.empty(2, 3), [range(5, 7), range(90, 92)], [range(10**6, 10**6 + 3)]
    )
    multiplier, increment, key = (splitmix64(2**63 - 1, stream) for stream in range(3))
    for bits, stream in zip(found, (multiplier, increment), strict=False):
        for batch in range(2):
            for head in range(3):
                of_head = splitmix64(splitmix64(stream, 1 + batch), 4 + head)
                expected = [splitmix64(of_head, row) for row in (5, 6, 90, 91)]
                assert [number % 2**64 for number in bits[batch, head].tolist()] == expected
    expected = [splitmix64(key, token) for token in range(10**6, 10**6 + 3)]
    assert [number % 2**64 for number in found.key.tolist()] == expected


def test_without_a_seed_pytorch_draws_one():
    tensors = [torch.randn(1, 2, 50, 16) for _ in range(3)]
    torch.manual_seed(3)
    first, second = (cqs.attention(*tensors, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(cqs.attention(*tensors, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert torch.equal(cqs.attention(*tensors, dropout_p=0.0, seed=4), cqs.attention(*tensors))


@pytest.mark.slow
def test_verify_knows_which_pairs_were_dropped():
    problem = replace(RAGGED.make(), dropout=Dropout(0.5, 2))
    answer = Partial(*attend(problem, num_tasks=7, dropout_p=0.5, seed=2))
    verify_rows(problem, answer)
    with pytest.raises(VerificationError):
        verify_rows(replace(problem, dropout=Dropout(0.5, 1)), answer)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.97])
def test_pairs_are_dropped_as_if_by_chance(probability):
    """Frequencies of whole, rows, columns and neighbours within 5 standard deviations."""
    like = torch.empty(2, 3, 0, 0)
    dropout = Dropout(probability, 7)
    kept = dropout.kept(dropout.random_bits(like, [range(512)], [range(10**6, 10**6 + 512)]))
    dropped = (~kept).double()

    def check(observed, expected, trials):
        deviation = (expected * (1 - expected) / trials) ** 0.5
        assert ((observed - expected).abs() < 5 * deviation + 1e-12).all()

    check(dropped.mean(), probability, dropped.numel())
    for dims in ((3,), (2,), (2, 3), (0, 1)):
        trials = dropped.numel() // dropped.mean(dims).numel()
        if trials * probability * (1 - probability) > 100:
            check(dropped.mean(dims), probability, trials)
    both = probability**2
    for shift in (1, 2, 3, 64):
        for dim in (2, 3):
            pairs = dropped.narrow(dim, shift, 512 - shift) * dropped.narrow(dim, 0, 512 - shift)
            check(pairs.mean(), both, pairs.numel())
    check((dropped[:, 1:] * dropped[:, :-1]).mean(), both, dropped[:, 1:].numel())
    check((dropped[1:] * dropped[:-1]).mean(), both, dropped[1:].numel())
    rectangles = dropped[..., 1:, 1:] * dropped[..., :-1, 1:] * dropped[..., 1:, :-1]
    check((rectangles * dropped[..., :-1, :-1]).mean(), both**2, rectangles.numel())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_half_precision_on_a_gpu(head_dim, dtype):
    problem = Case("half", 777, 777, 8, 2, head_dim, is_causal=True).make(dtype, "cuda")
    output, _ = attend(problem, num_tasks=13, dropout_p=0.2, seed=9, verify=True)
    assert_as_defined(output, problem, dropout_p=0.2, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_few_pairs_kept_do_not_overflow(backend):
    """The scale of 83,333 exceeds what half precision holds; the results do not."""
    query, key = (torch.randn(1, 16, n, 16).half() for n in (128, 1))
    leaves = [t.requires_grad_() for t in (query, key, torch.full_like(key, 0.01))]
    if reason := BACKENDS[backend].why_not(*leaves):
        pytest.skip(reason)
    options = {"dropout_p": 1 - 1.2e-5, "seed": 0, "backend": backend}
    output = cqs.attention(*leaves, **options)
    found = torch.autograd.grad(output, leaves, torch.full_like(output, 1e-3))
    assert output.max() > 800 and all(t.isfinite().all() for t in (output, *found))
