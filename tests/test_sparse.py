"""Attention with patterns: every pair that a pattern names once, and no other.

Where a full product of patterns, numbers of workers, shapes and dtypes would take long, one of them
goes round with the others: ``turn`` says how, and every value meets every pattern or every number
of workers.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from programs import complaint
from sparse_cases import NAMES, assert_gradients_right, random_bits, with_pattern
from support.exact import attend

import cqs
from benchmarks.cases import Case
from cqs.partial import Partial
from cqs.patterns import (
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    per_head,
    sliding_window,
    strided,
)
from cqs.problem import check_problem
from cqs.tiler import Tiler
from cqs.worker import BACKENDS, HeldTokens, Worker
from cqs.worker.calls import Call

NUM_TASKS = [1, 2, 3, 4, 7, 8, 13]
EVERY_PATTERN = pytest.mark.parametrize("name", NAMES)
CASES = {
    "square": Case("square", 131, 131, num_heads=2, num_kv_heads=2, batch=2),
    "gqa": Case("gqa", 128, 128, num_heads=4, num_kv_heads=2),
    "few-queries": Case("few-queries", 70, 131, num_heads=2, num_kv_heads=1),
    "many-queries": Case("many-queries", 131, 70, num_heads=2, num_kv_heads=1),
}
ON_GPUS = {
    "gqa": Case("gqa", 1100, 1100, num_heads=4, num_kv_heads=2, batch=2),
    "few-queries": Case("few-queries", 500, 900, num_heads=2, num_kv_heads=1),
}


def turn(values, *places):
    """Go round: the value whose turn it is at these places of the other parameters."""
    values = list(values)
    return values[sum(places) % len(values)]


def run_tasks(problem, num_tasks, backend):
    """Every task on its own, from what it must hold, into the tiler."""
    plan = problem.make_plan(num_tasks)
    plan.validate()
    worker = Worker.of(problem, backend)
    tiler = Tiler(plan, *problem.empty_answer())
    for task in plan.tasks:
        held = [
            HeldTokens(None, ranges, [tensor[:, :, r.start : r.stop] for r in ranges])
            for tensor, ranges in (
                (problem.query, task.held_queries),
                (problem.key, task.held_keys),
                (problem.value, task.held_keys),
            )
        ]
        tiler.add(task.index, worker.run_steps(task.steps, *held) if task.steps else [])
    return tiler.finish()


@pytest.mark.sample(3)
@pytest.mark.slow
@EVERY_PATTERN
@pytest.mark.parametrize("num_tasks", [1, 4, 7])
def test_gradients_of_patterns_are_exact(assert_right, num_tasks, name):
    """Shapes go round."""
    case = turn(CASES.values(), NAMES.index(name), num_tasks // 3)
    problem = with_pattern(case, name).make()
    assert_right(problem, attend(problem, num_tasks=num_tasks, verify=True))
    assert_gradients_right(problem, num_tasks=num_tasks)


JOINED = {
    "few-queries": (sliding_window(40, 0), 600, 700),
    "dilated": (dilated(60, 0, 4), 600, 600),
    "blocks": (block_diagonal(50), 600, 600),
    "strided": (strided(64), 1100, 1100),
}
"""Patterns and lengths with calls that are joined, and in the last one merged."""


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "seqlen_q", "seqlen_kv"), JOINED.values(), ids=JOINED)
def test_joined_calls_are_exact(monkeypatch, assert_right, pattern, seqlen_q, seqlen_kv):
    """A joined call has one query head of each group, and one element of the batch."""
    found, places = [], Call.places
    monkeypatch.setattr(Call, "places", lambda *args: found.append(args[0]) or places(*args))
    problem = Case("joined", seqlen_q, seqlen_kv, 4, 2, batch=2, pattern=pattern).make()
    assert_right(problem, attend(problem, backend="cpu"))
    assert any(call.number > 1 for call in found)
    assert_gradients_right(problem, backend="cpu")


def count_pairs(name, num_tasks, backend, dtype, device, tokens):
    """Count how often pairs are computed: with zero scores and one-hot values the output says it.

    Keys 128 apart share a column.
    """
    case = with_pattern(Case("count", tokens - 8, tokens, 1, 1), name)
    key = torch.zeros(1, 1, tokens, 128, device=device, dtype=dtype)
    columns = torch.eye(128, device=device, dtype=dtype).repeat(-(-tokens // 128), 1)[:tokens]
    tensors = key[:, :, 8:], key, columns.expand_as(key)
    problem = check_problem(*tensors, pattern=case.pattern)
    if reason := BACKENDS[backend].why_not(*tensors):
        pytest.skip(reason)
    live = torch.from_numpy(case.pattern.to_mask(tokens - 8, tokens)).to(device, torch.float32)
    options = {"num_tasks": num_tasks, "backend": backend, "return_lse": True}
    together = cqs.attention(*tensors, pattern=case.pattern, **options)
    for answer in (run_tasks(problem, num_tasks, backend), Partial(*together)):
        number = answer.lse.exp().unsqueeze(-1)
        torch.testing.assert_close(number.squeeze(), live.sum(-1), rtol=1e-5, atol=1e-5)
        counts = answer.output.float() * number
        assert (counts - live @ columns.float()).abs().max() < (
            0.3 if dtype.itemsize == 2 else 0.01
        )


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("num_tasks", NUM_TASKS)
@EVERY_PATTERN
def test_every_live_pair_is_computed_once(name, num_tasks):
    """Backends go round."""
    backend = turn(["cpu", "reference", "triton"], NAMES.index(name), NUM_TASKS.index(num_tasks))
    tokens = 60 if backend == "triton" else 128  # Triton's interpreter is slow
    count_pairs(name, num_tasks, backend, torch.float32, "cpu", tokens)


@pytest.mark.gpu
@EVERY_PATTERN
@pytest.mark.parametrize("each", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_live_pair_is_computed_once_by_the_kernels(dtype, each, name):
    """Three numbers of workers for each pattern and dtype; every number meets both dtypes."""
    num_tasks = turn(NUM_TASKS, NAMES.index(name), 2 * each, dtype.itemsize)
    count_pairs(name, num_tasks, "triton", dtype, "cuda", 1000)


@pytest.mark.gpu
@EVERY_PATTERN
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (64, torch.float16), (96, torch.bfloat16), (32, torch.float32)],
    ids=str,
)
def test_patterns_are_exact_on_gpus(assert_right, head_dim, dtype, name):
    """Numbers of workers and shapes go round."""
    place, kind = NAMES.index(name), head_dim // 32
    case = replace(turn(ON_GPUS.values(), place // 3, kind // 2), head_dim=head_dim)
    num_tasks = turn([1, 4, 7], place, kind)
    problem = with_pattern(case, name).make(dtype, "cuda")
    assert_right(problem, attend(problem, num_tasks=num_tasks, verify=True))
    assert_right(problem, run_tasks(problem, num_tasks, None))
    assert_gradients_right(problem, num_tasks=num_tasks)


@EVERY_PATTERN
def test_patterns_go_with_is_causal(assert_right, name):
    """Shapes go round."""
    case = with_pattern(turn(CASES.values(), NAMES.index(name)), name)
    options = {"pattern": case.pattern, "is_causal": True}
    problem = case.make()
    tensors = problem.query, problem.key, problem.value
    expected = check_problem(*tensors, pattern=case.pattern & causal())
    answer = cqs.attention(*tensors, **options, num_tasks=7, return_lse=True)
    assert_right(expected, answer)


PER_HEAD = {
    "layouts": lambda: block_sparse(random_bits(4, 5, 5), 16),
    "masks": lambda: from_mask(random_bits(2, 1, 70, 70)),
    "both": lambda: from_mask(random_bits(2, 4, 70, 70)),
    "mixed": lambda: per_head([[strided(4), fixed(8, 1), sliding_window(20, 0), causal()]]),
    "runs": lambda: per_head([[strided(4), causal(), causal(), causal()], [causal()] * 4]),
}


@pytest.mark.parametrize("make", PER_HEAD.values(), ids=PER_HEAD)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_may_have_patterns_of_their_own(assert_right, num_kv_heads, make):
    case = Case("heads", 70, 70, 4, num_kv_heads, batch=2, pattern=make())
    problem = case.make()
    assert_right(problem, attend(problem, num_tasks=4, verify=True))
    assert_gradients_right(problem, num_tasks=3)


def test_neighbours_of_one_pattern_are_computed_together():
    pattern = per_head([[strided(4)] * 3 + [causal()] * 5])
    problem = Case("parts", 16, 16, 8, 4, pattern=pattern).make()
    heads = [(heads.start, heads.stop) for (_, heads), _ in problem.parts()]
    assert heads == [(0, 2), (2, 3), (3, 4), (4, 8)]


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
    assert check_problem(*tensors, pattern=sliding_window(None, None)).pattern is None
    assert check_problem(*tensors, pattern=causal()).is_causal


def test_patterns_that_do_not_fit_are_refused(ranks):
    problem = CASES["square"].make()
    tensors = problem.query, problem.key, problem.value
    for pattern, message in (
        (from_mask(random_bits(5, 5)), "requires lengths"),
        (block_sparse(random_bits(3, 9, 9), 16), "num_heads must be 3 .*, got"),
        (documents([0, 7, 150]), r"requires lengths \(150, 150\), got \(131, 131\): .* padding"),
    ):
        for call in (cqs.attention, partial(cqs.streaming.attention, memory_budget=10**6)):
            with pytest.raises(ValueError, match=message):
                call(*tensors, pattern=pattern)
    for error, text in ranks.run(2, complaint, 0, {}, {"pattern": documents([0, 7])}):
        assert error is ValueError and "requires lengths (7, 7), got (16, 16)" in text


def test_a_query_that_sees_nothing_may_be_nan():
    query, key, value = (torch.randn(1, 1, 64, 8) for _ in range(3))
    query[0, 0, 5] = torch.nan
    mask = np.ones((64, 64), dtype=bool)
    mask[5] = False
    value.requires_grad_()
    output, lse = cqs.attention(query, key, value, pattern=from_mask(mask), return_lse=True)
    assert (output[0, 0, 5] == 0).all() and lse[0, 0, 5] == -torch.inf
    assert output.isfinite().all()
    output.sum().backward()
    assert value.grad.isfinite().all()
