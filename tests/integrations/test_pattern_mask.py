"""A mask that is known by its pattern behaves like the boolean tensor that sdpa gets."""

import copy
import io
import pickle
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from cqs.integrations.pattern_mask import MaskSource, PatternMask
from cqs.patterns import causal

SHAPE = (2, 1, 5, 5)
VISIBLE = torch.ones(SHAPE, dtype=torch.bool).tril()
SCORES = torch.arange(200.0).view(2, 4, 5, 5)
MODES = [nullcontext, torch.inference_mode]


def make_mask():
    return PatternMask(SHAPE, torch.device("cpu"), MaskSource(causal, VISIBLE.clone))


KEEP_THE_PATTERN = {
    "contiguous": lambda mask: mask.contiguous(),
    "detach": lambda mask: mask.detach(),
    "clone": lambda mask: mask.clone(),
    "to device": lambda mask: mask.to("cpu"),
    "to dtype": lambda mask: mask.to(torch.bool),
    "copy to device": lambda mask: mask.to("cpu", copy=True),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "all keys": lambda mask: mask[:, :, :, :5],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KEEP_THE_PATTERN)
def test_copies_and_aliases_keep_the_pattern_and_allocate_nothing(name, mode):
    with mode():
        mask = make_mask()
        kept = KEEP_THE_PATTERN[name](mask)
        assert isinstance(kept, PatternMask)
        assert kept.source.pattern == causal()
        assert kept.source.dense is mask.source.dense is None
        assert torch.equal(kept, VISIBLE)


READS = {
    "keys": lambda mask: mask[:, :, :, :3],
    "last query": lambda mask: mask[:, :, -1:, :],
    "expand": lambda mask: mask.expand(-1, 4, -1, -1),
    "float": lambda mask: mask.to(torch.float16),
    "not": lambda mask: ~mask,
    "and": lambda mask: (torch.arange(5) < 3) & mask,
    "cat": lambda mask: torch.cat([mask, torch.ones_like(mask)], dim=-1),
    "bias": lambda mask: SCORES + torch.where(mask, 0.0, -torch.inf),
    "count": lambda mask: mask + torch.ones(5, dtype=torch.int32),
    "sdpa": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        SCORES, SCORES, SCORES, attn_mask=mask
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", READS)
def test_other_operations_get_the_boolean_tensor(name, mode):
    with mode():
        found, expected = READS[name](make_mask()), READS[name](VISIBLE)
    assert type(found) is torch.Tensor
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_a_mask_is_added_to_are_masked(dtype):
    scores = SCORES.to(dtype)
    for found in (scores + make_mask(), make_mask() + scores, scores.clone().add_(make_mask())):
        assert found.dtype == dtype
        weights = torch.softmax(found, -1)
        masked = scores.masked_fill(~VISIBLE, -torch.inf)
        assert torch.equal(weights, torch.softmax(masked, -1))


def set_keys(mask):
    mask[..., 2] = False


CHANGES = {
    "setitem": set_keys,
    "masked_fill_": lambda mask: mask.masked_fill_(torch.arange(5) == 2, False),
    "view": lambda mask: mask[:, :, 2:].zero_(),
    "alias": lambda mask: mask.detach().zero_(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_by_every_alias(name, mode):
    with mode():
        mask, expected = make_mask(), VISIBLE.clone()
        alias = mask.detach()
        CHANGES[name](mask)
        CHANGES[name](expected)
        assert mask.source.dense is not None and not torch.equal(expected, VISIBLE)
        assert torch.equal(mask, expected) and torch.equal(alias, expected)
        assert alias.source is mask.source


EXPORTS = {
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "saved": lambda mask: torch.load(saved(mask), weights_only=True),
    "to another process": lambda mask: ForkingPickler.loads(ForkingPickler.dumps(mask)),
    "shared": lambda mask: mask.clone().share_memory_(),
    "numpy": lambda mask: torch.from_numpy(mask.numpy()),
    "array": lambda mask: torch.from_numpy(np.asarray(mask)),
    "tolist": lambda mask: torch.tensor(mask.tolist()),
    "dlpack": torch.from_dlpack,
}


def saved(mask):
    buffer = io.BytesIO()
    torch.save(mask, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("name", EXPORTS)
def test_files_arrays_and_other_processes_get_the_boolean_tensor(name, is_changed):
    mask, expected = make_mask(), VISIBLE
    if is_changed:
        mask.logical_not_()
        expected = ~VISIBLE
    assert torch.equal(EXPORTS[name](mask), expected) and torch.equal(mask, expected)


def test_metadata_is_that_of_the_boolean_tensor():
    mask = make_mask()
    assert (mask.shape, mask.ndim, mask.dtype) == (VISIBLE.shape, 4, torch.bool)
    assert mask.device == VISIBLE.device and not mask.is_floating_point()
    assert repr(mask) == "PatternMask(shape=(2, 1, 5, 5))"
    assert mask.source.dense is None
