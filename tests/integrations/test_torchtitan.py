"""Torchtitan's Trainer with attention by cqs has the losses of its own attention."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from program import run_program
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask

pytest.importorskip("torchtitan")

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_three_ranks_have_the_losses_of_torchtitan_in_one_process(tmp_path):
    """Packed documents, 4 heads with 2 KV heads, forward, backward and optimizer."""
    run_program("titan_runs.py", tmp_path)
    expected = json.loads((tmp_path / "flex.json").read_text())
    losses = json.loads((tmp_path / "cqs.json").read_text())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(expected) == 3 and expected[-1] < expected[0] - 0.02


def test_what_is_not_supported_raises():
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3 import model_registry

    from cqs.integrations.torchtitan import Attention, convert
    from cqs.patterns import causal

    spec = convert(model_registry("debugmodel"))
    with pytest.raises(ValueError, match="spec .* 'llama3'"):
        convert(spec)
    dims = SimpleNamespace(cp_enabled=True)
    for error, name, options in (
        (ValueError, "context_parallel_load_balancer .*'headtail'", {}),
        (
            NotImplementedError,
            "spmd_backend .*'partial_dtensor'",
            {"context_parallel_load_balancer": None, "spmd_backend": "partial_dtensor"},
        ),
    ):
        with pytest.raises(error, match=name):
            spec.parallelize_fn(None, parallel_dims=dims, parallelism=ParallelismConfig(**options))
    tensors = [torch.randn(1, 5, 2, 16)] * 3
    attend = Attention.Config().build()
    with pytest.raises(NotImplementedError, match="out_transform"):
        attend(*tensors, attention_masks=causal(), out_transform=max)


def dense_flex_attention(query, key, value, *, block_mask, scale, enable_gqa, **_):
    """FlexAttention of a block mask, with its LSE, by the definition."""
    key, value = (
        each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
    )
    mask = create_mask(block_mask.mask_mod, len(query), None, query.shape[2], key.shape[2], "cpu")
    scores = (scale * query @ key.mT).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


def test_gpt_oss_keeps_its_windows_and_sinks(monkeypatch):
    from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod
    from torchtitan.models.gpt_oss import model_registry

    from cqs.integrations.torchtitan import convert
    from cqs.patterns import causal

    monkeypatch.setattr(FlexAttention, "compiled_flex_attn", dense_flex_attention)
    spec = model_registry("debugmodel", attn_backend="flex")
    windows = set()
    for own, ours in zip(spec.model.layers[:2], convert(spec).model.layers[:2], strict=True):
        window = own.attention.sliding_window_size
        windows.add(window)
        masks = [get_causal_mask_mod()]
        if window is not None:
            masks.append(lambda b, h, q, k: q - k < 128)  # noqa: B023
        block_mask = create_block_mask(and_masks(*masks), 1, None, 150, 150, "cpu")
        modules = [each.attention.build() for each in (own, ours)]
        torch.manual_seed(0)
        for parameter in modules[0].parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        torch.nn.init.normal_(modules[0].sinks)
        modules[1].load_state_dict(modules[0].state_dict())
        x, positions, found = torch.randn(1, 150, 256), torch.arange(150)[None], []
        for module, mask in zip(modules, (block_mask, causal()), strict=True):
            output = module(x, mask, positions)
            output.square().mean().backward()
            found.append([output.detach(), *(each.grad for each in module.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))
        assert modules[0].sinks.grad.abs().max() > 1e-4
    assert windows == {None, 128}


def test_layers_get_the_pattern_within_documents():
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3 import model_registry

    from cqs.integrations.torchtitan import convert
    from cqs.patterns import causal, sliding_window

    spec = dataclasses.replace(
        model_registry("debugmodel"), parallelize_fn=lambda model, **_: model
    )
    spec = convert(spec, pattern=sliding_window(2))
    model = spec.parallelize_fn(
        spec.model.build(),
        parallel_dims=SimpleNamespace(cp_enabled=False),
        parallelism=ParallelismConfig(),
    )
    model.init_weights()
    seen = []
    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(
            lambda _, tensors, options: seen.append(options["attention_masks"]), with_kwargs=True
        )
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
    tokens = torch.arange(12).view(2, 6)
    model(tokens, positions=positions)
    model(tokens, positions)
    with pytest.raises(NotImplementedError, match="attention_masks"):
        model(tokens, positions, attention_masks=causal())
    distance = torch.arange(6)[:, None] - torch.arange(6)
    document = (positions == 0).cumsum(1)
    expected = (document[:, :, None] == document[:, None]) & (distance >= 0) & (distance <= 2)
    assert len(seen) == 2 * len(model.layers)
    for pattern in seen:
        masks = [torch.from_numpy(pattern.head(row, 0).to_mask(6, 6)) for row in range(2)]
        assert torch.equal(torch.stack(masks), expected)
