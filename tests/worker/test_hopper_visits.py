"""The backward kernel of five products for sparse patterns on Hopper GPUs, and its lists."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import cqs
from cqs.patterns import (
    bigbird,
    block_diagonal,
    causal,
    dilated,
    documents,
    from_mask,
    longformer,
    sliding_window,
)
from cqs.worker.operands import TaskOperands
from cqs.worker.triton.visits import (
    MASK_INTEGERS,
    VISIT_BLOCK,
    VISIT_MASK,
    VISIT_TURN,
    count_visits,
    make_visit_list,
)

pytest.importorskip("triton")

from cqs.worker.triton import TRITON, launch, rectangle_launch
from tests.worker.test_hopper_rectangle import BF16, FP16, count_calls, make_tensors, plan_work

LENGTHS = pytest.mark.parametrize(
    "lengths", [(1000, 1000), (1024, 1024), (300, 1000), (1000, 300), (65, 65)], ids=str
)


@cache
def patterns_of(num_queries, num_keys):
    """Return patterns by name."""
    mask = np.random.default_rng(0).random((num_queries, num_keys)) < 0.3
    found = {
        "causal-window": sliding_window(100, 0),
        "window": sliding_window(100, 100),
        "wide-window": sliding_window(500, 100),
        "bigbird": bigbird(block=64),
        "longformer": longformer(64, 2),
        "blocks": block_diagonal(256),
        "mask": from_mask(mask),
    }
    if num_queries == num_keys:
        ends = sorted({0, num_queries // 3, num_queries // 2, num_queries})
        found |= {"documents": documents(ends), "causal-documents": documents(ends) & causal()}
    return found


NAMES = pytest.mark.parametrize("name", patterns_of(65, 65))


def find_work(lengths, name, num_tasks=1):
    """Return the work of a pattern, or skip the test if the lengths do not have it."""
    if name not in patterns_of(*lengths):
        pytest.skip("documents have as many queries as keys")
    return plan_work(*lengths, num_tasks=num_tasks, pattern=patterns_of(*lengths)[name])


def mask_of(work, lengths):
    """Return how often each pair is live, int64 ``[queries, keys]``."""
    found = np.zeros(lengths, np.int64)
    for block_row in work.block_rows:
        for view in block_row.views:
            found[view.queries.start : view.queries.stop, view.keys.start : view.keys.stop] += (
                view.to_mask()
            )
    return found


@LENGTHS
@NAMES
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_visits_have_every_live_pair_once(lengths, name, num_tasks):
    work = find_work(lengths, name, num_tasks)
    starts, visits, masks, num_unvisited = make_visit_list(work, *lengths)
    num_tiles, num_blocks = -(-lengths[1] // 128), -(-lengths[0] // 64)
    found = np.zeros((num_blocks * 64, num_tiles * 128), np.int64)
    turns = np.zeros(num_blocks, np.int64)
    query = np.arange(64)
    for tile in range(num_tiles):
        of_tile = visits[starts[tile] : starts[tile + 1]]
        assert (np.diff(of_tile[:, VISIT_BLOCK]) < 0).all()  # from the last block on
        assert (of_tile[:, VISIT_TURN] == turns[of_tile[:, VISIT_BLOCK]]).all()
        turns[of_tile[:, VISIT_BLOCK]] += 1
        for record in of_tile:
            live = np.ones((128, 64), np.int64)
            if (start := record[VISIT_MASK]) >= 0:
                integers = masks.reshape(-1)[start : start + MASK_INTEGERS].reshape(128, 4)
                live = integers[:, query // 2 % 4] >> (query // 8 * 2 + query % 2) & 1
            rows, columns = record[VISIT_BLOCK] * 64, tile * 128
            found[rows : rows + 64, columns : columns + 128] += live.T
    assert not found[: lengths[0], lengths[1] :].any()
    assert (found[: lengths[0], : lengths[1]] == mask_of(work, lengths)).all()
    assert num_unvisited == (turns == 0).sum()
    counts = count_visits(work, *lengths, 2**20)
    assert counts.num_visits >= len(visits)  # some masks may be empty
    assert counts.has_bits == any(v.bits is not None for row in work.block_rows for v in row.views)
    assert rectangle_launch._is_long(counts) == counts.has_bits
    assert count_visits(work, *lengths, counts.num_visits) == counts
    assert count_visits(work, *lengths, counts.num_visits - 1) is None


def test_views_with_steps_have_no_visits():
    work = plan_work(1000, 1000, pattern=dilated(500, 500, 2))
    assert count_visits(work, 1000, 1000, 2**20) is None


def test_many_visits_are_not_counted_one_by_one(monkeypatch):
    monkeypatch.setattr("cqs.worker.triton.visits._cut", None)
    work = plan_work(2**22, 2**22, num_tasks=7, is_causal=True)
    assert count_visits(work, 2**22, 2**22, 2**20) is None


@pytest.mark.parametrize(
    ("pattern", "is_used"),
    [
        (sliding_window(2000, 2000), True),
        (sliding_window(4000, 0), True),
        (sliding_window(100, 0), False),
        (documents(range(0, 16_385, 2048)), True),
        (bigbird(block=128), False),
        (longformer(1000, 16), False),
    ],
    ids=str,
)
def test_large_patterns_without_gaps_use_visits(pattern, is_used):
    query = torch.empty(1, 16, 16_384, 128, device="meta", dtype=BF16)
    work = plan_work(16_384, 16_384, pattern=pattern)
    assert rectangle_launch.takes_visits(TaskOperands(query, query, query, work, 0.1)) is is_used


# On a GPU


@pytest.fixture
def calls(monkeypatch):
    """Use the kernel for all patterns, and return the calls that it has had."""
    made = count_calls(monkeypatch, "gradients_of_visits")
    monkeypatch.setattr(launch, "takes_rectangle_kernel", lambda _: False)
    monkeypatch.setattr(rectangle_launch, "rectangles_of", lambda _: None)
    monkeypatch.setattr(rectangle_launch, "_MIN_VISITS", {64: 0, 128: 0})
    monkeypatch.setattr(rectangle_launch, "_MOST_SPANNED", torch.inf)
    return made


def exact_gradients(query, key, value, grad_output, scale, mask):
    """Return the gradients in float64; queries that see no key have gradient 0."""
    leaves = [each.detach().double().requires_grad_() for each in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in leaves[1:])
    scores = leaves[0] @ keys.mT * scale
    blind = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask & ~blind, -torch.inf).softmax(-1) * ~blind
    return torch.autograd.grad(weights @ values, leaves, grad_output.double())


@pytest.mark.gpu
@LENGTHS
@NAMES
@pytest.mark.parametrize(
    ("num_tasks", "options", "dtype"),
    [
        (1, {"heads": 4}, BF16),
        (3, {"heads": 4, "kv_heads": 1}, BF16),
        (1, {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": FP16}, FP16),
        (1, {"heads": 20, "batch": 2, "is_transposed": True}, None),
    ],
    ids=str,
)
def test_gradients_are_near_float64(lengths, name, num_tasks, options, dtype, calls):
    work = find_work(lengths, name, num_tasks)
    *tensors, grad_output = make_tensors(queries=lengths[0], keys=lengths[1], **options)
    operands = TaskOperands(*tensors, work, 0.1)
    answer = TRITON.attend(operands, is_united=True)
    found = TRITON.differentiate(operands, grad_output, *answer, dtype=dtype)
    mask = torch.from_numpy(mask_of(work, lengths) > 0).cuda()
    expected = exact_gradients(*tensors, grad_output, 0.1, mask)
    assert len(calls) == 1
    for gradient, exact in zip(found, expected, strict=True):
        assert gradient.dtype == (dtype or torch.float32)
        assert (gradient.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pattern", [sliding_window(700, 500), bigbird(block=128), documents([0, 999, 3000, 4096])]
)
def test_gradients_are_deterministic(pattern, calls, monkeypatch):
    *tensors, grad_output = make_tensors(16, 4096)
    operands = TaskOperands(*tensors, plan_work(4096, 4096, pattern=pattern), 0.1)
    answer = TRITON.attend(operands, is_united=True)

    def compute() -> list[Tensor]:
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    first = compute()
    for number in range(50):
        programs = (132, 131, 97, 64, 33)[number % 5]
        monkeypatch.setattr(launch, "num_processors", lambda _, programs=programs: programs)
        assert all(map(torch.equal, first, compute()))
    assert len(calls) == 51


@pytest.mark.gpu
def test_a_masked_value_that_is_not_finite_reaches_no_query(calls):
    *tensors, grad_output = make_tensors(4, 1000)
    operands = TaskOperands(*tensors, plan_work(1000, 1000, pattern=sliding_window(99, 0)), 0.1)
    answer = TRITON.attend(operands, is_united=True)
    operands.value[:, :, -1] = torch.nan
    of_query, *_ = TRITON.differentiate(operands, grad_output, *answer, dtype=BF16)
    assert calls
    assert of_query[:, :, :-1].isfinite().all()
    assert of_query[:, :, -1].isnan().all()


@pytest.mark.gpu
def test_a_cuda_graph_gives_bitwise_equal_gradients(calls):
    *tensors, grad_output = make_tensors(4, 1000)
    operands = TaskOperands(*tensors, plan_work(1000, 1000, pattern=sliding_window(99, 99)), 0.1)
    answer = TRITON.attend(operands, is_united=True)

    def compute() -> list[Tensor]:
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    expected = compute()
    compute()  # by the prepared launch, which the capture takes too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for gradient in found:
        gradient.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, expected, found))
    assert len(calls) == 3


@pytest.mark.gpu
def test_attention_uses_the_kernel_for_a_window(calls):
    *tensors, grad_output = make_tensors(4, 512)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    answer = cqs.attention(*leaves, num_tasks=1, backend="triton", pattern=sliding_window(64, 64))
    torch.autograd.grad(answer, leaves, grad_output)
    assert calls
