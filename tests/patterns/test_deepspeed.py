"""Layouts as DeepSpeed's configurations make them, read block by block."""

import pickle
import random
from dataclasses import dataclass

import pytest
import torch
from brute_force import assert_is

from cqs.patterns import block_sparse, from_deepspeed


@dataclass
class Config:
    """Has the interface of DeepSpeed's ``SparsityConfig``: a random layout for each head."""

    num_heads: int = 3
    block: int = 16
    different_layout_per_head: bool = True
    attention: str = "bidirectional"

    def make_layout(self, seq_len):
        if seq_len % self.block:
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by {self.block}!")
        size = seq_len // self.block
        heads = self.num_heads if self.different_layout_per_head else 1
        drawn = [[random.random() < 0.3 for _ in range(size)] for _ in range(heads * size)]
        layout = torch.tensor(drawn).long().view(heads, size, size)
        if self.attention == "unidirectional":
            layout = layout.tril()
        return layout.expand(self.num_heads, size, size)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(2, block=64, attention="unidirectional"),
        Config(2, block=24, different_layout_per_head=False, attention="unidirectional"),
    ],
    ids=str,
)
def test_live_pairs_are_those_of_the_layout(config):
    random.seed(5)
    pattern = from_deepspeed(config, 384)
    random.seed(5)
    layout = config.make_layout(384).bool().numpy()
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    heads = config.num_heads if config.different_layout_per_head else 1
    assert pattern == block_sparse(layout[:heads], config.block) and pattern.heads == (1, heads)
    masks = layout.repeat(config.block, axis=1).repeat(config.block, axis=2)
    for head, mask in enumerate(masks):
        assert_is(random.Random(0), pattern.head(0, head).bind(384), mask)


@pytest.mark.parametrize("config", [3, {"mode": "fixed"}, None])
def test_other_objects_are_rejected(config):
    with pytest.raises(TypeError, match="config must be a SparsityConfig of DeepSpeed, got "):
        from_deepspeed(config, 128)


def test_other_lengths_are_rejected():
    with pytest.raises(ValueError, match="needs to be dividable by 16"):
        from_deepspeed(Config(), 100)
    with pytest.raises(ValueError, match="requires lengths of"):
        from_deepspeed(Config(num_heads=1), 64).bind(128)
