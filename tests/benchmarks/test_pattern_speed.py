"""What the benchmark ``patterns`` compares: the same pairs said twice, passes that agree."""

import numpy as np
import pytest
import torch

from benchmarks import patterns

pytestmark = pytest.mark.long
TOKENS = 1024


@pytest.mark.parametrize("case", patterns.make_forms(TOKENS), ids=lambda case: case.name)
def test_pattern_and_mask_function_name_the_same_pairs(case):
    tokens = torch.arange(TOKENS)
    allowed = case.mask(0, 0, tokens[:, None], tokens)
    assert np.array_equal(case.pattern.to_mask(TOKENS), allowed.numpy())
