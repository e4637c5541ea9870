"""Models of diffusers with attention by cqs equal those with diffusers' own, on any ranks."""

import json
from functools import cache

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusion_models import FAMILIES, SIZES, make_model
from diffusion_ranks import errors_of
from program import run_program

from cqs.integrations.diffusers import register

pytestmark = pytest.mark.slow

register()


def set_cqs(model):
    model.set_attention_backend("cqs")
    return model


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_one_process_equals_native(family, size):
    assert max(errors_of(set_cqs(make_model(family, SIZES[size][0])), family, size)) < 1e-5


@cache
def run_on_ranks(num_ranks):
    return json.loads(run_program("diffusion_ranks.py", num_ranks).splitlines()[-1])


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 5))]
)
def test_ranks_equal_one_process(num_ranks):
    """Models of all families, special cases of some, and a compiled model on two ranks."""
    errors = run_on_ranks(num_ranks)["errors"]
    assert len(errors) >= len(FAMILIES)
    assert not {case: each for case, each in errors.items() if max(each) >= 1e-5}


def test_masks_that_ranks_do_not_support_are_named():
    complaints = dict(run_on_ranks(3)["complaints"])
    assert "length 4 on 3 ranks" in complaints.pop("other backend")
    assert complaints.keys() == {"pairs", "heads", "bias", "other lengths", "few tokens"}
    assert complaints.pop("few tokens").startswith("ValueError: hidden_states must")
    assert all("attn_mask must" in complaint for complaint in complaints.values())
    assert "[1, 1, 8, 8]" in complaints["pairs"] and "-0.5" in complaints["bias"]
    assert "99" in complaints["other lengths"]


def test_every_rank_names_degrees_and_an_order_that_do_not_fit():
    for rank, complaints in enumerate(run_on_ranks(3)["complaints about ranks"]):
        assert "must be the number of ranks, 3, got 2 * 1 = 2" in complaints["few"]
        assert (
            "must have the sizes (2, 1) of ('ring', 'ulysses'), got (3, None)" in complaints["mesh"]
        )
        assert ("rank 0 of the group failed" in complaints["one rank"]) == (rank > 0)
        assert "call model.set_attention_backend('cqs') before" in complaints["order"]


def test_a_compiled_model_is_one_graph():
    model = set_cqs(make_model("Flux", 3))
    model.compile(backend="eager", fullgraph=True)
    assert max(errors_of(model, "Flux", next(iter(SIZES)))) < 1e-5


def attend(backend, tensors, mask, **options):
    """Return the output and gradients of tensors ``[batch, seqlen, heads, head_dim]``."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    with attention_backend(backend):
        output = dispatch_attention_fn(*leaves, attn_mask=mask, **options)
    gradient = torch.randn(output.shape, generator=torch.manual_seed(3), dtype=output.dtype)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def _bias(mask, value):
    return torch.where(mask, 0.0, value).double()


KEYS = torch.arange(9) < torch.tensor([[9], [6]])
PAIRS = torch.rand(2, 3, 7, 9, generator=torch.manual_seed(4)) < 0.6
PAIRS[..., 0] = True
MASKS = {
    "none": None,
    "keys": KEYS,
    "keys of all heads": KEYS[:, None, None],
    "large bias of keys": _bias(KEYS, -10000.0)[:, None, None].expand(-1, 3, -1, -1),
    "bias of -inf": _bias(KEYS, -torch.inf)[:, None, None],
    "the same bias everywhere": torch.full((2, 1, 1, 9), -10000.0, dtype=torch.float64),
    "pairs": PAIRS[0, 0],
    "pairs of each head": PAIRS,
    "nothing masked": torch.ones(2, 1, 1, 9, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_equal_native(mask):
    tensors = [torch.randn(2, n, 3, 8, dtype=torch.float64) for n in (7, 9, 9)]
    found, expected = (attend(name, tensors, MASKS[mask]) for name in ("cqs", "native"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_options_equal_native():
    tensors = [torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (6, 2, 2)]
    options = {"is_causal": True, "scale": 0.7, "enable_gqa": True}
    found, expected = (attend(name, tensors, None, **options) for name in ("cqs", "native"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (torch.full((1, 1, 7, 9), 0.5).triu(), {}, NotImplementedError, "attn_mask.*-0.5"),
        (torch.full((9,), torch.nan), {}, NotImplementedError, "attn_mask.*nan"),
        (torch.ones(2, 9, dtype=torch.int64), {}, TypeError, "attn_mask.*torch.int64"),
        (torch.ones(2, 8).bool(), {}, ValueError, r"attn_mask.*\[2, 8\]"),
        (torch.ones(2, 3, 1, 7, 9).bool(), {}, ValueError, r"attn_mask.*\[2, 3, 1, 7, 9\]"),
        (None, {"is_causal": True}, NotImplementedError, "is_causal.*7 queries and 9 keys"),
    ],
)
def test_what_is_not_supported_is_named(mask, options, error, message):
    tensors = [torch.randn(2, n, 3, 8) for n in (7, 9, 9)]
    with pytest.raises(error, match=message):
        attend("cqs", tensors, mask, **options)


def test_names():
    register("cqs_reference", backend="reference")
    register("cqs_reference", backend="reference")
    tensors = [torch.randn(1, 9, 2, 8) for _ in range(3)]
    found, expected = (attend(name, tensors, None) for name in ("cqs_reference", "native"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name in ("flash", "CQS2"):
        with pytest.raises(ValueError, match=name):
            register(name)
    with pytest.raises(ValueError, match="backend"):
        register("cqs_unknown", backend="unknown")
    assert "cqs_unknown" not in [member.value for member in AttentionBackendName]
