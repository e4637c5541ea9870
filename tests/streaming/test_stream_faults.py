"""What goes wrong around a computation within a budget: the right answer or one clear error."""

import itertools
import json
import os

import numpy as np
import pytest
import torch

import cqs
from cqs.executors.streaming.budget import parse_budget
from cqs.streaming import OnDemand, open_tensor
from cqs.worker.memory import measure_peak_bytes

CPU = torch.device("cpu")
SHAPE = (1, 2, 300, 16)
WITHIN = {"memory_budget": 60_000, "device": "cpu"}
BOTH_WAYS = WITHIN | {"memory_budget": 150_000}


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


@pytest.fixture
def maps(tensors, tmp_path, monkeypatch):
    """The same in files of the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, tensor in zip("qkv", tensors, strict=True):
        np.save(name, tensor.numpy())
    return [np.load(f"{name}.npy", mmap_mode="r") for name in "qkv"]


def new_output():
    return np.lib.format.open_memmap("out.npy", "w+", np.float32, SHAPE)


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


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [1, 0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_queries_or_keys_give_what_one_call_gives(lengths, batch, is_causal):
    query, key = (torch.randn(batch, 2, length, 16) for length in lengths)
    options = {"is_causal": is_causal, "return_lse": True}
    within = cqs.streaming.attention(query, key, key, **WITHIN, **options, verify=True)
    for found, expected in zip(within, cqs.attention(query, key, key, **options), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_another_default_device_changes_nothing(tensors, needs_grad):
    leaves = [tensor.requires_grad_(needs_grad) for tensor in tensors]
    expected = cqs.attention(*leaves)
    with torch.device("meta"):
        output = cqs.streaming.attention(*leaves, verify=True, **BOTH_WAYS)
        if needs_grad:
            gradients = torch.autograd.grad(output.sum(), leaves)
            assert all(each.device.type == "cpu" for each in gradients)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_a_function_may_be_a_model(tensors):
    query, key, value = tensors
    layer = torch.nn.Linear(16, 16)
    made = OnDemand(
        lambda batch, head, rows: layer(key[batch, head, rows.start : rows.stop]),
        SHAPE,
        torch.float32,
    )
    output = cqs.streaming.attention(query, made, value, **WITHIN)
    expected = cqs.attention(query, layer(key).detach(), value)
    assert not output.requires_grad
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_an_output_that_is_read_or_written_twice_is_refused(tensors, maps):
    query, key, value = tensors
    overlaps = [
        ((query, key, value), value),
        ((query, key, value), key.numpy()),
        ((query, key, value.expand(1, 2, 300, 16)), value.flip(3).set_(value).view(SHAPE)),
        ((np.load("q.npy", mmap_mode="r+"), key, value), np.load("q.npy", mmap_mode="r+")),
    ]
    for arguments, out in overlaps:
        with pytest.raises(ValueError, match="share neither memory nor a file with query, key"):
            cqs.streaming.attention(*arguments, out=out, **WITHIN)
    with pytest.raises(ValueError, match="overlaps itself"):
        cqs.streaming.attention(*tensors, out=torch.zeros(1, 1, 300, 16).expand(SHAPE), **WITHIN)
    packed = torch.stack([*tensors, torch.zeros(SHAPE)], dim=3).bfloat16()
    *inputs, out = packed.unbind(dim=3)
    with pytest.raises(ValueError, match="share neither memory nor a file with query, key"):
        cqs.streaming.attention(*inputs, out=out, **WITHIN)


def test_options_that_cannot_be_are_named(tensors, monkeypatch):
    for budget in ("1" * 400, "9999999999 TiB"):
        with pytest.raises(ValueError, match="memory_budget must be at most"):
            parse_budget(budget, CPU)
    assert parse_budget("0.1GB", CPU) == 10**8
    for progress in (1, "yes", None):
        with pytest.raises(TypeError, match="progress must be a bool or a function, got"):
            cqs.streaming.attention(*tensors, progress=progress, **WITHIN)
    for device in ("", "gpu", "cpu:-1"):
        with pytest.raises(ValueError, match=f"device must be .*, got '{device}'"):
            cqs.streaming.attention(*tensors, memory_budget=60_000, device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="device must be the CPU .* got cuda:1"):
        cqs.streaming.attention(*tensors, memory_budget=60_000, device="cuda:1")


class Stop(Exception):
    pass


def stop_after(number):
    calls = itertools.count(1)

    def progress(done, total):
        if next(calls) == number:
            raise Stop

    return progress


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
    options = {
        "memory_budget": 200_000,
        "device": "cpu",
        "progress": lambda *done: seen.append(done),
    }
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


@pytest.mark.slow
def test_no_file_stays_open(maps):
    def number():
        return len(os.listdir("/proc/self/fd"))

    before, out = number(), new_output()
    for _ in range(3):
        cqs.streaming.attention(*map(open_tensor, ("q.npy", "k.npy", "v.npy")), out=out, **WITHIN)
        with pytest.raises(Stop):
            cqs.streaming.attention(*maps, out=out, progress=stop_after(3), **WITHIN)
    assert number() <= before + 1, "and the map of the output"


def test_what_holds_scores_computes_few_at_a_time():
    tensor = torch.randn(1, 1, 4096, 16)
    options = {"backend": "reference", "memory_budget": 2**21, "device": "cpu"}
    _, peak = measure_peak_bytes(lambda: cqs.streaming.attention(*[tensor] * 3, **options), CPU)
    assert peak < 2**24 < 4 * 4096**2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_keep_the_budget(dtype):
    """All but what a kernel takes for itself, a MiB or so for each thread."""
    leaves = [torch.randn(1, 2, 4096, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    budget = 2**22
    output = cqs.streaming.attention(*leaves, is_causal=True, memory_budget=budget, device="cpu")
    grad_output = torch.randn_like(output)
    _, peak = measure_peak_bytes(lambda: torch.autograd.grad(output, leaves, grad_output), CPU)
    assert (
        peak - sum(leaf.nbytes for leaf in leaves) < budget + 1.5 * 2**20 * torch.get_num_threads()
    )
