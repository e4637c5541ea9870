"""NaN and infinity in the inputs reach every row that sees them, on every backend."""

import math

import pytest
import torch
import torch.nn.functional as F

import cqs
from cqs.patterns import documents, from_mask, global_tokens, longformer, sliding_window
from cqs.problem import check_problem
from cqs.worker.calls import attend_call
from cqs.worker.cpu import CPU
from cqs.worker.operands import Operands
from cqs.worker.reference import REFERENCE
from tests.worker.hopper import mask_of
from tests.worker.test_backends import SINGLE, attend, every_combination

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy
NOT_FINITE = pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
CALLS = {
    "one-key": (9, 1, 1, {}),
    "a-key-for-each-task": (13, 13, 13, {}),
    "a-key-for-each-task-causal": (13, 13, 13, {"is_causal": True}),
    "causal": (70, 70, 4, {"is_causal": True}),
    "global": (60, 60, 1, {"pattern": sliding_window(4, 4) | global_tokens(1)}),
    "longformer": (60, 60, 7, {"pattern": longformer(8, [30])}),
    "document-of-one-token": (60, 60, 3, {"pattern": documents([0, 5, 6, 60])}),
    "window-of-one-token": (20, 20, 2, {"pattern": sliding_window(0, 0)}),
}


def exact_rows(query, key, value, scale, visible):
    """Attention in float64 over the visible pairs of each row alone."""
    scores = scale * query.double() @ key.double().mT
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = scores.softmax(dim=-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0)
    rows = [
        (weights[:, :, i, sees].unsqueeze(-1) * value.double()[:, :, sees]).sum(dim=2)
        for i, sees in enumerate(visible)
    ]
    return torch.stack(rows, dim=2), lse


def spoil(name, entry, device, dtype):
    """A problem whose query, key and value are not finite in one entry of head 0, 1 and 2."""
    seqlen_q, seqlen_kv, num_tasks, options = CALLS[name]
    lengths = seqlen_q, seqlen_kv, seqlen_kv
    tensors = [torch.randn(2, 3, length, 32).to(device, dtype) for length in lengths]
    for which, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        for batch, row in enumerate((5 % length, length - 1)):
            tensor[batch, which, row, 3] = entry
    return check_problem(*tensors, **options), num_tasks


@pytest.mark.slow
@pytest.mark.sample(20)
@every_combination
@NOT_FINITE
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    name, entry, device, backend, dtype
):
    """And gradients are not finite where those of PyTorch are not."""
    problem, num_tasks = spoil(name, entry, device, dtype)
    leaves = [problem.query, problem.key, problem.value]
    for leaf in leaves:
        leaf.requires_grad_()
    leaks = backend not in ("cpu", "reference")  # kernels for GPUs multiply masked values by 0
    output, lse = attend(problem, backend, num_tasks, verify=not leaks)
    gradients = torch.autograd.grad(output.sum(), leaves)
    visible = mask_of(problem)
    with torch.no_grad():
        right, right_lse = exact_rows(*leaves, problem.scale, visible)
    broken, broken_lse = (~right.isfinite()).any(-1), ~right_lse.isfinite()
    assert (~output.isfinite()).any(-1)[broken].all()
    assert (~lse.isfinite())[broken_lse].all()
    sound, sound_lse = ~broken, ~broken_lse
    if leaks:
        sound[:, 2] = False
    assert lse[sound_lse].isfinite().all()
    error = (output[sound].double() - right[sound]).abs()
    assert (error <= 1e-5 + 8 * torch.finfo(dtype).eps).all()
    query_rows, key_rows, value_rows = ((~gradient.isfinite()).any(-1) for gradient in gradients)
    has_no_weights = right_lse.isnan() | (right_lse == torch.inf)
    sees = visible.float()
    assert query_rows[broken].all()
    assert key_rows[broken.float() @ sees > 0].all()
    assert value_rows[has_no_weights.float() @ sees > 0].all()


@NOT_FINITE
@pytest.mark.parametrize("name", ["a-key-for-each-task", "a-key-for-each-task-causal"])
def test_a_memory_budget_changes_no_row_that_is_not_finite(name, entry):
    problem, num_tasks = spoil(name, entry, "cpu", torch.float32)
    whole = attend(problem, "cpu", num_tasks)
    tensors = problem.query, problem.key, problem.value
    options = {"is_causal": problem.is_causal, "return_lse": True}
    streamed = cqs.streaming.attention(*tensors, memory_budget=2**20, **options)
    for one, other in zip(whole, streamed, strict=True):
        assert one.isfinite().equal(other.isfinite())


@pytest.mark.parametrize("mask", ["none", "causal", "pairs"])
@pytest.mark.parametrize("dtype", SINGLE, ids=str)
def test_calls_of_the_cpu_kernel_on_any_number_of_keys(dtype, mask):
    for num_keys in (*range(1, 34), 48, 63, 64, 511, 512, 513):
        num_queries = 5 if mask == "none" else num_keys
        options = {"is_causal": mask == "causal", "scale": 0.25}
        if mask == "pairs":
            options["visible"] = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        for which, entry in ((0, math.nan), (1, math.nan), (1, math.inf), (1, -math.inf)):
            tensors = [torch.randn(1, 1, n, 8).to(dtype) for n in (num_queries, *[num_keys] * 2)]
            tensors[which][0, 0, tensors[which].shape[2] // 2, 3] = entry
            operands = Operands(*tensors, **options)
            partial, expected = attend_call(CPU, operands), REFERENCE.attend(operands)
            for one, other in zip(partial, expected, strict=True):
                assert one.isnan().equal(other.isnan()) and one.isinf().equal(other.isinf())


@pytest.mark.sample(3)
@pytest.mark.parametrize("entry", [math.nan, math.inf])
@pytest.mark.parametrize("tokens", [70, 200, 1300])
@pytest.mark.parametrize("dtype", SINGLE, ids=str)
def test_a_masked_value_leaks_into_no_row_if_the_last_row_does_not_see_it(dtype, tokens, entry):
    query, key, value = (torch.randn(2, 3, tokens, 32).to(dtype) for _ in range(3))
    visible = torch.ones(tokens, tokens, dtype=torch.bool).triu(-9).tril(9)
    value[1, 2, 20, 7] = entry
    operands = Operands(query, key, value, False, 0.25, visible)
    partial, expected = attend_call(CPU, operands), REFERENCE.attend(operands)
    assert partial.lse.isfinite().all()
    assert partial.output.isfinite().equal(expected.output.isfinite())
    assert int((~partial.output.isfinite()).any(-1).sum()) == 19


def test_scores_that_overflow_where_they_are_masked_out_do_not_matter():
    query = torch.full((1, 1, 40, 8), 1e25)
    key, value = torch.randn(2, 1, 1, 40, 8)
    key[0, 0, 30] = 1e25
    visible = torch.ones(40, 40, dtype=torch.bool)
    visible[:35, 30] = False
    output, lse = attend_call(CPU, Operands(0 * query + 1, key, value, False, 1.0, visible))
    assert output[0, 0, :35].isfinite().all() and lse[0, 0, :35].isfinite().all()
    key = key.clamp(-1, 1)
    query[0, 0, :, 1:] = 0
    key[0, 0, :, 0] = -1e-26
    key[0, 0, 30, 0] = 1e20
    output, _ = attend_call(CPU, Operands(query, key, value, False, 1.0, visible))
    assert output[0, 0, :35].isfinite().all() and output[0, 0, 35:].isnan().all()


@pytest.mark.parametrize("num_tasks", [1, 2, 5])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_value_that_is_nan_counts_where_its_score_is_minus_infinity(backend, num_tasks):
    """A weight of 0 times NaN is NaN, in parts that see no other score too, as in PyTorch."""
    query, value = torch.ones(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    value[0, 0, 3, 2] = math.nan
    for num_infinite in (2, 5):
        key = torch.randn(1, 1, 5, 8)
        key[:, :, 5 - num_infinite :] = -math.inf
        for is_causal in (False, True):
            visible = torch.ones(5, 5, dtype=torch.bool).tril(0 if is_causal else 5)
            expected = exact_rows(query, key, value, 8**-0.5, visible)[0].float()
            if not is_causal:  # else PyTorch also spoils rows that do not see the NaN
                torch_output = F.scaled_dot_product_attention(query, key, value)
                torch.testing.assert_close(torch_output, expected, equal_nan=True)
            options = {"is_causal": is_causal, "num_tasks": num_tasks}
            output = cqs.attention(query, key, value, backend=backend, verify=True, **options)
            torch.testing.assert_close(output, expected, equal_nan=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[4] = False
    output = cqs.attention(query, key, value, backend=backend, pattern=from_mask(mask))
    assert output[0, 0, 3, 2].isnan() and (output[0, 0, [0, 1, 2, 4]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_values_near_the_largest_number_do_not_overflow_as_those_of_pytorch(dtype):
    query, key = torch.zeros(2, 1, 1, 9, 16, dtype=dtype)
    value = torch.full_like(key, 3e38)
    assert F.scaled_dot_product_attention(query, key, value).isinf().all()
    for num_tasks, values in ((1, value), (7, value), (7, value / 9)):
        output = cqs.attention(query, key, values, num_tasks=num_tasks, verify=True)
        torch.testing.assert_close(output, values)
