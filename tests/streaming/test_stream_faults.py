"""What goes wrong around a computation within a budget: the right answer or one clear error."""

import itertools
import json
import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from streams import Stop, new_output, stop_after

import cqs
from cqs.streaming import OnDemand, Resumable, open_tensor
from cqs.worker.memory import measure_peak_bytes

CPU = torch.device("cpu")
SHAPE = (1, 2, 300, 16)
WITHIN = {"memory_budget": 60_000, "device": "cpu"}
BOTH_WAYS = WITHIN | {"memory_budget": 150_000}


def test_a_query_may_be_learned_while_the_rest_is_given(tensors, maps):
    query, key, value = tensors
    leaves = [query.clone().requires_grad_() for _ in range(2)]
    within = cqs.streaming.attention(leaves[0], key.numpy(), np.asfortranarray(value), **BOTH_WAYS)
    resident = cqs.attention(leaves[1], key, value)
    torch.testing.assert_close(within, resident, atol=1e-6, rtol=1e-5)
    for output in (within, resident):
        output.sin().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=1e-6, rtol=1e-5)
    made = OnDemand(lambda batch, head, rows: key[batch, head, rows], SHAPE, torch.float32)
    for elsewhere in (maps[1], open_tensor("k.npy"), made):
        with pytest.raises(ValueError, match="must all be in memory"):
            cqs.streaming.attention(leaves[0], elsewhere, value, **BOTH_WAYS)


def damaged(change):
    entry = {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [0, 4 * 300 * 32]} | change
    header = json.dumps({"query": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * 300 * 32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        damaged({})[:50],
        damaged({})[:-1],
        damaged({"data_offsets": [-16, 4 * 300 * 32 - 16]}),
        damaged({"data_offsets": [0, 8]}),
        damaged({"shape": [1, 2, -300, 16]}),
        damaged({"shape": [1, 2, 300.0, 16]}),
        damaged({"dtype": "I32"}),
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_damaged_safetensors_are_refused(content, tmp_path):
    path = tmp_path / "some.safetensors"
    path.write_bytes(damaged({}))
    assert open_tensor(path, "query").shape == SHAPE
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some.safetensors' has no tensor 'query' to read"):
        open_tensor(path, "query")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_shortage_in_the_middle_counts_no_pair_twice(error):
    """On the CPU PyTorch raises but a RuntimeError."""
    tensor = torch.randn(1, 2, 1500, 16)
    calls, seen, fails = itertools.count(), [], {11}

    def read(batch, head, rows):
        if next(calls) in fails:
            raise error(message)
        return tensor[batch, head, rows.start : rows.stop]

    made = OnDemand(read, tensor.shape, tensor.dtype)
    options = WITHIN | {"memory_budget": 200_000, "progress": lambda *done: seen.append(done)}
    message = "DefaultCPUAllocator: can't allocate memory"
    output = cqs.streaming.attention(tensor, made, tensor, **options)
    torch.testing.assert_close(output, cqs.attention(*[tensor] * 3), atol=1e-6, rtol=1e-5)
    assert any(later <= earlier for (earlier, _), (later, _) in itertools.pairwise(seen)), "again"
    assert seen[-1] == (2 * 1500**2,) * 2 and max(seen) == seen[-1]
    calls, fails = itertools.count(), range(100)
    with pytest.raises(error, match="can't allocate"):
        cqs.streaming.attention(tensor, made, tensor, **options)
    if error is RuntimeError:
        calls, message = itertools.count(), "of another kind"
        with pytest.raises(error, match=message):
            cqs.streaming.attention(tensor, made, tensor, **options)
        assert next(calls) == 1


def test_no_file_stays_open(maps, monkeypatch):
    """After runs to the end, some blocks, and an error at the beginning."""

    def number():
        return len(os.listdir("/proc/self/fd"))

    before, out = number(), new_output(SHAPE)
    for _ in range(3):
        cqs.streaming.attention(*map(open_tensor, ("q.npy", "k.npy", "v.npy")), out=out, **WITHIN)
        with pytest.raises(Stop):
            cqs.streaming.attention(*maps, out=out, progress=stop_after(3), **WITHIN)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
            cqs.streaming.attention(*maps, out=Resumable(out, "run"), **WITHIN)
    assert number() <= before + 1, "and the map of the output"
    assert not os.path.exists("run")


def test_what_holds_scores_computes_few_at_a_time():
    tensor = torch.randn(1, 1, 4096, 16)
    options = {"backend": "reference", "memory_budget": 2**21, "device": "cpu"}
    _, peak = measure_peak_bytes(lambda: cqs.streaming.attention(*[tensor] * 3, **options), CPU)
    assert peak < 2**24 < 4 * 4096**2


@pytest.mark.slow
def test_gradients_keep_the_budget():
    """All but what a kernel takes for itself, a MiB or so for each thread."""
    leaves = [torch.randn(1, 2, 4096, 64, requires_grad=True) for _ in range(3)]
    budget = 2**22
    output = cqs.streaming.attention(*leaves, is_causal=True, memory_budget=budget, device="cpu")
    grad_output = torch.randn_like(output)
    _, peak = measure_peak_bytes(lambda: torch.autograd.grad(output, leaves, grad_output), CPU)
    room = budget + 1.5 * 2**20 * torch.get_num_threads()
    assert peak - sum(leaf.nbytes for leaf in leaves) < room
