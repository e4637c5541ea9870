"""Layouts as DeepSpeed's configurations make them, read block by block."""

import pickle
import random
from typing import NamedTuple

import pytest
import torch
from brute_force import assert_is

from cqs.patterns import block_sparse, from_deepspeed

RANDOM = torch.randint(2, (3, 24, 24), generator=torch.Generator().manual_seed(5))


class Config(NamedTuple):
    """Has the interface of DeepSpeed's ``SparsityConfig``."""

    block: int
    layout: torch.Tensor

    def make_layout(self, seq_len):
        assert seq_len == self.block * self.layout.shape[2]
        return self.layout


@pytest.mark.parametrize(
    ("config", "heads"), [(Config(16, RANDOM), 3), (Config(24, RANDOM[:1].expand(2, -1, -1)), 1)]
)
def test_live_pairs_are_those_of_the_layout(config, heads):
    length = 24 * config.block
    pattern, layout = from_deepspeed(config, length), config.layout.bool().numpy()
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert pattern == block_sparse(layout[:heads], config.block) and pattern.heads == (1, heads)
    masks = layout.repeat(config.block, axis=1).repeat(config.block, axis=2)
    for head, mask in enumerate(masks):
        assert_is(random.Random(0), pattern.head(0, head).bind(length), mask)
    with pytest.raises(ValueError, match="requires lengths of"):
        pattern.head(0, 0).bind(length + 128)


@pytest.mark.parametrize("config", [3, {"mode": "fixed"}, None])
def test_other_objects_are_rejected(config):
    with pytest.raises(TypeError, match="config must be a SparsityConfig of DeepSpeed, got "):
        from_deepspeed(config, 128)
