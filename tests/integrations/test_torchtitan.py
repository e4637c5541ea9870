"""Torchtitan's Trainer with attention by cqs has the losses of its own attention."""

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
    with pytest.raises(NotImplementedError, match="out_transform"):
        attend(*tensors, attention_masks=causal(), out_transform=max)
