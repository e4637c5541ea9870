"""The backward kernels of five products on Hopper GPUs: rectangles, visits and residues."""

import pytest
import torch

from cqs.patterns import bigbird, dilated, documents, sliding_window
from cqs.worker.memory import measure_peak_bytes
from cqs.worker.operands import TaskOperands

pytest.importorskip("triton")

from cqs.worker.triton import TRITON, launch, rectangle_launch, residues
from tests.worker.hopper import BF16, FP16, count_pairs, exact_gradients, make_tensors, plan_work
from tests.worker.test_hopper_visits import LENGTHS, NAMES, find_work
from tests.worker.test_residues import DILATED

pytestmark = pytest.mark.gpu

CASES = {
    "one-tile": {"heads": 1, "queries": 128},
    "one-query": {"heads": 1, "queries": 1},
    "one-key-more-than-a-block": {"heads": 2, "queries": 65},
    "gqa": {"heads": 8, "kv_heads": 2, "queries": 1280},
    "gqa-ragged": {"heads": 6, "kv_heads": 2, "queries": 777},
    "more-keys": {"heads": 2, "queries": 300, "keys": 1000},
    "more-queries": {"heads": 2, "queries": 1000, "keys": 300},
    "one-query-many-keys": {"heads": 2, "queries": 1, "keys": 1000},
    "d64-gqa-ragged": {"heads": 4, "kv_heads": 2, "queries": 700, "keys": 1001, "dim": 64},
    "float16": {"heads": 2, "queries": 1000, "dtype": FP16},
    "batch": {"batch": 2, "heads": 6, "kv_heads": 2, "queries": 500, "keys": 600},
    "transposed": {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 500, "is_transposed": True},
    "d64-transposed": {"batch": 2, "heads": 4, "queries": 333, "dim": 64, "is_transposed": True},
    "negative-scale": {"heads": 2, "queries": 300, "scale": -0.1},
    "scale-0": {"heads": 2, "queries": 300, "scale": 0.0},
    "float32-gradients": {"heads": 5, "queries": 900, "gradient_dtype": None},
}


@pytest.fixture
def use_kernel(monkeypatch):
    """Return a function that uses a kernel for tensors of any size and lists its calls."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("requires a Hopper GPU")
    for name in ("_MIN_PAIRS", "_MIN_PAIRS_OF_SEVERAL"):
        monkeypatch.setattr(rectangle_launch, name, 0.0)
    monkeypatch.setattr(rectangle_launch, "_MIN_VISITS", {64: 0, 128: 0})
    monkeypatch.setattr(rectangle_launch, "_MOST_SPANNED", torch.inf)
    made = []

    def use(kernel):
        if kernel == "rectangles":
            monkeypatch.setattr(launch, "takes_visits", lambda _: False)
        elif kernel == "visits":
            monkeypatch.setattr(launch, "takes_rectangle_kernel", lambda _: False)
            monkeypatch.setattr(rectangle_launch, "rectangles_of", lambda _: None)
        else:
            monkeypatch.setattr(residues, "_LEAST_KEYS", 0)
        return made

    def count_calls(name, compute):
        def count(*args):
            made.append(name)
            return compute(*args)

        monkeypatch.setattr(launch, f"gradients_of_{name}", count)

    count_calls("rectangles", rectangle_launch.gradients_of_rectangles)
    count_calls("visits", rectangle_launch.gradients_of_visits)
    return use


def forward(query, key, value, work, scale=None):
    """Return the operands, the output and the LSE."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    operands = TaskOperands(query, key, value, work, scale)
    return operands, TRITON.attend(operands, is_united=True)


def differentiate_by(tensors, work):
    """Return a function of the gradients in bfloat16, and the operands that it reads."""
    *tensors, grad_output = tensors
    operands, answer = forward(*tensors, work)

    def differentiate():
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    return differentiate, operands


def assert_near_float64(tensors, work, dtype, scale=None):
    *tensors, grad_output = tensors
    operands, answer = forward(*tensors, work, scale)
    gradients = TRITON.differentiate(operands, grad_output, *answer, dtype=dtype)
    lengths = tensors[0].shape[2], tensors[1].shape[2]
    mask = torch.from_numpy(count_pairs(work, lengths) > 0).to(grad_output.device)
    expected = exact_gradients(*tensors, grad_output, operands.scale, mask)
    largest = max(t.norm() for t in expected)
    assert not gradients[0][:, :, ~mask.any(-1)].any()
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == (dtype or torch.float32)
        assert gradient.shape == exact.shape
        error = (gradient.double() - exact).norm()
        # Gradients that vanish, as those of scores of one key, are compared with the largest.
        assert error <= 1e-2 * max(exact.norm(), 1e-2 * largest)
    return gradients


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 7])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_rectangles_are_near_float64(name, is_causal, num_tasks, use_kernel):
    calls, case = use_kernel("rectangles"), dict(CASES[name])
    scale, dtype = case.pop("scale", None), case.pop("gradient_dtype", case.get("dtype", BF16))
    lengths = case["queries"], case.get("keys", case["queries"])
    work = plan_work(*lengths, is_causal=is_causal, num_tasks=num_tasks)
    assert_near_float64(make_tensors(**case), work, dtype, scale)
    assert calls == ["rectangles"]


KINDS = pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"heads": 4}, BF16),
        ({"heads": 4, "kv_heads": 1, "batch": 2}, BF16),
        ({"heads": 4, "kv_heads": 2, "dim": 64, "dtype": FP16}, FP16),
        ({"heads": 20, "kv_heads": 10, "batch": 2, "is_transposed": True}, None),
    ],
    ids=str,
)


@LENGTHS
@NAMES
@KINDS
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_gradients_of_visits_are_near_float64(lengths, name, num_tasks, options, dtype, use_kernel):
    calls, work = use_kernel("visits"), find_work(lengths, name, num_tasks)
    tensors = make_tensors(queries=lengths[0], keys=lengths[1], **options)
    assert_near_float64(tensors, work, dtype, scale=0.1)
    assert calls == ["visits"]


@pytest.mark.parametrize("lengths", [(2400, 2400), (1200, 3600), (2412, 2412)], ids=str)
@pytest.mark.parametrize("name", DILATED)
@KINDS
def test_gradients_of_residues_are_near_float64(name, lengths, options, dtype, use_kernel):
    calls, work = use_kernel("residues"), plan_work(*lengths, pattern=DILATED[name])
    tensors = make_tensors(queries=lengths[0], keys=lengths[1], **options)
    gradients = assert_near_float64(tensors, work, dtype, scale=0.1)
    assert len(calls) == 1
    assert all(gradient.is_contiguous() for gradient in gradients)


def every_kernel(*others):
    return pytest.mark.parametrize(
        ("kernel", "options"),
        [
            ("rectangles", {}),
            ("rectangles", {"num_tasks": 3}),
            ("rectangles", {"is_causal": True}),
            ("rectangles", {"is_causal": True, "num_tasks": 3}),
            ("visits", {"pattern": sliding_window(700, 500)}),
            *others,
        ],
        ids=str,
    )


@every_kernel(
    ("visits", {"pattern": bigbird(block=128)}),
    ("visits", {"pattern": documents([0, 999, 3000, 4096])}),
    ("residues", {"pattern": dilated(4096, 4096, 4)}),
)
def test_gradients_are_deterministic(kernel, options, use_kernel, monkeypatch):
    calls = use_kernel(kernel)
    compute, _ = differentiate_by(make_tensors(16, 4096), plan_work(4096, 4096, **options))
    first = compute()
    for number in range(50):
        programs = (132, 131, 97, 64, 33)[number % 5]
        monkeypatch.setattr(launch, "num_processors", lambda _, programs=programs: programs)
        assert all(map(torch.equal, first, compute()))
    assert calls == [kernel.replace("residues", "rectangles")] * 51


@every_kernel()
def test_a_cuda_graph_gives_bitwise_equal_gradients(kernel, options, use_kernel):
    calls = use_kernel(kernel)
    compute, _ = differentiate_by(make_tensors(4, 1000), plan_work(1000, 1000, **options))
    expected = compute()
    compute()  # by the prepared launch, which the capture takes too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = compute()
    for _ in range(3):
        for gradient in gradients:
            gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, gradients))
    assert calls == [kernel] * 3


@pytest.mark.parametrize(
    ("kernel", "tokens", "options"),
    [
        ("rectangles", 200, {"is_causal": True}),
        ("visits", 1000, {"pattern": sliding_window(99, 0)}),
    ],
    ids=str,
)
def test_a_masked_value_that_is_not_finite_reaches_no_query(kernel, tokens, options, use_kernel):
    calls = use_kernel(kernel)
    compute, operands = differentiate_by(
        make_tensors(4, tokens), plan_work(tokens, tokens, **options)
    )
    operands.value[:, :, -1] = torch.nan
    grad_query, *_ = compute()
    assert calls
    assert grad_query[:, :, :-1].isfinite().all()
    assert grad_query[:, :, -1].isnan().all()


@pytest.mark.parametrize("dim", [64, 128])
def test_scratch_memory_is_as_documented(dim, use_kernel):
    """Sums of dQ, 8 bytes per query and head, 4 per block; the state has 128 (kernel-design.md)."""
    calls = use_kernel("rectangles")
    tensors = make_tensors(8, 1000, kv_heads=2, dim=dim)
    compute, operands = differentiate_by(tensors, plan_work(1000, 1000, is_causal=True))
    compute()
    _, peak_bytes = measure_peak_bytes(compute, operands.query.device)
    num_blocks = 8 * 16
    block_bytes = num_blocks * (64 * dim * 4 + 64 * 8 + 4) + 128
    assert calls
    assert peak_bytes == sum(tensor.nbytes for tensor in tensors[:3]) + block_bytes
