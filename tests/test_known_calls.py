"""Calls that are known from an earlier call give the results and errors of the general path."""

import logging
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import cqs
from cqs.executors import known_calls, one_call
from cqs.patterns import dilated, documents, from_mask, per_head, sliding_window, strided
from cqs.worker.backends import BACKENDS

MASK = torch.rand(1, 1, 70, 70, generator=torch.Generator().manual_seed(3)) < 0.3
PATTERNS = {
    "dense": None,
    "window": sliding_window(9, 2),
    "dilated": dilated(70, 70, 3),
    "documents": documents([0, 13, 14, 70]),
    "mask": from_mask(MASK),
    "causal square": strided(128),
    "two heads": per_head([[sliding_window(5, 0), sliding_window(0, 20)]]),
}


def draw(tokens=70, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(2, 2, tokens, 16, generator=generator).to(dtype)
    key = torch.randn(1, 1, tokens, 16, generator=generator).to(dtype).expand(2, 1, -1, -1)
    value = torch.randn(2, 1, tokens, 16, generator=generator).to(dtype)
    return query, key, value


CALLS = [("cpu", None, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
CALLS += [("cpu", None, torch.float16), ("cpu", "triton", torch.float16)]
CALLS += [pytest.param("cuda", None, torch.float16, marks=pytest.mark.gpu)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("device", "backend", "dtype"), CALLS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_results_are_those_of_the_general_path(name, is_causal, device, backend, dtype):
    query, key, value = (each.to(device) for each in draw(dtype=dtype))
    options = {"is_causal": is_causal, "pattern": PATTERNS[name], "backend": backend}
    cases = [(key, value)]
    if name == "dense":  # unequal lengths, and memory that must be copied for TMA
        cases.append((key[:, :, 3:40], value[:, :, 3:40].mT.contiguous().mT))
    for tensors in cases:
        general = cqs.attention(query, *tensors, num_tasks=1, return_lse=True, **options)
        for _ in range(2):
            found = cqs.attention(query, *tensors, return_lse=True, **options)
            assert all(map(torch.equal, found, general))


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", None), ("cpu", "triton"), pytest.param("cuda", None, marks=pytest.mark.gpu)],
)
def test_known_calls_skip_the_checks(device, backend, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="cqs")  # logged calls are not known
    tensors = [each.to(device) for each in draw()]
    options = {"pattern": sliding_window(11, 3), "backend": backend}
    wanted = cqs.attention(*tensors, **options)

    for module in (one_call, cqs.api):
        monkeypatch.setattr(module, "check_problem", Mock(side_effect=AssertionError))
    assert torch.equal(cqs.attention(*tensors, **options), wanted)
    with pytest.raises(AssertionError):
        cqs.attention(*(each.to(device) for each in draw(71)), **options)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_calls_without_memory_take_the_general_path(backend, monkeypatch):
    tensors, options = draw(), {"pattern": sliding_window(11, 3), "backend": backend}
    wanted = cqs.attention(*tensors, **options)
    attend = Mock(wraps=BACKENDS[backend].attend)
    attend.side_effect = [torch.OutOfMemoryError("once"), DEFAULT]
    monkeypatch.setattr(BACKENDS[backend], "attend", attend)
    assert torch.equal(cqs.attention(*tensors, **options), wanted)
    assert attend.call_count == 2


def test_deterministic_algorithms_are_another_signature(monkeypatch):
    tensors, cached = draw(), known_calls._make_once.cache_info
    wanted, misses = cqs.attention(*tensors), cached().misses
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(cqs.attention(*tensors), wanted) and cached().misses == misses + 1


def test_equal_options_of_other_types_are_checked():
    tensors = draw()
    cqs.attention(*tensors, is_causal=True)
    with pytest.raises(TypeError, match="is_causal must be a bool"):
        cqs.attention(*tensors, is_causal=1)
    flag = torch.tensor(True)
    outputs = [cqs.attention(*tensors, is_causal=flag.fill_(value)) for value in (True, False)]
    assert not torch.equal(*outputs)


def test_changed_masks_do_not_change_patterns():
    mask = MASK[0, 0].clone()
    pattern = from_mask(mask)
    before = cqs.attention(*draw(), pattern=pattern)
    mask.fill_(True)
    assert torch.equal(cqs.attention(*draw(), pattern=pattern), before)


def test_sizes_that_are_changed_take_the_general_path():
    query, key, value = draw()
    assert cqs.attention(query, key[:1], value[:1]).shape == query.shape
    assert cqs.attention(query[..., :0], key[..., :0], value).isfinite().all()
    assert cqs.attention(query[:, :, :0], key, value).shape == (2, 2, 0, 16)
    assert not cqs.attention(query, key[:, :, :0], value[:, :, :0]).any()


def test_transformed_tensors_are_refused():
    query, key, value = (each[:1] for each in draw())
    cqs.attention(query, key, value)
    kept = []

    def attend(each):
        kept.append(each)
        return cqs.attention(each, key, value)

    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(attend)(torch.stack([query, query]))
    with pytest.raises(NotImplementedError, match="vmap"):
        cqs.attention(kept[0], key, value)  # after the transformation


def test_rows_are_computed_again_without_autocast():
    query, key, value = draw()
    query[:, :, 0] = 0  # its only score is 0, and so is its LSE
    wanted = cqs.attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(cqs.attention(query, key, value, is_causal=True), wanted)


def test_negated_views_give_the_same():
    tensors = draw()
    wanted = cqs.attention(*tensors)
    negative = [torch.complex(-each, -each).conj().imag for each in tensors]
    assert negative[0].is_neg()
    assert torch.equal(cqs.attention(*negative), wanted)


def test_first_calls_in_any_mode_serve_later_ones():
    pattern = sliding_window(13, 1)
    tensors = draw(76)
    with torch.device("meta"), torch.inference_mode():  # of tensors that name no device
        found = cqs.attention(*tensors, pattern=pattern)
    query, key, value = (each.clone().requires_grad_() for each in tensors)
    answer = cqs.attention(query, key, value, pattern=pattern)
    answer.sum().backward()
    assert query.grad is not None
    assert torch.equal(answer, found)
    assert torch.equal(cqs.attention(*tensors, pattern=pattern), found)


def test_logged_passes_are_logged(caplog):
    tensors = draw()
    cqs.attention(*tensors)
    with caplog.at_level(logging.DEBUG, logger="cqs"):
        cqs.attention(*tensors)
    assert "forward" in caplog.text


@pytest.mark.parametrize("pattern", [sliding_window(9, 2), sliding_window(40, 40)])
def test_masked_values_do_not_leak_from_a_kept_mask(pattern):
    query, key, value = draw()
    wanted = cqs.attention(query, key, value, pattern=pattern)
    value = value.clone()
    value[:, :, 60:] = torch.nan
    found = cqs.attention(query, key, value, pattern=pattern)
    untouched = ~torch.from_numpy(pattern.to_mask(70))[:, 60:].any(dim=1)
    assert torch.allclose(found[:, :, untouched], wanted[:, :, untouched], atol=1e-6)
    assert found[:, :, ~untouched].isnan().all()
