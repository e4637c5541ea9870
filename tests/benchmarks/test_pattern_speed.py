"""What the benchmark ``patterns`` compares: the same pairs said twice, passes that agree."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import patterns

pytestmark = pytest.mark.long
TOKENS = 1024
FOUND = {case.name: case for case in patterns.make_forms(TOKENS)}
EVERY_PATTERN = pytest.mark.parametrize("name", FOUND)


@EVERY_PATTERN
def test_pattern_and_mask_function_name_the_same_pairs(name):
    case = FOUND[name]
    tokens = torch.arange(TOKENS)
    allowed = case.mask(0, 0, tokens[:, None], tokens)
    assert np.array_equal(case.pattern.to_mask(TOKENS), allowed.numpy())


@pytest.mark.parametrize("name", ["window-25", "documents-32", "bigbird-128", "every-2"])
def test_block_mask_is_that_of_pytorch(name):
    mask = FOUND[name].mask
    expected = create_block_mask(mask, None, None, TOKENS, TOKENS, device="cpu")
    ours = patterns._make_block_mask(mask, TOKENS, torch.device("cpu"))
    assert torch.equal(ours.to_dense(), expected.to_dense())
    for kind in ("kv", "full_kv"):
        numbers, places = (f"{kind}_num_blocks", f"{kind}_indices")
        assert torch.equal(getattr(ours, numbers), getattr(expected, numbers))
        for row, number in enumerate(getattr(ours, numbers)[0, 0]):
            found = (getattr(each, places)[0, 0, row, :number] for each in (ours, expected))
            assert torch.equal(*(each.sort().values for each in found))
