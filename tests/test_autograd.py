"""Gradients against float64 autograd of the definition."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.exact import assert_tracks_exact
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cqs
from benchmarks.cases import CASES, Case, visible_mask
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
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
LOCAL = {
    "one-task": cqs.attention,
    "tasks": partial(cqs.attention, num_tasks=3, is_causal=True),
    "reference": partial(cqs.attention, backend="reference"),
    "flex": cqs.flex_attention,
    "streaming": partial(cqs.streaming.attention, memory_budget="1MiB", device="cpu"),
    "compiled": lambda *each: torch.compile(cqs.attention, backend="aot_eager")(*each),
}


def differentiate(problem, dtype, attend):
    """Output and gradients of ``attend`` for a fixed gradient of the output."""
    leaves = [
        tensor.to(dtype).detach().requires_grad_()
        for tensor in (problem.query, problem.key, problem.value)
    ]
    output = attend(replace(problem, query=leaves[0], key=leaves[1], value=leaves[2]))
    weights = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    # Rounded as the problem's tensors are: part of the question, not of the answer.
    output.backward(weights.to(problem.query.dtype).to(output))
    return output, [leaf.grad for leaf in leaves]


def definition(problem):
    group_size = problem.query.shape[1] // problem.key.shape[1]
    key, value = (t.repeat_interleave(group_size, 1) for t in (problem.key, problem.value))
    scores = problem.scale * problem.query @ key.mT
    if (mask := visible_mask(problem)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
        blind = ~mask.any(-1, keepdim=True)
        return (scores.masked_fill(blind, 0).softmax(-1) * ~blind) @ value
    return scores.softmax(-1) @ value


def split(num_tasks, **options):
    def attend(problem):
        tensors = problem.query, problem.key, problem.value
        own = {"is_causal": problem.is_causal, "scale": problem.scale, "num_tasks": num_tasks}
        return cqs.attention(*tensors, **own, **options)

    return attend


def assert_right(problem, attend):
    _, exact = differentiate(problem, torch.float64, definition)
    _, eager = differentiate(problem, problem.query.dtype, definition)
    _, found = differentiate(problem, problem.query.dtype, attend)
    for name, *each in zip(("query", "key", "value"), found, eager, exact, strict=True):
        assert each[0].dtype == problem.query.dtype
        if problem.query.dtype == torch.float64:
            torch.testing.assert_close(each[0], each[2])
        else:
            assert_tracks_exact(*each, slack=3.0, name=f"gradient of {name}")


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
    (backend, dtype, num_tasks)
    for backend, dtypes in (
        ("triton", (torch.float32, torch.float16, torch.bfloat16)),
        ("cudnn", (torch.float16, torch.bfloat16)),
        ("reference", (torch.float64,)),
    )
    for dtype in dtypes
    for num_tasks in (1, 4)
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
    assert_right(problem, split(num_tasks, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_gradients_with_scales_that_are_not_positive(scale, backend):
    problem = replace(BY_NAME["ragged-causal"].make(), scale=scale)
    assert_right(problem, split(3, backend=backend))


@pytest.mark.slow
def test_gradcheck():
    problem = replace(CASES[0], seqlen_q=6, seqlen_kv=9, num_heads=2, num_kv_heads=1, head_dim=3)
    problem = replace(problem, is_causal=True).make(torch.float64)
    leaves = [t.requires_grad_() for t in (problem.query, problem.key, problem.value)]

    def attend(*tensors):
        return cqs.attention(*tensors, is_causal=True, num_tasks=4)

    assert torch.autograd.gradcheck(attend, leaves)


def test_two_runs_are_bitwise_identical():
    problem = BY_NAME["gqa-causal"].make()
    for backend in ("cpu", "triton"):
        first, second = (
            differentiate(problem, torch.float32, split(7, backend=backend)) for _ in range(2)
        )
        assert torch.equal(first[0], second[0]) and all(map(torch.equal, first[1], second[1]))


def test_gradients_of_all_tasks_together_are_those_of_one_task():
    problem, executor = BY_NAME["gqa-causal"].make(), LocalExecutor()
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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_give_the_same_gradients(use_reentrant):
    tensors = [torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3)]

    def compute(*tensors):
        return cqs.attention(*(2 * tensor for tensor in tensors), num_tasks=3).square().sum()

    expected = torch.autograd.grad(compute(*tensors), tensors)
    checkpoint(compute, *tensors, use_reentrant=use_reentrant).backward()
    for tensor, gradient in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_tasks": 7},
        {"num_tasks": 7, "pattern": strided(5)},
        {"num_tasks": 7, "dropout_p": 0.2},
        {"num_tasks": 7, "pattern": per_head([[causal(), strided(5)]])},
    ],
    ids=str,
)
def test_a_finished_call_keeps_no_tensor(options):
    assert kept_without_a_collection(**options) == []


@pytest.mark.slow
@pytest.mark.parametrize("needs_gradients", [False, True])
def test_a_finished_call_within_a_budget_keeps_no_tensor(needs_gradients):
    options = {"memory_budget": 2**20, "device": "cpu"}
    assert kept_without_a_collection(cqs.streaming.attention, needs_gradients, **options) == []


@pytest.mark.ray
def test_a_finished_call_of_a_cluster_keeps_no_tensor(cluster):
    assert kept_without_a_collection(num_tasks=7, executor=cluster) == []


def kept_without_a_collection(attention=cqs.attention, needs_gradients=True, **options):
    """Return which tensors of a finished call still exist before a collection."""
    gc.collect()
    gc.disable()
    try:
        tensors = [torch.randn(1, 2, 40, 8, requires_grad=needs_gradients) for _ in range(3)]
        output = attention(*tensors, **options)
        if needs_gradients:
            output.sum().backward()
        kept = [weakref.ref(tensor) for tensor in (*tensors, output)]
        del tensors, output
        return [name for name, tensor in zip("qkvo", kept, strict=True) if tensor() is not None]
    finally:
        gc.enable()


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


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(shape):
    query = torch.randn(1, 2, shape[0], 8, requires_grad=True)
    key, value = (torch.randn(1, 2, shape[1], 8, requires_grad=True) for _ in range(2))
    cqs.attention(query, key, value, num_tasks=3).sum().backward()
    assert (query.grad == 0).all() and (key.grad == 0).all() and (value.grad == 0).all()


@pytest.mark.ray
def test_a_cluster_computes_in_inference_mode(cluster):
    problem = BY_NAME["full"].make()
    tensors = problem.query, problem.key, problem.value
    expected = cqs.attention(*tensors, num_tasks=3, executor=cluster)
    with torch.inference_mode():
        for verify in (False, True):
            output = cqs.attention(*tensors, num_tasks=3, executor=cluster, verify=verify)
            assert torch.equal(output, expected) and output.is_inference()
