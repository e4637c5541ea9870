"""An output may share neither memory nor a file with an input, nor memory with itself."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import cqs
from cqs.patterns import causal, per_head, sliding_window
from cqs.streaming import open_tensor

SHAPE = (1, 2, 300, 16)
WITHIN = {"memory_budget": 60_000, "device": "cpu"}


@pytest.fixture
def file(tensors, tmp_path, monkeypatch):
    """A file of the working directory that holds the keys, with two other names."""
    monkeypatch.chdir(tmp_path)
    np.save("same.npy", tensors[1].numpy())
    os.symlink("same.npy", "symbolic.npy")
    os.link("same.npy", "hard.npy")
    return "same.npy"


def attend(tensors, out=None, **options):
    return cqs.streaming.attention(*tensors, out=out, **WITHIN | options)


def assert_refused(tensors, out, message="^out must share neither .*query, key and value"):
    with pytest.raises(ValueError, match=message):
        attend(tensors, out)


def mapped(path, mode="r+"):
    return np.load(path, mmap_mode=mode)


WAYS = {
    "map": mapped,
    "part of a map": lambda path: mapped(path)[:, :, :],
    "file": lambda path: replace(open_tensor(path), is_writable=True),
}


@pytest.mark.parametrize("name", ["same.npy", "symbolic.npy", "hard.npy"])
@pytest.mark.parametrize("target", WAYS)
def test_a_file_that_is_read_takes_no_output(tensors, file, target, name):
    before = np.load(file)
    query, _, value = tensors
    for source in WAYS.values():
        key = source(file)
        for inputs in ((query, key, value), (query, value, key), (key, query, value)):
            assert_refused(inputs, WAYS[target](name))
    assert np.array_equal(np.load(file), before)


def test_other_bytes_of_a_file_that_is_read_take_no_output(tensors, tmp_path):
    query, key, value = tensors
    path = tmp_path / "some.safetensors"
    save_file({"query": query, "key": key, "out": torch.zeros(SHAPE)}, path)
    inside, free = (open_tensor(path, name) for name in ("query", "out"))
    raw = np.memmap(path, np.float32, "r+", free.offset, SHAPE)
    for out in (replace(free, is_writable=True), raw):
        assert_refused((inside, key, value), out)
    assert not raw.any()


def test_memory_that_is_read_takes_no_output(tensors):
    query, key, value = tensors
    *interleaved, between = torch.stack([*tensors, torch.zeros(SHAPE)], dim=3).unbind(dim=3)
    for inputs, out in (
        (tensors, value),
        (tensors, key.numpy()),
        ((query, key, value.expand(SHAPE)), value.flip(3).set_(value).view(SHAPE)),
        (interleaved, between),
    ):
        assert_refused(inputs, out)
    bias = torch.zeros(1, 1, 300, 300)
    with pytest.raises(ValueError, match="^out must share neither"):
        out = bias.view(-1)[: query.numel()].view(SHAPE)
        attend(tensors, out, scores=cqs.Scores(bias=bias))


def test_other_memory_of_one_allocation_takes_the_output(tensors):
    whole = torch.stack([*tensors, torch.zeros(SHAPE)])
    for space in (whole, whole.clone().share_memory_()):
        attend(space[:3], space[3])
        assert torch.equal(space[3], attend(tensors))


def test_changes_of_a_copy_on_write_map_stay_in_memory(tensors, file):
    query, key, value = tensors
    out = mapped(file, "c")
    attend((query, mapped(file, "r"), value), out)
    assert torch.equal(torch.from_numpy(out), attend(tensors))
    assert np.array_equal(np.load(file), key.numpy())


@pytest.mark.parametrize(
    "strides",
    [(4, 16, 16, 1), (9600, 0, 16, 1), (9600, 4800, 15, 1), (9600, 1, 2, 1), (1, 3, 4, 2)],
)
def test_elements_that_share_memory_take_no_output(tensors, strides):
    out = torch.zeros(20_000).as_strided(SHAPE, strides)
    assert_refused(tensors, out, "^out must")


def test_elements_in_any_order_take_the_output(tensors):
    space = torch.zeros(40_000)
    for strides in ((9600, 4800, 16, 1), (1, 4800, 1, 300), (1, 1, 32, 2), (7, 20_000, 33, 2)):
        out = space.as_strided(SHAPE, strides)
        attend(tensors, out)
        assert torch.equal(out, attend(tensors))


def test_an_array_that_is_read_only_takes_no_output(tensors):
    out = np.zeros(SHAPE, np.float32)
    out.flags.writeable = False
    assert_refused(tensors, out, "^out must be writable")


def test_a_map_whose_file_was_replaced_is_read_itself(tensors, file):
    query, key, value = tensors
    before, expected = mapped(file, "r"), attend(tensors)
    np.save("new.npy", np.zeros(SHAPE, np.float32))
    os.replace("new.npy", file)
    assert torch.equal(attend((query, before, value)), expected)
    os.unlink(file)
    assert torch.equal(attend((query, before, value)), expected)


def test_a_file_that_replaces_the_output_is_not_written_to(tensors, file):
    """Heads of each pattern are a part of the output, which is opened once for all."""
    pattern, mine = per_head([[causal(), sliding_window(32, 32)]]), b"mine" * 2**14
    out, calls = mapped(file), []

    def replace_file(done, total):
        if not calls:
            Path("mine").write_bytes(mine)
            os.replace("mine", file)
        calls.append(done)

    attend(tensors, out, progress=replace_file, pattern=pattern)
    assert np.array_equal(out, attend(tensors, pattern=pattern))
    assert Path(file).read_bytes() == mine
