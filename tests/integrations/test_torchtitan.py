"""Torchtitan's Trainer with attention by cqs has the losses of its own attention."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.pages import ROOT

pytest.importorskip("torchtitan")

pytestmark = pytest.mark.slow


def test_three_ranks_have_the_losses_of_torchtitan_in_one_process(tmp_path):
    """Packed documents, 4 heads with 2 KV heads, forward, backward and optimizer."""
    paths = map(str, (ROOT, ROOT / "tests" / "distributed", *sys.path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests/integrations/titan_runs.py", tmp_path]
    subprocess.run(command, env=environment, timeout=600, check=True)
    expected = json.loads((tmp_path / "flex.json").read_text())
    found = json.loads((tmp_path / "cqs.json").read_text())
    assert len(found) == len(expected) == 6
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert expected[-1] < expected[0] - 0.05


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
    from torchtitan.models.muse_glimmer import model_registry as with_windows

    with pytest.raises(NotImplementedError, match=r"windows .*128.*pattern None"):
        convert(with_windows("debugmodel"))
    with pytest.raises(NotImplementedError, match="out_transform"):
        attend(*tensors, attention_masks=causal(), out_transform=max)


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
            lambda _, tensors, options: seen.append((tensors, options)), with_kwargs=True
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
    for _, options in seen:
        pattern = options["attention_masks"]
        masks = [torch.from_numpy(pattern.head(row, 0).to_mask(6, 6)) for row in range(2)]
        assert torch.equal(torch.stack(masks), expected)
    tensors, _ = seen[-1]
    query, key, value = (each.transpose(1, 2) for each in tensors)
    mask = expected[:, None]
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    found = layer.attention.inner_attention(*tensors, attention_masks=pattern)
    assert torch.allclose(found.transpose(1, 2), dense, atol=1e-5)
