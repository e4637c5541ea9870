"""Tensors in memory, in files and made on demand: the answer is that of one call."""

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from option_table import least
from safetensors.torch import save_file
from score_cases import Drawn, assert_tracks_definition, compute_by
from streams import go_on_after, new_output
from support.exact import exact_answer, tensors_of

import cqs
from benchmarks.cases import CASES
from cqs.executors.streaming import engine, transfers
from cqs.executors.streaming.budget import parse_budget
from cqs.patterns import sliding_window
from cqs.scheduler.machines import MACHINES
from cqs.streaming import InFile, OnDemand, Pass, Resumable, make_stream_plan, open_tensor
from cqs.worker import BACKENDS
from cqs.worker.memory import measure_peak_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def arrays(tmp_path):
    """Query, key and value as memory maps, and a map for the output."""
    generator = np.random.default_rng(0)
    mapped = []
    for name, shape in zip("qkv", [(2, 4, 500, 16), (2, 2, 700, 16), (2, 2, 700, 8)], strict=True):
        np.save(tmp_path / name, generator.standard_normal(shape).astype(np.float32))
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    return [*mapped, new_output((2, 4, 500, 8), tmp_path / "out.npy")]


def attend(given, *, memory_budget=200_000, **options):
    return cqs.streaming.attention(*given, memory_budget=memory_budget, device="cpu", **options)


def assert_attends(given, answer, **options):
    """Compare with one call for the same arrays in memory."""
    expected = cqs.attention(*(torch.tensor(array) for array in given), **options)
    torch.testing.assert_close(torch.as_tensor(answer), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_exact(case, device):
    problem = case.make(torch.float64)
    options = {"is_causal": case.is_causal, "scale": case.scale, "return_lse": True}
    attend = partial(cqs.streaming.attention, *tensors_of(problem), device=device, **options)
    output, lse = attend(memory_budget=least(attend, "memory_budget"), verify=True)
    exact = exact_answer(problem)
    torch.testing.assert_close(output, exact.output, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, exact.lse, atol=1e-10, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_dtype_tracks_exact_with_gradients(device, dtype, is_pinned):
    problem = CASES[8].make(dtype)
    if is_pinned:
        names = "query", "key", "value"
        problem = replace(problem, **{each: getattr(problem, each).pin_memory() for each in names})
    drawn = Drawn(problem, random.Random(0))

    def compute(memory_budget):
        attend = partial(cqs.streaming.attention, device=device, memory_budget=memory_budget)
        return compute_by(attend, problem, drawn)

    output, _, *gradients = compute(least(compute, "memory_budget"))
    assert all(each.dtype == dtype and each.device.type == "cpu" for each in gradients)
    assert_tracks_definition((output, None, *gradients), problem, drawn, slack=4)


@pytest.mark.gpu
@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("share", [2, 4, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_peak_is_the_predicted_one_and_below_the_budget(which, share, is_causal):
    shape = 1, 4, 2**17, 128
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).half().requires_grad_(which != Pass.FORWARD)
        for _ in range(3)
    ]
    budget = 4 * leaves[0].numel() * 2 // share
    options = {"memory_budget": budget, "is_causal": is_causal}
    torch.cuda.empty_cache()
    output, peak = measure_peak_bytes(
        lambda: cqs.streaming.attention(*leaves, **options), torch.device("cuda")
    )
    passes = [Pass.FORWARD]
    if which != Pass.FORWARD:
        passes = [Pass.QUERY_GRADIENTS, Pass.KEY_GRADIENTS]
        grad_output = torch.randn(shape, generator=generator).half()
        _, peak = measure_peak_bytes(
            lambda: torch.autograd.grad(output, leaves, grad_output), torch.device("cuda")
        )
    problem = cqs.problem.check_problem(*leaves, is_causal=is_causal)
    predicted = max(
        make_stream_plan(
            shape[2], shape[2], problem.shape, budget=budget, is_causal=is_causal, which=each
        ).peak_bytes
        for each in passes
    )
    assert peak <= budget
    assert 0.95 * predicted <= peak <= 1.05 * predicted


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize(("share", "kv_heads"), [(2, 4), (16, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_of_libraries_keep_the_budget(backend, share, kv_heads, is_causal):
    leaves = [
        torch.randn(1, heads, 40_000, 128, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    device = torch.device("cuda")
    sample = (leaf[:, :, :256].to(device) for leaf in leaves)
    if reason := BACKENDS[backend].why_not(*sample):
        pytest.skip(reason)
    budget = 4 * leaves[0].nbytes // share
    options = {"memory_budget": budget, "is_causal": is_causal, "backend": backend}
    output, peak = measure_peak_bytes(lambda: cqs.streaming.attention(*leaves, **options), device)
    assert peak <= budget
    grad_output = torch.randn_like(output)
    _, peak = measure_peak_bytes(lambda: torch.autograd.grad(output, leaves, grad_output), device)
    assert peak <= budget


def test_files_are_read_and_written_without_being_mapped(arrays, tmp_path):
    *mapped, out = arrays
    assert attend(mapped, out=out, verify=True) is out
    assert_attends(mapped, out)
    path = tmp_path / "raw"
    path.write_bytes(b"head" + np.ascontiguousarray(mapped[0]).tobytes())
    query = InFile(path, (2, 4, 500, 16), torch.float32, 4)
    assert_attends(mapped, attend((query, *mapped[1:])))


def test_views_of_maps_are_found_in_their_files(arrays, tmp_path):
    query, key, value, _ = arrays
    wide = new_output((2, 8, 500, 16), tmp_path / "wide.npy")
    wide[:] = 7
    wide[:, 1::2] = query
    assert_attends(
        (query[1:], key[1:], value[1:]),
        attend((wide[1:, 1::2], key[1:], np.asfortranarray(value[1:]))),
    )
    changed = np.load(tmp_path / "q.npy", mmap_mode="c")
    changed[:] = 0
    assert_attends((np.zeros_like(query), key, value), attend((changed, key, value)))


def test_safetensors_and_functions(tmp_path):
    """The function may be a model."""
    query, key, value = (torch.randn(1, 2, 300, 16) for _ in range(3))
    save_file({"query": query, "others": key}, tmp_path / "some.safetensors")
    layer = torch.nn.Linear(16, 16)
    found = attend(
        [
            open_tensor(tmp_path / "some.safetensors", "query"),
            open_tensor(f"{tmp_path}/some.safetensors:others"),
            OnDemand(lambda b, h, rows: layer(value[b, h, rows.start : rows.stop]), *LIKE_VALUE),
        ],
        is_causal=True,
    )
    assert not found.requires_grad
    arrays = [each.detach().numpy() for each in (query, key, layer(value))]
    assert_attends(arrays, found, is_causal=True)
    wrong = OnDemand(lambda batch, head, rows: value[0, 0, :3], *LIKE_VALUE)
    with pytest.raises(
        ValueError, match=r"must return \(300, 16\) torch.float32 for 300 rows, got"
    ):
        attend((query, key, wrong))


LIKE_VALUE = (1, 2, 300, 16), torch.float32


@pytest.mark.parametrize(("number", "least_share"), [(1, 0), (17, 0.05)], ids=["1", "17"])
def test_what_was_stopped_goes_on_bitwise_identically(arrays, tmp_path, number, least_share):
    *mapped, out = arrays
    share = go_on_after(number, mapped, mapped, out, (60_000, 60_000), is_causal=True)
    assert share > least_share, "begins where the other ended"
    assert sorted(os.listdir(tmp_path)) == ["k.npy", "out.npy", "q.npy", "v.npy"]


def test_a_killed_process_goes_on_bitwise_identically(arrays, tmp_path):
    *mapped, out = arrays
    program = f"""
        import itertools, os, numpy as np, cqs
        q, k, v = (np.load(name + ".npy", mmap_mode="r") for name in "qkv")
        out, calls = np.load("out.npy", mmap_mode="r+"), itertools.count(1)
        def progress(done, total):
            if next(calls) == 20:
                os.kill(os.getpid(), {signal.SIGKILL})
        options = dict(memory_budget=60_000, device="cpu", progress=progress)
        cqs.streaming.attention(q, k, v, out=cqs.streaming.Resumable(out, "run"), **options)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    assert b"position" in (tmp_path / "run" / "cqs-resume").read_bytes()
    attend(mapped, memory_budget=60_000, out=Resumable(out, tmp_path / "run"))
    assert np.array_equal(out, attend(mapped, memory_budget=60_000))


def test_files_that_change_or_shrink_meanwhile_are_noticed(arrays, tmp_path):
    *mapped, out = arrays

    def touch(done, total):
        os.utime(tmp_path / "k.npy", (0, 0))

    def shrink(done, total):
        os.truncate(tmp_path / "v.npy", 500)

    for progress, message in ((touch, "an input file was changed"), (shrink, "cut short while")):
        with pytest.raises(OSError, match=message):
            attend(mapped, memory_budget=60_000, out=out, progress=progress)
    with pytest.raises(ValueError, match=r"v.npy' is cut short: 500 of 89728 bytes"):
        attend(mapped)


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_full_disk_is_an_error_and_nothing_half_written_counts(
    request, arrays, tmp_path, monkeypatch, is_staged
):
    """Also where another thread writes."""
    if is_staged:
        request.getfixturevalue("cpu_as_gpu")
        monkeypatch.setattr(transfers, "_STAGING_BYTES", 1000)
    *mapped, out = arrays
    write, left = os.pwrite, [30_000]

    def write_until_full(descriptor, view, place):
        left[0] -= len(view)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, view[:1000], place)

    options = {"memory_budget": 150_000, "out": Resumable(out, tmp_path / "run")}
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write_until_full)
        with pytest.raises(OSError, match="No space left"):
            attend(mapped, **options)
    attend(mapped, **options)
    assert np.array_equal(out, attend(mapped, memory_budget=150_000))


def test_wrong_arguments_are_named(arrays, tmp_path, monkeypatch):
    *mapped, out = arrays
    q, k, v = mapped
    read_only = np.load(tmp_path / "out.npy", mmap_mode="r")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, error, message in (
        ({"memory_budget": 100}, ValueError, "memory_budget must be at least .* got 100"),
        ({"memory_budget": "much"}, ValueError, "must be like '8GiB'"),
        ({"memory_budget": "9999999999 TiB"}, ValueError, "memory_budget must be at most"),
        ({"memory_budget": 0}, ValueError, "at least 1, got 0"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget must be an integer"),
        ({"out": read_only}, ValueError, "out must be writable"),
        ({"out": out[:, :, 1:]}, ValueError, r"out must be \[2, 4, 500, 8\]"),
        ({"out": "file"}, TypeError, "out must be a tensor"),
        ({"device": "meta"}, NotImplementedError, "the CPU or a GPU"),
        ({"device": "cpu:-1"}, ValueError, "device must be .*, got 'cpu:-1'"),
        ({"device": "cuda:1"}, NotImplementedError, "device must be the CPU .* got cuda:1"),
        ({"executor": "ray"}, TypeError, "executor"),
        ({"backend": "cudnn"}, NotImplementedError, "CUDA"),
        ({"progress": None}, TypeError, "progress must be a bool or a function, got None"),
        ({"value": [1]}, TypeError, "value must be a tensor, a NumPy array"),
        ({"key": k.astype(">f4")}, ValueError, "key must be an array that PyTorch can share"),
        ({"value": v[:, :, ::-1]}, ValueError, "value must be an array that PyTorch can share"),
        ({"value": v[0]}, ValueError, "value must be .batch, num_heads, seqlen, head_dim"),
        ({"query": torch.tensor(q).requires_grad_(), "out": out}, ValueError, "gradients"),
        ({"scores": cqs.Scores(torch.zeros(4, dtype=int))}, TypeError, "sinks must be float64"),
    ):
        arguments = {"query": q, "key": k, "value": v, "memory_budget": "1MiB", "device": "cpu"}
        with pytest.raises(error, match=message):
            cqs.streaming.attention(**arguments | options)
    for name, message in (("q.npy:x", "No such file"), ("text.npy", "cannot read")):
        (tmp_path / "text.npy").write_text("no array")
        with pytest.raises((ValueError, OSError), match=re.escape(message)):
            open_tensor(tmp_path / name)


def test_budgets_are_bytes_or_text():
    device = torch.device("cpu")
    assert parse_budget("2 GiB", device) == 2**31 == parse_budget(2**31, device)
    assert parse_budget("1.5kb", device) == 1500 and parse_budget("0.1GB", device) == 10**8
    assert 2**20 < parse_budget("auto", device) < 2**50


def resident_bytes(key):
    """Return a number of bytes of this process's status, such as its peak, ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", status)[1])


@pytest.mark.slow
def test_a_long_sequence_needs_no_memory_but_the_budget(tmp_path):
    """Of 4 files of 48 MiB each; the first call imports modules."""
    *outputs, out = (new_output((1, 2, 98304, 64), tmp_path / f"{name}.npy") for name in "qkvo")
    mapped = [np.load(output.filename, mmap_mode="r")[:, :, :] for output in outputs]
    options = {"pattern": sliding_window(512, 0), "out": out, "memory_budget": "16MiB"}
    for _ in range(2):
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present
        attend(mapped, **options)
        growth = resident_bytes("VmHWM") - before
    assert growth < 24 * 2**20


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Copies through staging buffers, with the CPU as a GPU that has always done everything."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **o: empty(*shape, **o))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *device: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Mock())
    monkeypatch.setitem(engine._COPIES, "cpu", transfers.GpuCopies)
    monkeypatch.setitem(MACHINES, "CPU", MACHINES["H200"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece_bytes", "is_pinned"), [(1000, False), (1000, True), (10**6, False)]
)
def test_pieces_of_pinned_memory_take_turns(
    arrays, monkeypatch, cpu_as_gpu, piece_bytes, is_pinned
):
    monkeypatch.setattr(transfers, "_STAGING_BYTES", piece_bytes)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    *mapped, out = arrays
    leaves = [torch.tensor(array, requires_grad=True) for array in mapped]
    options = {"memory_budget": 150_000, "is_causal": True}
    attend(mapped, out=out, **options)
    output = attend(leaves, **options)
    expected = cqs.attention(*leaves, is_causal=True)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(out), expected.detach(), atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad(each.sin().sum(), leaves) for each in (output, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_budget_below_that_of_the_backward_pass_is_refused_before_the_forward_pass():
    given = [torch.randn(1, 8, 500, 64) for _ in range(3)]
    attend(given, memory_budget=300_000)
    given[0].requires_grad_()
    with pytest.raises(ValueError, match="memory_budget must be .* backward pass, got 300000"):
        attend(given, memory_budget=300_000)
