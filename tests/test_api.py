import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support.exact import attend
from support.frames import count_frames
from support.layouts import LAYOUTS

import cqs
from benchmarks.cases import CASES, Case
from cqs.patterns import sliding_window

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
BY_NAME = {case.name: case for case in CASES}
RAGGED = (
    Case("square", 97, 97, num_heads=2, num_kv_heads=2, batch=2),
    Case("gqa", 83, 83, num_heads=6, num_kv_heads=2, head_dim=8),
    Case("few-queries", 29, 90, num_heads=2, num_kv_heads=1),
    Case("many-queries", 90, 29, num_heads=2, num_kv_heads=1),
)


@pytest.mark.sample(5)
@KINDS
@pytest.mark.parametrize("num_tasks", range(1, 33))
def test_the_answer_is_exact_for_every_number_of_workers(assert_right, num_tasks, is_causal):
    for case in RAGGED:
        problem = replace(case, is_causal=is_causal).make(DTYPES[num_tasks % 4])
        assert_right(problem, attend(problem, num_tasks=num_tasks))


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("num_tasks", [1, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_exact(assert_right, case, num_tasks, backend):
    problem = case.make()
    assert_right(problem, attend(problem, num_tasks=num_tasks, backend=backend))


def inside_a_larger_tensor(tensor):
    return torch.nn.functional.pad(tensor, (3, 2, 5, 1))[:, :, 5:-1, 3:-2]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), inside_a_larger_tensor])
def test_strides_do_not_matter(assert_right, layout, dtype, is_causal):
    problem = replace(BY_NAME["ragged"], is_causal=is_causal).make(dtype)
    tensors = {name: layout(getattr(problem, name)) for name in ("query", "key", "value")}
    other = replace(problem, **tensors)
    assert not other.query.is_contiguous() and torch.equal(other.query, problem.query)
    for num_tasks in (1, 7, 8):
        answer = attend(other, num_tasks=num_tasks)
        assert_right(problem, answer)
        torch.testing.assert_close(answer, attend(problem, num_tasks=num_tasks))


@KINDS
@pytest.mark.parametrize("sizes", [(0, 9, 9), (2, 0, 0), (2, 0, 9), (2, 9, 0), (0, 0, 0)], ids=str)
def test_empty_tensors_give_empty_or_zero_answers(attention, sizes, is_causal):
    batch, seqlen_q, seqlen_kv = sizes
    query = torch.randn(batch, 2, seqlen_q, 4, requires_grad=True)
    key = torch.randn(batch, 1, seqlen_kv, 4, requires_grad=True)
    output, lse = attention(query, key, key, is_causal=is_causal, return_lse=True, verify=True)
    assert output.shape == query.shape and lse.shape == query.shape[:3]
    assert (output == 0).all() and (lse == -torch.inf).all()
    assert not any(each.any() for each in torch.autograd.grad(output.sum(), (query, key)))


def test_zeros_of_autograd_that_have_no_memory_are_zeros():
    query, key, value = torch.randn(3, 1, 2, 30, 8).unbind()
    zeros = torch._efficientzerotensor((1, 2, 30, 8))
    for num_tasks in (1, 3):
        output, lse = cqs.attention(query, zeros, value, num_tasks=num_tasks, return_lse=True)
        torch.testing.assert_close(output, value.mean(2, keepdim=True).expand_as(output))
        torch.testing.assert_close(lse, torch.full_like(lse, 30).log())
        assert not cqs.attention(query, key, zeros, num_tasks=num_tasks).any()


BUDGET = {"memory_budget": "1MiB"}


@pytest.fixture(
    params=["one call", "tasks", "budget", pytest.param("cluster", marks=pytest.mark.ray)]
)
def attention(request):
    if request.param == "cluster":
        return request.getfixturevalue("cluster").attention
    calls = {"one call": cqs.attention, "tasks": partial(cqs.attention, num_tasks=5)}
    calls["budget"] = partial(cqs.streaming.attention, **BUDGET)
    return calls[request.param]


@pytest.mark.parametrize("batches", [(3, 1, 3), (1, 3, 1), (1, 1, 3), (3, 1, 1), (0, 1, 1)])
def test_a_batch_of_one_is_that_of_the_others(batches, attention):
    shapes = zip(batches, (4, 2, 2), (20, 30, 30), strict=True)
    tensors = [torch.randn(*shape, 8, requires_grad=True) for shape in shapes]
    whole = [tensor.expand(min(batches) and 3, -1, -1, -1) for tensor in tensors]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, enable_gqa=True)
    output = attention(*tensors)
    torch.testing.assert_close(output, expected)
    grad_output = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, tensors, grad_output),
        torch.autograd.grad(expected, tensors, grad_output),
    )


def test_files_have_the_batch_of_the_others(tmp_path):
    query, key, value = (torch.randn(batch, 2, 30, 8) for batch in (3, 1, 3))
    np.save(tmp_path / "key.npy", key.numpy())
    mapped = np.load(tmp_path / "key.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"key must .* \[3, 2, 30, 8\] .* got \[1, 2, 30, 8\]"):
        cqs.streaming.attention(query, mapped, value, **BUDGET)


def test_without_a_head_dim_all_keys_weigh_alike(attention):
    tensors = [torch.randn(2, 4, 10, dim, requires_grad=True) for dim in (0, 0, 32)]
    output = attention(*tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), tensors),
    )


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, (20, 10)),
        ({"num_tasks": 7}, (340, 20)),
        ({"pattern": sliding_window(32, 32)}, (22, 10)),
    ],
    ids=str,
)
def test_a_repeated_call_enters_few_functions(monkeypatch, options, most):
    """A pattern in a short call is a mask, which is made once."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # in an uncompiled program
    attend = partial(cqs.attention, *(torch.randn(1, 4, 128, 64) for _ in range(3)), **options)
    attend()
    frames, files = count_frames(attend)
    assert frames <= most[0] and files <= most[1]
