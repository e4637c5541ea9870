"""Query, key and value of one shape, in memory and in files."""

import numpy as np
import pytest
import torch


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 300, 16, generator=generator) for _ in range(3)]


@pytest.fixture
def maps(request, tmp_path, monkeypatch):
    """Memory maps of files in the working directory; a module may have another ``SHAPE``."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name in "qkv":
        np.save(name, generator.standard_normal(request.module.SHAPE).astype(np.float32))
    return [np.load(f"{name}.npy", mmap_mode="r") for name in "qkv"]
