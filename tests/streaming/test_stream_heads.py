"""Heads that have patterns of their own, within a budget."""

import numpy as np
import pytest
import torch
from streams import Stop, new_output, stop_after

import cqs
from cqs.patterns import causal, global_tokens, per_head, sliding_window
from cqs.streaming import OnDemand

NEAR, AROUND, ALL = sliding_window(30, 5), sliding_window(8, 8) | global_tokens(2), causal()


@pytest.mark.parametrize("number", [9, 30])
def test_unequal_heads_in_files_go_on_bitwise_identically(tmp_path, number):
    patterns = [[NEAR, AROUND, ALL, ALL], [ALL, ALL, NEAR, NEAR]]
    tensors = [torch.randn(2, *shape) for shape in ((4, 400, 8), (2, 500, 8), (2, 500, 5))]
    query, key, value = tensors
    for name, tensor in (("query", query), ("key", key)):
        np.save(tmp_path / f"{name}.npy", tensor)
    sources = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("query", "key")]
    sources.append(
        OnDemand(lambda b, h, r: value[b, h, r.start : r.stop], value.shape, value.dtype)
    )
    out = new_output((*query.shape[:3], 5), tmp_path / "output.npy")
    options = {"pattern": per_head(patterns), "device": "cpu", "return_lse": True}
    whole, whole_lse = cqs.streaming.attention(*tensors, memory_budget=40_000, **options)
    options |= {"out": out, "resume": tmp_path / "run"}
    with pytest.raises(Stop):
        cqs.streaming.attention(
            *sources, memory_budget=40_000, progress=stop_after(number), **options
        )
    seen = []
    options["progress"] = lambda *done: seen.append(done)
    _, lse = cqs.streaming.attention(*sources, memory_budget=10**6, **options)
    assert np.array_equal(out, whole) and torch.equal(lse, whole_lse)
    assert seen[-1][0] == seen[-1][1]
    if number == 30:
        assert seen[0][0] > seen[-1][0] / 4, "begins where the other ended"
    assert not (tmp_path / "run").exists()
