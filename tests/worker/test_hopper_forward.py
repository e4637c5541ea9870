"""The forward kernel of three consumers for heads of 64 on Hopper GPUs."""

import pytest
import torch

import cqs
from cqs.patterns import causal, documents, sliding_window, strided

pytest.importorskip("triton")

from cqs.worker.triton import launch

ON_HOPPER = pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="this kernel is for Hopper GPUs",
    ),
]

PATTERNS = {
    "full": None,
    "causal": causal(),
    "window": sliding_window(200, 70),
    "documents": documents([0, 100, 700, 1000]),
    "strided": strided(16),
}


def record_tiles(monkeypatch):
    """Return a list that gets the tiles of each forward pass."""
    chosen = []
    choose = launch._choose_forward_lists

    def choose_and_record(operands, *, packed):
        tiles, lists = choose(operands, packed=packed)
        chosen.append(tiles)
        return tiles, lists

    monkeypatch.setattr(launch, "_choose_forward_lists", choose_and_record)
    return chosen


@pytest.fixture(autouse=True)
def _three_consumers(monkeypatch):
    """Let calls of every size use them, and check that they do."""
    monkeypatch.setattr(launch, "_MIN_ITEMS_OF_THREE", 0)
    monkeypatch.setattr(launch, "_suits_three_consumers", lambda *_: True)
    chosen = record_tiles(monkeypatch)
    yield
    assert {tiles.options["CONSUMERS"] for tiles in chosen} == {3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("num_tasks", [1, 7])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_results_are_those_of_float64(name, dtype, num_tasks, head_dim):
    pattern = PATTERNS[name]
    query = torch.randn(2, 4, 1000, head_dim, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 2, 2, 1000, head_dim, device="cuda", dtype=dtype)
    options = {"pattern": pattern, "num_tasks": num_tasks, "return_lse": True}
    output, lse = cqs.attention(query, key, value, backend="triton", **options)
    expected, expected_lse = cqs.attention(
        query.double(), key.double(), value.double(), backend="reference", **options
    )
    error = (output - expected).norm() / expected.norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 6e-4)
    assert (lse - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize("seqlens", [(65, 1000), (1000, 65), (193, 193), (1, 3000)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_unequal_lengths_and_strides(seqlens, is_causal):
    rows, columns = seqlens
    query = torch.randn(1, rows, 3, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = torch.randn(2, 1, columns, 1, 64, device="cuda", dtype=torch.bfloat16).transpose(
        2, 3
    )
    output = cqs.attention(query, key, value, is_causal=is_causal, backend="triton")
    expected = cqs.attention(
        query.double(), key.double(), value.double(), is_causal=is_causal, backend="reference"
    )
    assert (output - expected).norm() / expected.norm() < 4e-3


def test_sinks_and_values_that_are_not_finite():
    query = torch.randn(1, 2, 700, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 2, 700, 64, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(2, device="cuda")
    scores = cqs.Scores(sinks=sinks)
    output = cqs.attention(query, key, value, scores=scores, backend="triton")
    expected = cqs.attention(
        query.double(), key.double(), value.double(), scores=scores, backend="reference"
    )
    assert (output - expected).norm() / expected.norm() < 4e-3
    value[0, 1, 300, 5] = torch.nan
    output = cqs.attention(query, key, value, backend="triton")
    assert output[0, 1, :, 5].isnan().all()
    assert output.isnan().sum() == 700
