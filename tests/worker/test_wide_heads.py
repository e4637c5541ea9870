"""The forward kernel for heads of up to 256 on Hopper GPUs, whose blocks have 64 keys."""

import pytest
import torch

import cqs
from cqs.patterns import causal, dilated, from_mask, sliding_window

pytest.importorskip("triton")

from tests.worker.test_hopper_forward import ON_HOPPER, record_tiles

pytestmark = ON_HOPPER
DIMS = [(256, 256), (192, 128), (136, 200), (64, 256)]
MASK = torch.rand(700, 700, generator=torch.Generator().manual_seed(5)) < 0.4
PATTERNS = {
    "full": None,
    "causal": causal(),
    "window": sliding_window(130, 70),
    "dilated": dilated(700, 700, 3),
    "mask": from_mask(MASK),
}
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def draw(seqlen_q, seqlen_kv, head_dim, value_dim, dtype=torch.bfloat16):
    query = torch.randn(2, 4, seqlen_q, head_dim, device="cuda", dtype=dtype)
    key = torch.randn(2, 2, seqlen_kv, head_dim, device="cuda", dtype=dtype)
    return query, key, torch.randn(2, 2, seqlen_kv, value_dim, device="cuda", dtype=dtype)


def check(tensors, bound=4e-3, **options):
    options["return_lse"] = True
    output, lse = cqs.attention(*tensors, backend="triton", **options)
    exact = cqs.attention(*(each.double() for each in tensors), backend="reference", **options)
    assert (output - exact.output).norm() / exact.output.norm() < bound
    is_live = exact.lse.isfinite()
    assert torch.equal(is_live, lse.isfinite())
    assert (lse - exact.lse)[is_live].abs().max() < 1e-4


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch):
    """Check that the forward kernel for Hopper GPUs computes."""
    chosen = record_tiles(monkeypatch)
    yield
    assert {(tiles.on_hopper, tiles.block) for tiles in chosen} == {(True, 64)}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("num_tasks", [1, 7])
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_results_are_those_of_float64(head_dim, value_dim, num_tasks, name, dtype):
    tensors = draw(700, 700, head_dim, value_dim, dtype)
    check(tensors, BOUNDS[dtype], pattern=PATTERNS[name], num_tasks=num_tasks)


@pytest.mark.parametrize("seqlens", [(65, 1000), (1000, 65), (193, 193), (1, 3000)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_unequal_lengths(seqlens, is_causal):
    check(draw(*seqlens, 256, 256), is_causal=is_causal)


@pytest.mark.parametrize("softcap", [None, 8.0, 30.0])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_score_terms(softcap, has_slopes):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda") if has_slopes else None
    scores = cqs.Scores(softcap=softcap, alibi_slopes=slopes)
    check(draw(600, 600, 256, 256), 8e-3, scores=scores, is_causal=True)


def test_gradients_are_those_of_float64():
    tensors = draw(300, 300, 256, 256)
    exact = [each.double().requires_grad_() for each in tensors]
    leaves = [each.requires_grad_() for each in tensors]
    output = cqs.attention(*leaves, is_causal=True, backend="triton")
    grad_output = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, grad_output)
    expected = torch.autograd.grad(
        cqs.attention(*exact, is_causal=True, backend="reference"), exact, grad_output.double()
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() / other.norm() < 8e-3
