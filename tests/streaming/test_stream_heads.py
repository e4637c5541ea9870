"""Heads that have patterns of their own, within a budget."""

import numpy as np
import pytest
import torch
from streams import go_on_after, new_output

from cqs.patterns import causal, global_tokens, per_head, sliding_window
from cqs.streaming import OnDemand

NEAR, AROUND, ALL = sliding_window(30, 5), sliding_window(8, 8) | global_tokens(2), causal()


@pytest.mark.parametrize(("number", "least_share"), [(9, 0), (30, 0.25)], ids=["9", "30"])
def test_unequal_heads_in_files_go_on_bitwise_identically(tmp_path, number, least_share):
    pattern = per_head([[NEAR, AROUND, ALL, ALL], [ALL, ALL, NEAR, NEAR]])
    query, key, value = (torch.randn(2, *of) for of in ((4, 400, 8), (2, 500, 8), (2, 500, 5)))
    for name, tensor in (("query", query), ("key", key)):
        np.save(tmp_path / f"{name}.npy", tensor)
    sources = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("query", "key")]
    sources.append(
        OnDemand(lambda b, h, r: value[b, h, r.start : r.stop], value.shape, value.dtype)
    )
    out, budgets = new_output((*query.shape[:3], 5), tmp_path / "output.npy"), (40_000, 10**6)
    share = go_on_after(number, (query, key, value), sources, out, budgets, pattern=pattern)
    assert share > least_share, "begins where the other ended"
    assert not (tmp_path / "run").exists()
