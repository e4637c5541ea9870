"""The forward kernels for Hopper GPUs: three consumers for heads up to 64, and wide heads."""

import pytest
import torch

import cqs
from cqs.patterns import causal, dilated, documents, from_mask, sliding_window, strided

pytest.importorskip("triton")

from cqs.worker.triton import launch
from tests.worker.hopper import BF16, FP16, exact_gradients, make_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="these kernels are for Hopper GPUs",
    ),
]

MASK = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(5)) < 0.4
PATTERNS = {
    "full": None,
    "causal": causal(),
    "window": sliding_window(200, 70),
    "documents": documents([0, 100, 700, 1000]),
    "strided": strided(16),
    "dilated": dilated(1000, 1000, 3),
    "mask": from_mask(MASK),
}
BOUNDS = {BF16: 4e-3, FP16: 6e-4}


def draw(seqlen_q, seqlen_kv, head_dim, value_dim, dtype=BF16):
    query = torch.randn(2, 4, seqlen_q, head_dim, device="cuda", dtype=dtype)
    key = torch.randn(2, 2, seqlen_kv, head_dim, device="cuda", dtype=dtype)
    return query, key, torch.randn(2, 2, seqlen_kv, value_dim, device="cuda", dtype=dtype)


def check(tensors, bound=4e-3, **options):
    options["return_lse"] = True
    output, lse = cqs.attention(*tensors, backend="triton", **options)
    exact = cqs.attention(*(tensor.double() for tensor in tensors), backend="reference", **options)
    assert (output - exact.output).norm() / exact.output.norm() < bound
    is_live = exact.lse.isfinite()
    assert torch.equal(is_live, lse.isfinite())
    assert (lse - exact.lse)[is_live].abs().max() < 1e-4


@pytest.fixture(autouse=True)
def _kernel_of_each_width(monkeypatch):
    """Let calls of every size have three consumers, and check which kernels compute."""
    monkeypatch.setattr(launch, "_MIN_ITEMS_OF_THREE", 0)
    monkeypatch.setattr(launch, "_suits_three_consumers", lambda *_: True)
    choose, chosen = launch._choose_forward_lists, []

    def choose_and_record(operands, *, packed):
        tiles, lists = choose(operands, packed=packed)
        chosen.append((max(operands.query.shape[-1], operands.value.shape[-1]), tiles))
        return tiles, lists

    monkeypatch.setattr(launch, "_choose_forward_lists", choose_and_record)
    yield
    assert chosen
    for width, tiles in chosen:
        assert tiles.on_hopper
        assert tiles.options["CONSUMERS"] == 3 if width <= 64 else tiles.block == 64


WIDTHS = (64, 64), (40, 40), (256, 256), (192, 128), (136, 200), (64, 256)
CASES = [  # three consumers, for values of up to 64, read no bits of masks
    (*widths, name) for widths in WIDTHS for name in PATTERNS if name != "mask" or widths[1] > 64
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("num_tasks", [1, 7])
@pytest.mark.parametrize(("head_dim", "value_dim", "name"), CASES)
def test_results_are_those_of_float64(head_dim, value_dim, num_tasks, name, dtype):
    tensors = draw(1000, 1000, head_dim, value_dim, dtype)
    check(tensors, BOUNDS[dtype], pattern=PATTERNS[name], num_tasks=num_tasks)


@pytest.mark.parametrize("lengths", [(65, 1000), (1000, 65), (193, 193), (1, 3000)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_unequal_lengths_and_strides(head_dim, is_causal, lengths):
    *tensors, _ = make_tensors(3, *lengths, 1, head_dim, is_transposed=True)
    check(tensors, is_causal=is_causal)


def test_sinks_and_values_that_are_not_finite():
    query, key, value = draw(700, 700, 64, 64)
    check((query, key, value), scores=cqs.Scores(sinks=torch.randn(4, device="cuda")))
    value[0, 1, 300, 5] = torch.nan
    output = cqs.attention(query, key, value, backend="triton")
    assert output[0, 2:, :, 5].isnan().all()
    assert output.isnan().sum() == 2 * 700


@pytest.mark.parametrize("softcap", [None, 8.0, 30.0])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_score_terms_of_wide_heads(softcap, has_slopes):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda") if has_slopes else None
    scores = cqs.Scores(softcap=softcap, alibi_slopes=slopes)
    check(draw(600, 600, 256, 256), 8e-3, scores=scores, is_causal=True)


def test_gradients_of_wide_heads_are_those_of_float64():
    *tensors, grad_output = make_tensors(4, 300, kv_heads=2, dim=256, batch=2)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = cqs.attention(*leaves, is_causal=True, backend="triton")
    gradients = torch.autograd.grad(output, leaves, grad_output)
    mask = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    expected = exact_gradients(*tensors, grad_output, 256**-0.5, mask)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() / other.norm() < 8e-3
