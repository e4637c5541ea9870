import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support.exact import attend, exact_answer

import cqs
from benchmarks.cases import CASES, Case
from cqs.patterns import causal, per_head, sliding_window
from cqs.problem import check_problem
from cqs.scheduler import Grid2D, Hosts, Quorums

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BY_NAME = {case.name: case for case in CASES}
RAGGED = {
    "square": Case("square", 97, 97, num_heads=2, num_kv_heads=2, batch=2),
    "gqa": Case("gqa", 83, 83, num_heads=6, num_kv_heads=2, head_dim=8),
    "few-queries": Case("few-queries", 29, 90, num_heads=2, num_kv_heads=1),
    "many-queries": Case("many-queries", 90, 29, num_heads=2, num_kv_heads=1),
}


@pytest.mark.sample(5)
@KINDS
@pytest.mark.parametrize("num_tasks", range(1, 33))
def test_the_answer_is_exact_for_every_number_of_workers(assert_right, num_tasks, is_causal):
    for case in RAGGED.values():
        problem = replace(case, is_causal=is_causal).make(list(DTYPES.values())[num_tasks % 4])
        assert_right(problem, attend(problem, num_tasks=num_tasks))


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("num_tasks", [1, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_exact(assert_right, case, num_tasks, backend):
    problem = case.make()
    assert_right(problem, attend(problem, num_tasks=num_tasks, backend=backend))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    ("dtype", "every_num_tasks"),
    [
        (torch.float32, range(1, 65, 3)),
        (torch.bfloat16, (1, 2, 7, 8, 31, 64)),
        (torch.float16, (1, 2, 7, 8, 31, 64)),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_the_error_does_not_grow_with_the_number_of_workers(dtype, every_num_tasks, is_causal):
    problem = Case("error", 257, 257, is_causal=is_causal).make(dtype)
    exact = exact_answer(problem).output
    outputs = [attend(problem, num_tasks=number)[0] for number in every_num_tasks]
    errors = [(output.double() - exact).abs().max() for output in outputs]
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert max(errors) <= 2 * errors[0] + rounding


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "plan", ["rows", "grid", Grid2D(6, 1), Hosts(Quorums(), 2), Hosts(Grid2D(3, 1), 2)], ids=str
)
def test_any_kind_of_plan_gives_the_exact_answer(assert_right, plan, is_causal):
    problem = Case("kinds", 50, 61, is_causal=is_causal).make(torch.float64)
    assert_right(problem, attend(problem, num_tasks=6, plan=plan))


LAYOUTS = {
    "seqlen-before-heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "heads-before-batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other-token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "every-other-element": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "columns-adjacent": lambda t: t.mT.contiguous().mT,
    "inside-a-larger-tensor": lambda t: torch.nn.functional.pad(t, (3, 2, 5, 1))[:, :, 5:-1, 3:-2],
}


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(assert_right, layout, dtype, is_causal):
    problem = replace(BY_NAME["ragged"], is_causal=is_causal).make(dtype)
    other = replace(
        problem,
        query=layout(problem.query),
        key=layout(problem.key),
        value=layout(problem.value),
    )
    assert not other.query.is_contiguous() and torch.equal(other.query, problem.query)
    for num_tasks in (1, 7, 8):
        answer = attend(other, num_tasks=num_tasks)
        assert_right(problem, answer)
        torch.testing.assert_close(answer, attend(problem, num_tasks=num_tasks))


def test_expanded_heads_and_batches_are_read_in_place():
    problem = BY_NAME["ragged"].make()
    query = problem.query[:1, :1].expand(2, 4, -1, -1)
    key = problem.key[:, :1].expand(-1, 4, -1, -1)
    value = problem.value[:1].expand(2, -1, -1, -1)
    expanded = replace(problem, query=query, key=key, value=value)
    dense = replace(
        problem, query=query.contiguous(), key=key.contiguous(), value=value.contiguous()
    )
    answers = attend(expanded, num_tasks=7), attend(dense, num_tasks=7)
    assert all(map(torch.equal, *answers))


@KINDS
@pytest.mark.parametrize("num_tasks", [1, 4, 7])
@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((0, 2, 9, 4), (0, 2, 9, 4)),
        ((2, 2, 0, 4), (2, 2, 0, 4)),
        ((2, 2, 0, 4), (2, 2, 9, 4)),
        ((2, 2, 9, 4), (2, 2, 0, 4)),
        ((0, 2, 0, 4), (0, 1, 0, 4)),
    ],
    ids=["batch", "seqlen", "queries", "keys", "everything"],
)
def test_empty_tensors_give_empty_or_zero_answers(query_shape, key_shape, num_tasks, is_causal):
    query, key = torch.randn(query_shape), torch.randn(key_shape)
    output, lse = cqs.attention(
        query, key, key, is_causal=is_causal, num_tasks=num_tasks, return_lse=True, verify=True
    )
    assert output.shape == query.shape and lse.shape == query.shape[:3]
    assert (output == 0).all() and (lse == -torch.inf).all()


@KINDS
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
@pytest.mark.parametrize("num_tasks", [1, 2, 7, 8])
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(num_tasks, sign, backend, is_causal):
    """Every score is 10000 (or all are -10000), so each output is the mean of what it sees."""
    value = torch.randn(1, 2, 60, 16)
    query, key = torch.full((2, 1, 2, 60, 16), 50.0)
    output, lse = cqs.attention(
        query,
        sign * key,
        value,
        is_causal=is_causal,
        scale=0.25,
        num_tasks=num_tasks,
        backend=backend,
        return_lse=True,
    )
    seen = torch.arange(1, 61.0) if is_causal else torch.full((60,), 60.0)
    total = value.cumsum(2) if is_causal else value.sum(2, keepdim=True).expand_as(value)
    relative = 8 * 1e4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        output, total / seen[:, None], rtol=0, atol=relative * value.abs().max().item()
    )
    expected = (sign * 1e4 + seen.double().log()).expand(lse.shape)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=relative)


@KINDS
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [0, 0.0, -1.3, 1, 2.5, 1e-6])
def test_the_scale_of_the_caller_is_used(assert_right, scale, backend, is_causal):
    problem = replace(BY_NAME["ragged"].make(), scale=scale, is_causal=is_causal)
    # The same scores with a positive scale, which eager PyTorch needs for its causal mask.
    sign = (scale > 0) - (scale < 0)
    same = replace(problem, query=sign * problem.query, scale=abs(scale) or 1.0)
    for num_tasks in (1, 7, 8):
        answer = attend(problem, num_tasks=num_tasks, backend=backend)
        assert_right(same, answer)
        if scale == 0 and not is_causal:
            mean = problem.value.mean(dim=2, keepdim=True).expand_as(problem.query)
            torch.testing.assert_close(answer[0], mean)


def test_the_default_scale_is_one_over_the_root_of_head_dim():
    query, key, value = torch.randn(3, 1, 2, 30, 25)
    given = cqs.attention(query, key, value, scale=0.2, num_tasks=3)
    assert torch.equal(cqs.attention(query, key, value, num_tasks=3), given)


def test_a_negation_that_pytorch_has_put_off_is_made():
    """Kernels read memory, where the sign is the other one."""
    negated = torch.complex(torch.zeros(1, 2, 10, 8), torch.randn(1, 2, 10, 8)).conj().imag
    problem = check_problem(*[negated] * 3)
    assert negated.is_neg() and torch.equal(problem.query, negated)
    assert not any(each.is_neg() for each in (problem.query, problem.key, problem.value))


def test_zeros_of_autograd_that_have_no_memory_are_zeros():
    query, key, value = torch.randn(3, 1, 2, 30, 8).unbind()
    zeros = torch._efficientzerotensor((1, 2, 30, 8))
    for num_tasks in (1, 3):
        output, lse = cqs.attention(query, zeros, value, num_tasks=num_tasks, return_lse=True)
        torch.testing.assert_close(output, value.mean(2, keepdim=True).expand_as(output))
        torch.testing.assert_close(lse, torch.full_like(lse, 30).log())
        assert not cqs.attention(query, key, zeros, num_tasks=num_tasks).any()


def test_the_lse_comes_only_when_asked_for():
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    alone = cqs.attention(query, key, value, num_tasks=3)
    output, lse = cqs.attention(query, key, value, num_tasks=3, return_lse=True)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, output)
    assert lse.shape == (1, 2, 30) and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("num_tasks", [1, 7, 8])
def test_every_run_is_bitwise_identical(num_tasks, dtype):
    problem = BY_NAME["ragged-causal"].make(dtype)
    first = attend(problem, num_tasks=num_tasks)
    for _ in range(3):
        assert all(map(torch.equal, attend(problem, num_tasks=num_tasks), first))


def test_tensors_that_require_gradients_are_taken_where_none_are_recorded():
    problem = BY_NAME["full"].make()
    expected = attend(problem, num_tasks=3)
    problem.query.requires_grad_()
    with torch.no_grad():
        answer = attend(problem, num_tasks=3)
    assert all(map(torch.equal, answer, expected)) and not answer[0].requires_grad


@pytest.mark.parametrize("num_tasks", [1, 7, 8])
@pytest.mark.parametrize("seqlen", [4, 15, 20, 40, 100])
@KINDS
def test_nan_in_a_row_of_few_keys_stays_there(is_causal, seqlen, num_tasks):
    problem = Case("short", seqlen, seqlen, is_causal=is_causal).make()
    expected = attend(problem, num_tasks=num_tasks)
    query = problem.query.clone()
    query[0, 1, seqlen // 2, 3] = torch.nan
    output, lse = attend(replace(problem, query=query), num_tasks=num_tasks)
    assert output[0, 1, seqlen // 2].isnan().all() and lse[0, 1, seqlen // 2].isnan()
    others = torch.ones(output.shape[:3], dtype=torch.bool)
    others[0, 1, seqlen // 2] = False
    assert torch.equal(output[others], expected[0][others])
    assert torch.equal(lse[others], expected[1][others])


def test_a_group_of_keys_that_scores_minus_infinity_weighs_nothing():
    query = torch.ones(1, 1, 20, 8, dtype=torch.float64)
    key = torch.randn_like(query)
    key[:, :, :5] = -torch.inf
    value = torch.randn_like(query)
    one, split = (cqs.attention(query, key, value, num_tasks=w) for w in (1, 4))
    torch.testing.assert_close(split, one)


BUDGET = {"memory_budget": "1MiB"}
CALLS = pytest.mark.parametrize(
    "attention",
    [
        cqs.attention,
        partial(cqs.attention, num_tasks=5),
        partial(cqs.streaming.attention, **BUDGET),
    ],
    ids=["one call", "tasks", "budget"],
)


@CALLS
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


@pytest.mark.ray
def test_a_cluster_takes_a_batch_of_one(cluster):
    query, key, value = (torch.randn(batch, 2, 30, 8) for batch in (3, 1, 3))
    key.requires_grad_()
    expected = cqs.attention(query, key, value)
    output = cluster.attention(query, key, value)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        cluster.submit(query, key.detach(), value).result(), expected.detach()
    )
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), key), torch.autograd.grad(expected.sum(), key)
    )


def test_files_have_the_batch_of_the_others(tmp_path):
    query, key, value = (torch.randn(batch, 2, 30, 8) for batch in (3, 1, 3))
    np.save(tmp_path / "key.npy", key.numpy())
    mapped = np.load(tmp_path / "key.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"key must .* \[3, 2, 30, 8\] .* got \[1, 2, 30, 8\]"):
        cqs.streaming.attention(query, mapped, value, **BUDGET)


@CALLS
def test_without_a_head_dim_all_keys_weigh_alike(attention):
    tensors = [torch.randn(2, 4, 10, dim, requires_grad=True) for dim in (0, 0, 32)]
    output = attention(*tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), tensors),
    )


def test_progress_spans_the_parts_of_a_pattern_per_head():
    query, key, value = (torch.randn(1, 2, 20, 8) for _ in range(3))
    pattern = per_head([[causal(), sliding_window(2, 0)]])
    calls = []
    cqs.attention(query, key, value, pattern=pattern, progress=lambda *n: calls.append(n))
    assert calls == [(210, 267), (267, 267)]


@pytest.mark.parametrize("executor", [None, "ray"])
def test_progress_is_a_bool_or_a_function(monkeypatch, executor):
    monkeypatch.setattr(cqs.api, "open_executor", lambda executor: pytest.fail("opened"))
    tensors = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    with pytest.raises(TypeError, match="progress.*'loud'"):
        cqs.attention(*tensors, progress="loud", executor=executor)


def python_calls(function):
    """The number of Python functions that a repeated call of a function calls."""
    calls = []
    function()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(("num_tasks", "most"), [(None, 60), (7, 400)])
def test_a_call_takes_few_python_calls(monkeypatch, num_tasks, most):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # in an uncompiled program
    tensors = [torch.randn(1, 4, 256, 64) for _ in range(3)]
    assert python_calls(lambda: cqs.attention(*tensors, num_tasks=num_tasks)) <= most


def test_a_short_call_with_a_pattern_takes_few_python_calls(monkeypatch):
    """One call of the kernel with a mask, which is made once."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # in an uncompiled program
    tensors, pattern = [torch.randn(1, 4, 128, 64) for _ in range(3)], sliding_window(32, 32)
    assert python_calls(lambda: cqs.attention(*tensors, pattern=pattern)) <= 72
