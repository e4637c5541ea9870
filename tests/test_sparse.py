"""Attention with patterns: every pair that a pattern names once, and no other."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import cqs
from cqs.cases import Case
from cqs.partial import Partial
from cqs.patterns import (
    acsr,
    bigbird,
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    global_tokens,
    longformer,
    per_head,
    sliding_window,
    strided,
)
from cqs.problem import check_problem
from cqs.testing import assert_tracks_exact, attend, eager_output, exact_answer
from cqs.tiler import Tiler
from cqs.worker import WHY_NOT, HeldTokens, Worker

NUM_WORKERS = [1, 2, 3, 4, 7, 8, 13]
EVERY_NUMBER = pytest.mark.parametrize("num_workers", NUM_WORKERS)


def random_bits(*shape, share=0.3):
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < share


PATTERNS = {
    "causal-window": sliding_window(40, 0),
    "window": sliding_window(9, 23),
    "ahead": sliding_window(0, None),
    "dilated": dilated(5, 3, 4),
    "strided": strided(8),
    "strided-ragged": strided(7),
    "fixed": fixed(16, 3),
    "fixed-wide": fixed(50, 2),
    "block-diagonal": block_diagonal(20),
    "global": global_tokens([0, 3, 70]),
    "longformer": longformer(30, 5),
    "bigbird": bigbird(block=16, window_blocks=3, global_blocks=1, random_blocks=2, seed=3),
    "documents": documents([0, 31, 40, 41, 110]),
    "documents-both-ways": documents([0, 31, 40, 41, 110], is_causal=False),
    "union": dilated(3, 0, 8) | sliding_window(4, 0),
    "difference": causal() - sliding_window(12, 0),
    "nothing": sliding_window(0, 0) - sliding_window(0, 0),
}
FOR_LENGTHS = {
    "block-sparse": lambda q, k: block_sparse(random_bits(-(-q // 16), -(-k // 16)), 16),
    "mask": lambda q, k: from_mask(random_bits(q, k)),
    "mostly-blind": lambda q, k: from_mask(random_bits(q, k, share=0.01)),
    "acsr": lambda q, k: acsr([i // 3 for i in range(q)], [2] * q, [k // 8] * q),
}
"""For sequences of given lengths only."""
EVERY_PATTERN = pytest.mark.parametrize("name", [*PATTERNS, *FOR_LENGTHS])
CASES = {
    "square": Case("square", 131, 131, num_heads=2, num_kv_heads=2, batch=2),
    "gqa": Case("gqa", 128, 128, num_heads=4, num_kv_heads=2),
    "few-queries": Case("few-queries", 70, 131, num_heads=2, num_kv_heads=1),
    "many-queries": Case("many-queries", 131, 70, num_heads=2, num_kv_heads=1),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def with_pattern(case, name):
    lengths = case.seqlen_q, case.seqlen_kv
    pattern = PATTERNS[name] if name in PATTERNS else FOR_LENGTHS[name](*lengths)
    return replace(case, pattern=pattern)


def run_tasks(problem, num_workers, backend):
    """Every task on its own, from what it must hold, into the tiler."""
    plan = problem.make_plan(num_workers)
    plan.validate()
    worker = Worker.of(problem, backend)
    tiler = Tiler(plan, *problem.empty_answer())
    for task in plan.tasks:
        held = [
            HeldTokens((r, tensor[:, :, r.start : r.stop]) for r in ranges)
            for tensor, ranges in (
                (problem.query, task.held_queries),
                (problem.key, task.held_keys),
                (problem.value, task.held_keys),
            )
        ]
        tiler.add(task.worker, worker.run(task, *held) if task.steps else [])
    return tiler.finish()


def gradients(problem, output_of):
    tensors = [t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value)]
    output = output_of(*tensors)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(output, tensors, grad.to(output))


def assert_gradients_right(problem, **options):
    def of(problem, function):
        def output_of(*tensors):
            query, key, value = tensors
            return function(replace(problem, query=query, key=key, value=value))

        return gradients(problem, output_of)

    wide = replace(problem, **{n: getattr(problem, n).double() for n in ("query", "key", "value")})
    actual = of(problem, lambda problem: attend(problem, **options)[0])
    eager = of(problem, eager_output)
    exact = of(wide, lambda problem: exact_answer(problem).output)
    names = "grad_query", "grad_key", "grad_value"
    for name, *found in zip(names, actual, eager, exact, strict=True):
        assert_tracks_exact(*found, slack=4, name=name)


@EVERY_PATTERN
@EVERY_CASE
@EVERY_NUMBER
def test_patterns_are_exact(assert_right, num_workers, case, name):
    problem = with_pattern(case, name).make()
    assert_right(problem, attend(problem, num_workers=num_workers, verify=True))


@EVERY_PATTERN
@EVERY_CASE
@pytest.mark.parametrize("num_workers", [1, 4, 7])
def test_gradients_of_patterns_are_exact(num_workers, case, name):
    assert_gradients_right(with_pattern(case, name).make(), num_workers=num_workers)


ON_DEVICES = pytest.mark.parametrize(
    ("device", "dtype", "tokens"),
    [
        ("cpu", torch.float32, 128),
        pytest.param("cuda", torch.float32, 1000, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1000, marks=pytest.mark.gpu),
    ],
)


@ON_DEVICES
@EVERY_NUMBER
@EVERY_PATTERN
@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_every_live_pair_is_computed_once(backend, name, num_workers, device, dtype, tokens):
    """With zero scores and one-hot values the output counts how often pairs were computed.

    Keys 128 apart share a column.
    """
    case = with_pattern(Case("count", tokens - 8, tokens, 1, 1), name)
    key = torch.zeros(1, 1, tokens, 128, device=device, dtype=dtype)
    columns = torch.eye(128, device=device, dtype=dtype).repeat(-(-tokens // 128), 1)[:tokens]
    tensors = key[:, :, 8:], key, columns.expand_as(key)
    problem = check_problem(*tensors, pattern=case.pattern)
    if reason := WHY_NOT[backend](*tensors):
        pytest.skip(reason)
    live = torch.from_numpy(case.pattern.to_mask(tokens - 8, tokens)).to(device, torch.float32)
    options = {"num_workers": num_workers, "backend": backend, "return_lse": True}
    together = cqs.attention(*tensors, pattern=case.pattern, **options)
    for answer in (run_tasks(problem, num_workers, backend), Partial(*together)):
        number = answer.lse.exp().unsqueeze(-1)
        torch.testing.assert_close(number.squeeze(), live.sum(-1), rtol=1e-5, atol=1e-5)
        counts = answer.output.float() * number
        assert (counts - live @ columns.float()).abs().max() < (
            0.3 if dtype.itemsize == 2 else 0.01
        )


@pytest.mark.gpu
@EVERY_PATTERN
@pytest.mark.parametrize("num_workers", [1, 4, 7])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (64, torch.float16), (96, torch.bfloat16), (32, torch.float32)],
    ids=str,
)
def test_patterns_are_exact_on_gpus(assert_right, head_dim, dtype, num_workers, name):
    for case in (
        Case("gqa", 1100, 1100, 4, 2, head_dim, batch=2),
        Case("few-queries", 500, 900, 2, 1, head_dim),
    ):
        problem = with_pattern(case, name).make(dtype, "cuda")
        assert_right(problem, attend(problem, num_workers=num_workers, verify=True))
        assert_right(problem, run_tasks(problem, num_workers, None))
        assert_gradients_right(problem, num_workers=num_workers)


@EVERY_PATTERN
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_patterns_are_exact_in_every_dtype(assert_right, dtype, name):
    problem = with_pattern(CASES["gqa"], name).make(dtype)
    assert_right(problem, attend(problem, num_workers=4))
    assert_gradients_right(problem, num_workers=4)


@EVERY_PATTERN
@EVERY_CASE
def test_patterns_go_with_is_causal(assert_right, case, name):
    case = with_pattern(case, name)
    options = {"pattern": case.pattern, "is_causal": True}
    problem = case.make()
    tensors = problem.query, problem.key, problem.value
    expected = check_problem(*tensors, pattern=case.pattern & causal())
    answer = cqs.attention(*tensors, **options, num_workers=7, return_lse=True)
    assert_right(expected, answer)


@EVERY_PATTERN
@pytest.mark.parametrize("num_workers", [1, 7])
def test_the_plain_kernels_take_patterns(assert_right, num_workers, name):
    problem = with_pattern(CASES["gqa"], name).make()
    if reason := WHY_NOT["triton"](problem.query, problem.key, problem.value):
        pytest.skip(reason)
    assert_right(problem, attend(problem, num_workers=num_workers, backend="triton"))
    assert_right(problem, run_tasks(problem, num_workers, "triton"))
    assert_gradients_right(problem, num_workers=num_workers, backend="triton")


PER_HEAD = {
    "layouts": lambda: block_sparse(random_bits(4, 9, 9), 16),
    "masks": lambda: from_mask(random_bits(2, 1, 131, 131)),
    "both": lambda: from_mask(random_bits(2, 4, 131, 131)),
    "mixed": lambda: per_head([[strided(4), fixed(8, 1), sliding_window(20, 0), causal()]]),
}


@pytest.mark.parametrize("make", PER_HEAD.values(), ids=PER_HEAD)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_may_have_patterns_of_their_own(assert_right, num_kv_heads, make):
    case = Case("heads", 131, 131, 4, num_kv_heads, batch=2, pattern=make())
    problem = case.make()
    assert_right(problem, attend(problem, num_workers=4, verify=True))
    assert_gradients_right(problem, num_workers=3)


@pytest.mark.parametrize("name", ["window", "strided", "fixed", "longformer", "mask"])
def test_dropout_of_a_pattern_does_not_depend_on_the_split(name):
    case = with_pattern(CASES["gqa"], name)
    problem = case.make()
    tensors = problem.query, problem.key, problem.value
    compute = partial(
        cqs.attention, *tensors, pattern=case.pattern, dropout_p=0.3, seed=5, verify=True
    )
    whole = compute(num_workers=1, backend="reference")
    torch.testing.assert_close(compute(num_workers=7), whole)
    if WHY_NOT["triton"](*tensors) is None:
        torch.testing.assert_close(compute(num_workers=4, backend="triton"), whole)


def test_dropout_of_a_head_does_not_depend_on_the_patterns_of_others():
    case = Case("heads", 64, 64, 4, 2, batch=2, pattern=block_sparse(random_bits(4, 4, 4), 16))
    problem = case.make()
    tensors = problem.query, problem.key, problem.value
    compute = partial(cqs.attention, *tensors, dropout_p=0.3, seed=5)
    whole = compute(pattern=per_head([[case.pattern.head(0, 1)]]))
    torch.testing.assert_close(compute(pattern=case.pattern)[:, 1], whole[:, 1])


def test_what_sees_everything_is_no_pattern():
    problem = CASES["square"].make()
    tensors = problem.query, problem.key, problem.value
    assert check_problem(*tensors, pattern=sliding_window(None, None)) == check_problem(*tensors)
    assert check_problem(*tensors, pattern=causal()).is_causal


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_backends_that_cannot_hide_say_so(backend):
    problem = with_pattern(CASES["square"], "window").make()
    with pytest.raises(NotImplementedError, match="cannot hide what a pattern hides"):
        attend(problem, backend=backend)


def test_patterns_that_do_not_fit_are_refused():
    problem = CASES["square"].make()
    tensors = problem.query, problem.key, problem.value
    for pattern, error, message in (
        (from_mask(random_bits(5, 5)), ValueError, "is for those lengths"),
        (block_sparse(random_bits(3, 9, 9), 16), ValueError, "needs num_heads 3"),
        (torch.ones(131, 131, dtype=torch.bool), TypeError, "pattern must be of cqs.patterns"),
        ("causal", TypeError, "pattern must be of cqs.patterns"),
        (dilated(9, 9, 4) & dilated(9, 9, 5), NotImplementedError, "different steps"),
    ):
        with pytest.raises(error, match=message):
            cqs.attention(*tensors, pattern=pattern)
