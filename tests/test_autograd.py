"""Gradients against float64 autograd of the definition."""

import random
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from score_cases import Drawn, assert_tracks_definition, compute_by
from support.references import kept_without_a_collection
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cqs
from benchmarks.cases import CASES, Case
from cqs.executors.contract import Planned
from cqs.executors.local import LocalExecutor
from cqs.partial import Partial, merge_partials
from cqs.patterns import causal, per_head, strided

BY_NAME = {case.name: case for case in CASES}
SHAPES = (
    Case("ragged", 131, 131, 2, 2),
    Case("ragged-causal", 131, 131, 2, 2, is_causal=True),
    Case("gqa-causal", 67, 67, 6, 2, batch=2, is_causal=True),
    Case("cross", 75, 150, 2, 2, batch=2),
    Case("cross-causal", 75, 150, 2, 2, is_causal=True),
    Case("more-queries-causal", 150, 75, 2, 2, is_causal=True),
)
SMALL = Case("small", 50, 50, 4, 2, is_causal=True)
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
LOCAL = {
    "one-task": cqs.attention,
    "tasks": partial(cqs.attention, num_tasks=3, is_causal=True),
    "reference": partial(cqs.attention, backend="reference"),
    "flex": cqs.flex_attention,
    "streaming": partial(cqs.streaming.attention, memory_budget="1MiB", device="cpu"),
    "compiled": lambda *each: torch.compile(cqs.attention, backend="aot_eager")(*each),
}


def compute(problem, **options):
    """Output, LSE and gradients."""
    return compute_by(cqs.attention, problem, Drawn(problem, random.Random(0)), **options)


def assert_right(problem, **options):
    output, _, *gradients = compute(problem, **options)
    assert all(each.dtype == problem.query.dtype for each in gradients)
    found = output, None, *gradients
    assert_tracks_definition(found, problem, Drawn(problem, random.Random(0)), slack=3)


CPU = [
    ("reference", torch.float64, 1),
    ("reference", torch.bfloat16, 4),
    ("cpu", torch.float32, 1),
    ("cpu", torch.float32, 7),
    ("cpu", torch.float16, 4),
    ("triton", torch.float32, 4),
    ("triton", torch.float16, 1),
]
CUDA = [
    *product(["triton"], [torch.float32, torch.float16, torch.bfloat16], [1, 4]),
    *product(["cudnn"], [torch.float16, torch.bfloat16], [1, 4]),
    *product(["reference"], [torch.float64], [1, 4]),
]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("device", "backend", "dtype", "num_tasks"),
    [
        *(("cpu", *each) for each in CPU),
        *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in CUDA),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_gradients_are_right(case, device, backend, dtype, num_tasks):
    problem = case.make(dtype, device)
    assert_right(problem, num_tasks=num_tasks, backend=backend)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_gradients_with_scales_that_are_not_positive(scale, backend):
    problem = replace(BY_NAME["ragged-causal"].make(), scale=scale)
    assert_right(problem, num_tasks=3, backend=backend)


def test_two_runs_are_bitwise_identical():
    problem = SMALL.make()
    for backend in ("cpu", "triton"):
        first, second = (compute(problem, num_tasks=7, backend=backend) for _ in range(2))
        assert all(map(torch.equal, first, second))


def test_gradients_of_all_tasks_together_are_those_of_one_task():
    problem, executor = SMALL.make(), LocalExecutor()
    one, seven = (Planned(problem, problem.make_plan(number), "triton") for number in (1, 7))
    answer, grad_output = executor.run(one), torch.randn_like(problem.query)
    found = [executor.run_backward(part, answer, grad_output) for part in (one, seven)]
    assert all(map(torch.equal, *found))


def test_only_what_needs_a_gradient_gets_one():
    problem = BY_NAME["full"].make()
    query = problem.query.requires_grad_()
    output, lse = cqs.attention(
        query, problem.key, problem.value, num_tasks=3, return_lse=True, verify=True
    )
    assert output.requires_grad and not lse.requires_grad
    output.sum().backward()
    assert query.grad is not None and problem.key.grad is None
    with torch.no_grad():
        assert not cqs.attention(query, problem.key, problem.value).requires_grad


def test_a_second_derivative_is_refused():
    problem = BY_NAME["full"].make()
    query = problem.query.requires_grad_()
    output = cqs.attention(query, problem.key, problem.value)
    for loss in (output.sum(), output.square().sum()):
        with pytest.raises(NotImplementedError, match="only once: leave out create_graph=True"):
            torch.autograd.grad(loss, query, create_graph=True, retain_graph=True)
    assert not torch.autograd.grad(output.sum(), query)[0].requires_grad


def test_a_reentrant_checkpoint_gives_the_same_gradients():
    tensors = [torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3)]
    attend = partial(cqs.attention, num_tasks=3)
    expected = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    checkpoint(attend, *tensors, use_reentrant=True).square().sum().backward()
    assert all(map(torch.equal, [tensor.grad for tensor in tensors], expected))


def test_checkpoints_let_go_of_operands():
    tensor = torch.randn(1, 2, 30, 8, requires_grad=True)
    kept = []

    def compute(tensor):
        query = 2 * tensor
        kept.append(weakref.ref(query))
        return cqs.attention(query, tensor, tensor)

    output = checkpoint(compute, tensor, use_reentrant=False)
    assert kept[0]() is None
    output.sum().backward()


@pytest.mark.sample(9)
@pytest.mark.slow
@pytest.mark.parametrize("needs_gradients", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        cqs.attention,
        partial(cqs.attention, num_tasks=7),
        partial(cqs.attention, num_tasks=7, pattern=strided(5)),
        partial(cqs.attention, num_tasks=7, dropout_p=0.2),
        partial(cqs.attention, num_tasks=7, pattern=per_head([[causal(), strided(5)]])),
        partial(cqs.streaming.attention, memory_budget=2**20, device="cpu"),
    ],
    ids=range(6),
)
def test_a_finished_call_keeps_no_tensor(attention, needs_gradients):
    assert kept_without_a_collection(finish_call, attention, needs_gradients) == []


@pytest.mark.ray
def test_a_finished_call_of_a_cluster_keeps_no_tensor(cluster):
    attention = partial(cluster.attention, num_tasks=7)
    assert kept_without_a_collection(finish_call, attention) == []


def finish_call(attention, needs_gradients=True):
    """Return the tensors of a call and of its backward pass."""
    tensors = [torch.randn(1, 2, 40, 8, requires_grad=needs_gradients) for _ in range(3)]
    output = attention(*tensors)
    if needs_gradients:
        output.sum().backward()
    return dict(zip("qkvo", (*tensors, output), strict=True))


def test_autocast_leaves_patterns_by_head_alone():
    tensors = [torch.randn(2, 2, 8, 4, dtype=torch.float16) for _ in range(3)]
    pattern = per_head([[strided(3)], [causal()]])
    expected = cqs.attention(*(each.bfloat16() for each in tensors), pattern=pattern)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cqs.attention(*tensors, pattern=pattern), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Converting a tensor")
@pytest.mark.parametrize(
    "attend",
    [
        *(each for name, each in LOCAL.items() if name != "compiled"),
        partial(cqs.attention, scale=0.25),
        cqs.distributed.attention,
        cqs.distributed.prepare,
        lambda *each: cqs.Cluster.attention(None, *each),
        lambda *each: cqs.Cluster.submit(None, *each),
        lambda *each: merge_partials([Partial(one, one[..., 0]) for one in each]),
        lambda *each: merge_partials(
            [Partial(one.repeat(1, 1, 410, 1), one[..., 0].repeat(1, 1, 410)) for one in each]
        ),
    ],
)
@pytest.mark.parametrize("has_mode", [False, True])
def test_traces_of_torch_jit_are_refused(attend, has_mode):
    def call(*tensors):
        with FlopCounterMode(display=False) if has_mode else nullcontext():
            return attend(*tensors)

    with pytest.raises(NotImplementedError, match="must not be called in torch.jit.trace"):
        torch.jit.trace(call, [torch.randn(1, 2, 20, 8) for _ in range(3)])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_other_derivatives_are_refused():
    query = torch.randn(2, 1, 2, 30, 8)
    with pytest.raises(NotImplementedError, match="query must .* torch.func.vmap"):
        torch.func.vmap(lambda each: cqs.attention(each, each, each, num_tasks=2))(query)
    query = query[0]
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="key must not have a tangent"),
    ):
        cqs.attention(query, forward_ad.make_dual(query, query), query)


@pytest.mark.parametrize("attend", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("dtypes", [(F32, F32, BF16), (F32,) * 3, (F16,) * 3, (F64,) * 3])
def test_autocast_casts_what_it_casts_for_sdpa(attend, dtypes):
    leaves = [torch.randn(1, 2, 20, 8, dtype=each, requires_grad=True) for each in dtypes]
    with torch.autocast("cpu", BF16):
        dtype = torch.nn.functional.scaled_dot_product_attention(*leaves).dtype
        found = attend(*leaves)
        with torch.autocast("cpu", enabled=False):
            expected = attend(*(each.to(dtype) for each in leaves))
    assert found.dtype == dtype and torch.equal(found, expected)
    gradients = [torch.autograd.grad(each.sum(), leaves) for each in (found, expected)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.ray
def test_a_cluster_computes_in_inference_mode(cluster):
    problem = BY_NAME["full"].make()
    tensors = problem.query, problem.key, problem.value
    expected = cluster.attention(*tensors, num_tasks=3)
    with torch.inference_mode():
        for verify in (False, True):
            output = cluster.attention(*tensors, num_tasks=3, verify=verify)
            assert torch.equal(output, expected) and output.is_inference()
