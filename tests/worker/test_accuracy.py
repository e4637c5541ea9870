"""Few queries: the error is within twice that of one PyTorch call, plus one rounding."""

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_tracks_exact

import cqs
from benchmarks.cases import Case

VALUES = {
    "constant": lambda query, value: (0 * query, torch.full_like(value, 0.7)),
    "positive": lambda query, value: (0.3 * query, value.abs()),
    "shifted": lambda query, value: (query, 1 + value / 10),
    "normal": lambda query, value: (query, value),
}


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "head_dim"),
    [
        *((seqlen_q, 1000, 64) for seqlen_q in (1, 3, 8, 33, 64)),
        *((seqlen_q, 10_000, 64) for seqlen_q in (2, 8, 35, 64)),
        *((seqlen_q, 100_000, 16) for seqlen_q in (1, 8, 64)),
        *((seqlen_q, 1_000_000, 8) for seqlen_q in (1, 8)),
    ],
)
def test_few_queries_are_as_accurate_as_one_call(seqlen_q, seqlen_kv, head_dim, make):
    query = torch.randn(1, 1, seqlen_q, head_dim)
    key, value = torch.randn(2, 1, 1, seqlen_kv, head_dim)
    query, value = make(query, value)
    eager = F.scaled_dot_product_attention(query, key, value)
    scores = head_dim**-0.5 * query.double() @ key.double().mT
    exact = scores.softmax(dim=-1) @ value.double()
    for num_tasks in (1, 7, 8, 13):
        output = cqs.attention(query, key, value, num_tasks=num_tasks)
        assert_tracks_exact(output, eager, exact, name=f"output of {num_tasks} tasks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 2, 3, 33, 34, 65, 67, 193, 257])
def test_padding_of_blocks_with_few_rows_changes_no_result(assert_right, length, is_causal, dtype):
    """Rows that fill a block of the kernel see keys and change gradients of none."""
    problem = Case("few", length, length, 4, 2, is_causal=is_causal).make(dtype)
    tensors = [tensor.requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    options = {"is_causal": is_causal, "num_tasks": 1}
    output, lse = cqs.attention(*tensors, return_lse=True, backend="cpu", **options)
    assert_right(problem, (output.detach(), lse))
    expected = cqs.attention(*tensors, backend="reference", **options)
    gradients = (torch.autograd.grad(tensor.sum(), tensors) for tensor in (output, expected))
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance * length**0.5)
