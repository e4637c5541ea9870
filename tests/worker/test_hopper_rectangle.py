"""The backward kernel of rectangles of scores on Hopper GPUs."""

import random
from collections import Counter
from itertools import groupby

import pytest
import torch
from torch import Tensor

import cqs
from cqs.patterns import causal, dilated, documents, sliding_window, strided
from cqs.scheduler import make_plan
from cqs.worker.memory import measure_peak_bytes
from cqs.worker.operands import TaskOperands
from cqs.worker.work import make_work

pytest.importorskip("triton")

from triton import knobs

from cqs.worker.triton import TRITON, launch, rectangle_launch
from cqs.worker.triton.hopper_rectangle import place_of_item
from cqs.worker.triton.rectangle_launch import Rectangle, rectangles_of
from cqs.worker.triton.statistics_launch import launch_row_statistics


def plan_work(seqlen_q, seqlen_kv, *, num_tasks=1, **options):
    """Return the work of all tasks of a plan on one device."""
    plan = make_plan(seqlen_q, seqlen_kv, num_tasks=num_tasks, **options)
    steps = tuple(step for task in plan.tasks for step in task.steps)
    pattern = options.get("pattern")
    bound = pattern and pattern.bind(seqlen_q, seqlen_kv)
    return make_work(steps, bound, (range(seqlen_q),), (range(seqlen_kv),))


LENGTHS = pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1000), (1000, 300), (2, 700)])


@LENGTHS
@pytest.mark.parametrize(
    ("options", "is_causal"),
    [({}, False), ({"is_causal": True}, True), ({"pattern": causal()}, True)],
    ids=["full", "causal", "pattern"],
)
def test_plans_of_one_task_are_one_rectangle(lengths, options, is_causal):
    (rectangle,) = rectangles_of(plan_work(*lengths, **options))
    assert rectangle.keys == range(lengths[1])
    assert rectangle.queries.stop == lengths[0]
    assert rectangle.is_causal is is_causal


def test_a_causal_query_that_sees_all_keys_is_a_dense_rectangle():
    work = plan_work(1, 700, is_causal=True)
    assert rectangles_of(work) == (Rectangle(range(1), range(700), is_causal=False),)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": sliding_window(100, 100)},
        {"pattern": sliding_window(100, 0)},
        {"pattern": dilated(500, 500, 2)},
        {"pattern": strided(16)},
        {"pattern": sliding_window(100, 0), "num_tasks": 3},
    ],
    ids=str,
)
def test_patterns_are_no_rectangles(options):
    assert rectangles_of(plan_work(1000, 1000, **options)) is None


@pytest.mark.parametrize(("number", "is_found"), [(3, True), (256, True), (257, False)])
def test_a_few_documents_are_rectangles(number, is_found):
    pattern = documents(range(0, 10 * number + 1, 10))
    found = rectangles_of(plan_work(10 * number, 10 * number, pattern=pattern & causal()))
    assert (found is not None) is is_found
    if is_found:
        assert [rectangle.is_causal for rectangle in found] == [True] * number


def mask_of(rectangle):
    """Return the live pairs of a rectangle, bool ``[queries, keys]``."""
    queries, keys, is_causal = rectangle
    mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
    return mask.tril(len(keys) - len(queries)) if is_causal else mask


@LENGTHS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tasks", [2, 3, 7, 8, 13])
def test_rectangles_of_several_tasks_have_every_pair_once(lengths, is_causal, num_tasks):
    rectangles = rectangles_of(plan_work(*lengths, num_tasks=num_tasks, is_causal=is_causal))
    count = torch.zeros(lengths, dtype=torch.int64)
    for rectangle in rectangles:
        queries, keys, _ = rectangle
        count[queries.start : queries.stop, keys.start : keys.stop] += mask_of(rectangle)
    expected = torch.ones(lengths, dtype=torch.int64)
    assert torch.equal(count, expected.tril(lengths[1] - lengths[0]) if is_causal else expected)
    groups = [rectangle.queries for rectangle in rectangles]
    assert len(list(groupby(groups))) == len(set(groups))  # a group is written at once


@LENGTHS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_number_of_pairs_decides_within_rounding(lengths, is_causal):
    rectangle = Rectangle(*map(range, lengths), is_causal)
    assert abs(rectangle.num_pairs - mask_of(rectangle).sum()) <= sum(lengths)


ORDERS = [
    (lengths, heads, group, together, is_causal)
    for lengths in ((1, 1), (500, 500), (1000, 1152), (1152, 1000), (70, 900), (900, 70))
    for heads, group, together in ((1, 1, 1), (3, 1, 3), (3, 1, 2), (2, 4, 2), (5, 2, 4))
    for is_causal in (False, True)
]


def list_items(lengths, heads, group, together, is_causal):
    """Return the tile and the visited blocks of all items, in the order of the queue."""
    seqlen_q, seqlen_kv = lengths
    num_tiles, num_blocks = -(-seqlen_kv // 128), -(-seqlen_q // 64)
    sizes = heads, num_tiles, num_blocks, seqlen_kv, group, together, seqlen_kv - seqlen_q
    found = []
    for index in range(heads * num_tiles):
        place = place_of_item.fn(index, sizes, is_causal)
        head, tile, first = (int(getattr(each, "value", each)) for each in place)
        blocks = [
            (head * group + member, block)
            for block in reversed(range(first, num_blocks))
            for member in range(group)
        ]
        found.append((tile, blocks))
    return found


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_visit_waits_only_for_items_before_it(order):
    (seqlen_q, seqlen_kv), heads, group, _, is_causal = order
    turns = Counter()
    for tile, blocks in list_items(*order):
        assert blocks
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert turns[block] == tile
            turns[block] += 1
    for head in range(heads * group):
        for row in range(seqlen_q):
            seen = min(row + seqlen_kv - seqlen_q + 1, seqlen_kv) if is_causal else seqlen_kv
            assert turns[head, row // 64] >= -(-seen // 128)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 1000])
@pytest.mark.parametrize("order", ORDERS[::7], ids=str)
def test_any_number_of_programs_finishes(order, num_programs):
    queue, turns, running = list_items(*order)[::-1], Counter(), []
    while queue or running:
        running += [queue.pop() for _ in range(min(num_programs - len(running), len(queue)))]
        random.Random(len(queue)).shuffle(running)
        before = turns.total()
        for tile, blocks in running:
            while blocks and turns[blocks[0]] == tile:
                turns[blocks.pop(0)] += 1
        assert turns.total() > before  # some program has made progress
        running = [item for item in running if item[1]]


@pytest.mark.skipif(not knobs.runtime.interpret, reason="requires Triton's interpreter")
def test_statistics_in_blocks_are_negative_and_padded():
    generator = torch.Generator().manual_seed(0)
    output, grad_output = (torch.randn(2, 3, 70, 16, generator=generator) for _ in range(2))
    lse = torch.randn(2, 3, 70, generator=generator)
    lse[0, 1, 2], lse[1, 2, 69] = -torch.inf, torch.inf
    of_rows = launch_row_statistics(grad_output, output, lse)
    of_blocks = launch_row_statistics(grad_output, output, lse, in_blocks_of=64)
    for rows, blocks, padding in zip(of_rows, of_blocks, (-torch.inf, 0.0), strict=True):
        assert blocks.shape == (6, 2, 64)
        found = blocks.reshape(2, 3, 128)
        torch.testing.assert_close(found[:, :, :70], -rows, rtol=0, atol=0, equal_nan=True)
        assert (found[:, :, 70:] == padding).all()


# On a GPU

BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "one-tile": {"heads": 1, "queries": 128},
    "many-tiles": {"heads": 3, "queries": 1280},
    "ragged": {"heads": 2, "queries": 1000},
    "one-query": {"heads": 1, "queries": 1},
    "one-key-more-than-a-block": {"heads": 2, "queries": 65},
    "gqa": {"heads": 8, "kv_heads": 2, "queries": 1280},
    "gqa-ragged": {"heads": 6, "kv_heads": 2, "queries": 777},
    "more-keys": {"heads": 2, "queries": 300, "keys": 1000},
    "more-queries": {"heads": 2, "queries": 1000, "keys": 300},
    "one-query-many-keys": {"heads": 2, "queries": 1, "keys": 1000},
    "d64": {"heads": 2, "queries": 1152, "dim": 64},
    "d64-gqa-ragged": {"heads": 4, "kv_heads": 2, "queries": 700, "keys": 1001, "dim": 64},
    "float16": {"heads": 2, "queries": 1000, "dtype": FP16},
    "batch": {"batch": 2, "heads": 6, "kv_heads": 2, "queries": 500, "keys": 600},
    "transposed": {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 500, "is_transposed": True},
    "d64-transposed": {"batch": 2, "heads": 4, "queries": 333, "dim": 64, "is_transposed": True},
    "negative-scale": {"heads": 2, "queries": 300, "scale": -0.1},
    "scale-0": {"heads": 2, "queries": 300, "scale": 0.0},
    "float32-gradients": {"heads": 5, "queries": 900, "gradient_dtype": None},
}


def count_calls(monkeypatch, name):
    """Return a list that gets the arguments of each call of a function of rectangle_launch.py."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("requires a Hopper GPU")
    made = []

    def count(*args):
        made.append(args)
        return compute(*args)

    compute = getattr(rectangle_launch, name)
    monkeypatch.setattr(launch, name, count)
    return made


@pytest.fixture
def calls(monkeypatch):
    """Use the kernel for any number of heads, and return the calls that it has had."""
    made = count_calls(monkeypatch, "gradients_of_rectangles")
    monkeypatch.setattr(launch, "takes_visits", lambda _: False)
    for name in ("_MIN_PAIRS", "_MIN_PAIRS_OF_SEVERAL"):
        monkeypatch.setattr(rectangle_launch, name, 0.0)
    return made


def make_tensors(
    heads, queries, keys=None, kv_heads=None, dim=128, dtype=BF16, batch=1, is_transposed=False
):
    """Return query, key, value and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    of_queries, of_keys = (heads, queries), (kv_heads or heads, keys or queries)

    def make(num_heads, length):
        shape = (batch, length, num_heads) if is_transposed else (batch, num_heads, length)
        found = torch.randn(*shape, dim, generator=generator, device="cuda", dtype=dtype)
        return found.transpose(1, 2) if is_transposed else found

    return [make(*each) for each in (of_queries, of_keys, of_keys, of_queries)]


def exact_gradients(query, key, value, grad_output, scale, is_causal):
    """Return the gradients in float64."""
    leaves = [each.detach().double().requires_grad_() for each in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in leaves[1:])
    scores = leaves[0] @ keys.mT * scale
    mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device)
    mask = mask.tril(key.shape[2] - query.shape[2]) if is_causal else mask
    blind = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask & ~blind, -torch.inf).softmax(-1) * ~blind
    return torch.autograd.grad(weights @ values, leaves, grad_output.double())


def forward(query, key, value, is_causal, scale=None, num_tasks=1):
    """Return the operands, the output and the LSE."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    lengths = query.shape[2], key.shape[2]
    work = plan_work(*lengths, is_causal=is_causal, num_tasks=num_tasks)
    operands = TaskOperands(query, key, value, work, scale)
    return operands, TRITON.attend(operands, is_united=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 7])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_near_float64(name, is_causal, num_tasks, calls):
    case = dict(CASES[name])
    scale, dtype = case.pop("scale", None), case.pop("gradient_dtype", case.get("dtype", BF16))
    *tensors, grad_output = make_tensors(**case)
    operands, answer = forward(*tensors, is_causal, scale, num_tasks)
    found = TRITON.differentiate(operands, grad_output, *answer, dtype=dtype)
    expected = exact_gradients(*tensors, grad_output, operands.scale, is_causal)
    assert len(calls) == 1
    largest = max(each.norm() for each in expected)
    for gradient, exact in zip(found, expected, strict=True):
        assert gradient.dtype == (dtype or torch.float32)
        assert gradient.shape == exact.shape
        error = (gradient.double() - exact).norm()
        # Gradients that vanish, as those of scores of one key, are compared with the largest.
        assert error <= 1e-2 * max(exact.norm(), 1e-2 * largest)


@pytest.mark.gpu
def test_queries_that_see_no_key_have_gradient_0(calls):
    *tensors, grad_output = make_tensors(4, 1000, keys=300)
    operands, answer = forward(*tensors, is_causal=True)
    of_query, *_ = TRITON.differentiate(operands, grad_output, *answer, dtype=BF16)
    assert calls
    assert not of_query[:, :, :700].any()
    assert of_query[:, :, 701:].any(-1).all()


@pytest.mark.gpu
def test_a_masked_value_that_is_not_finite_reaches_no_query(calls):
    *tensors, grad_output = make_tensors(4, 200)
    operands, answer = forward(*tensors, is_causal=True)
    operands.value[:, :, -1] = torch.nan
    of_query, *_ = TRITON.differentiate(operands, grad_output, *answer, dtype=BF16)
    assert calls
    assert of_query[:, :, :-1].isfinite().all()
    assert of_query[:, :, -1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_are_deterministic(is_causal, num_tasks, calls, monkeypatch):
    *tensors, grad_output = make_tensors(16, 4096)
    operands, answer = forward(*tensors, is_causal, num_tasks=num_tasks)

    def compute() -> list[Tensor]:
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    first = compute()
    for number in range(100):
        programs = (132, 131, 97, 64, 33)[number % 5]
        monkeypatch.setattr(launch, "num_processors", lambda _, programs=programs: programs)
        assert all(map(torch.equal, first, compute()))
    assert len(calls) == 101


@pytest.mark.gpu
@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_cuda_graph_gives_bitwise_equal_gradients(is_causal, num_tasks, calls):
    *tensors, grad_output = make_tensors(4, 1000)
    operands, answer = forward(*tensors, is_causal, num_tasks=num_tasks)

    def compute() -> list[Tensor]:
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    expected = compute()
    compute()  # by the prepared launch, which the capture takes too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for _ in range(3):
        for gradient in found:
            gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, found))
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_scratch_memory_is_as_documented(dim, calls):
    """docs/kernels.md: sums of dQ, 8 bytes per query and head, 4 per block; the state has 128."""
    *tensors, grad_output = make_tensors(8, 1000, kv_heads=2, dim=dim)
    operands, answer = forward(*tensors, is_causal=True)

    def compute() -> list[Tensor]:
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    compute()
    _, peak_bytes = measure_peak_bytes(compute, grad_output.device)
    num_blocks = 8 * 16
    of_blocks = num_blocks * (64 * dim * 4 + 64 * 8 + 4) + 128
    assert calls
    assert peak_bytes == sum(tensor.nbytes for tensor in tensors) + of_blocks


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "is_used"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"scores": cqs.Scores(softcap=20.0)}, False),
        ({"dropout_p": 0.5, "seed": 0}, False),
        ({"pattern": sliding_window(64, 64)}, False),
        ({"num_tasks": 4}, True),
    ],
    ids=str,
)
def test_attention_uses_the_kernel_where_it_applies(options, is_used, calls):
    *tensors, grad_output = make_tensors(4, 512)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    options = {"num_tasks": 1, "backend": "triton", **options}
    torch.autograd.grad(cqs.attention(*leaves, **options), leaves, grad_output)
    assert bool(calls) == is_used


@pytest.mark.parametrize(
    ("tokens", "heads", "options", "is_used"),
    [
        (8192, 4, {}, True),
        (4096, 4, {}, False),
        (8192, 4, {"is_causal": True}, True),
        (16_384, 1, {}, False),
        (16_384, 1, {"is_causal": True}, True),
        (32_768, 1, {}, True),
        (32_768, 16, {"num_tasks": 3}, True),
        (4096, 16, {"num_tasks": 3}, False),
    ],
    ids=str,
)
def test_the_kernel_is_used_for_large_rectangles(tokens, heads, options, is_used):
    query = torch.empty(1, heads, tokens, 128, device="meta", dtype=BF16)
    operands = TaskOperands(query, query, query, plan_work(tokens, tokens, **options), 0.1)
    assert rectangle_launch.takes_rectangle_kernel(operands) is is_used
