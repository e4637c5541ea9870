"""DeepSpeed: layouts of its block-sparse attention, by ``cqs.patterns.from_deepspeed``."""

import random
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import cqs
from cqs.patterns import from_deepspeed

from .framework import NUM_TASKS, Case, Suite, assert_as_exact_as
from .sources import module_of, unpacked

VERSION = "0.16.9"
"""The last releases have no sparse attention."""
_DIRECTIONS = "bidirectional", "unidirectional"
_ENDS = {"global_block_indices": [0, 5], "global_block_end_indices": [1, 7]}


def suite():
    """Return all classes of configurations with combinations of their options."""
    folder = unpacked(f"deepspeed=={VERSION}") / "deepspeed" / "ops" / "sparse_attention"
    return Suite(
        "DeepSpeed layouts",
        f"deepspeed {VERSION}",
        _cases(module_of(folder / "sparsity_config.py")),
    )


def _cases(module):
    for name, options in _configurations():
        for block, seqlen in ((16, 128), (16, 272), (32, 256)):
            config = getattr(module, f"{name}SparsityConfig")(block=block, **options)
            text = " ".join(f"{key}={value}" for key, value in options.items())
            yield Case(f"{name} {block} {seqlen} {text}", partial(_check, config, seqlen))


def _configurations():
    """Yield the names of classes and their options."""
    yield "Dense", {"num_heads": 4}
    for local, spread, attention in product((2, 4), (1, 2), _DIRECTIONS):
        fixed = {"num_local_blocks": local, "num_global_blocks": spread, "attention": attention}
        yield "Fixed", {"num_heads": 4, **fixed}
        if attention == "bidirectional":
            yield "Fixed", {"num_heads": 4, "horizontal_global_attention": True, **fixed}
        patterns = local // spread
        if patterns > 1:
            own = {"different_layout_per_head": True, "num_different_global_patterns": patterns}
            yield "Fixed", {"num_heads": 4, **own, **fixed}
    for drawn, windows, ends, attention in product((0, 2), ([4], [1, 3]), ({}, _ENDS), _DIRECTIONS):
        variable = {"num_random_blocks": drawn, "local_window_blocks": windows, **ends}
        variable["different_layout_per_head"] = bool(drawn)
        yield "Variable", {"num_heads": 3, "attention": attention, **variable}
    for drawn, window, spread, attention in product((1, 2), (3, 5), (1, 2), _DIRECTIONS):
        if (drawn, attention) == (2, "unidirectional"):
            continue  # DeepSpeed draws two blocks of the one that the first row has, and fails
        bigbird = {"num_random_blocks": drawn, "num_sliding_window_blocks": window}
        bigbird |= {"num_global_blocks": spread, "attention": attention}
        for own in (False, True):
            yield "BigBird", {"num_heads": 2, "different_layout_per_head": own, **bigbird}
    for window, ends, attention in product((3, 5), ({}, _ENDS), _DIRECTIONS):
        longformer = {"num_sliding_window_blocks": window, "attention": attention, **ends}
        yield "BSLongformer", {"num_heads": 4, **longformer}
    for window, attention in product((1, 3, 5), _DIRECTIONS):
        yield (
            "LocalSlidingWindow",
            {"num_heads": 4, "num_sliding_window_blocks": window, "attention": attention},
        )


def _check(config, seqlen):
    random.seed(0)
    pattern = from_deepspeed(config, seqlen)
    random.seed(0)
    layout = config.make_layout(seqlen).bool()
    mask = layout.repeat_interleave(config.block, 1).repeat_interleave(config.block, 2)

    def compute(*operands):
        return cqs.attention(*operands, pattern=pattern, num_tasks=NUM_TASKS)

    operands = torch.randn(3, 2, config.num_heads, seqlen, 16).double()
    reference = partial(F.scaled_dot_product_attention, attn_mask=mask)
    assert_as_exact_as(compute, reference, list(operands))
