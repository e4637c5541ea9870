"""Heads that have patterns of their own, within a budget."""

import numpy as np
import pytest
import torch
from streams import Stop, new_output, stop_after

import cqs
from cqs.patterns import causal, global_tokens, per_head, sliding_window
from cqs.streaming import OnDemand

NEAR, AROUND, ALL = sliding_window(30, 5), sliding_window(8, 8) | global_tokens(2), causal()
HEADS = {
    "neighbours alike": (2, [[NEAR, NEAR, NEAR, ALL]]),
    "unequal in the only KV head": (1, [[NEAR, NEAR, ALL, AROUND]]),
    "by batch element": (2, [[NEAR], [ALL]]),
    "by both": (2, [[NEAR, AROUND, ALL, ALL], [ALL, ALL, NEAR, NEAR]]),
}
BUDGET = 180_000


def make(num_kv_heads, seqlen_q, seqlen_kv):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, seqlen_q, 8), (num_kv_heads, seqlen_kv, 8), (num_kv_heads, seqlen_kv, 5)
    return [
        torch.randn(2, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [*zip(HEADS, [(301, 301), (150, 290), (290, 150), (150, 290)], strict=True)],
)
def test_heads_of_unequal_patterns_are_those_of_one_call(name, lengths):
    num_kv_heads, patterns = HEADS[name]
    leaves = make(num_kv_heads, *lengths)
    options = {
        "pattern": per_head(patterns),
        "dropout_p": 0.2 if name == "by both" else 0.0,
        "seed": 3,
        "return_lse": True,
    }
    within = {"memory_budget": BUDGET, "device": "cpu"}
    output, lse = cqs.streaming.attention(*leaves, **options, **within)
    expected, expected_lse = cqs.attention(*leaves, **options)
    detached = [leaf.detach() for leaf in leaves]
    alone, alone_lse = cqs.streaming.attention(*detached, **options, **within, verify=True)
    for found, found_lse in ((output, lse), (alone, alone_lse)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(found_lse, expected_lse, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(each.sin().sum(), leaves) for each in (output, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("number", [9, 30])
def test_unequal_heads_in_files_go_on_bitwise_identically(tmp_path, number):
    num_kv_heads, patterns = HEADS["by both"]
    tensors = [leaf.detach().float() for leaf in make(num_kv_heads, 400, 500)]
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
