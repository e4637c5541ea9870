"""FlexAttention: mask and score functions of attention-gym and of PyTorch's tests."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.integrations.flex import flex_attention

from .framework import NUM_TASKS, Case, Suite, assert_as_exact_as

DTYPES = torch.float32, torch.bfloat16, torch.float16


def suite():
    """Return the functions of the installed attn_gym and those of PyTorch's tests."""
    from importlib.metadata import version

    version = f"attn_gym {version('attn_gym')}, torch {torch.__version__}"
    return Suite("FlexAttention", version, _cases())


def _cases():
    masks = {**dict(_gym_masks()), **dict(_torch_masks())}
    for (name, (rule, lengths)), dtype in product(masks.items(), (torch.float64, *DTYPES)):
        for heads, block in (((2, 2), 128), ((4, 2), 32)):
            check = partial(_check_mask, rule, lengths, dtype, heads, block)
            yield Case(f"{name} {dtype} heads {heads} block {block}", check)
    for (name, rule), dtype in product(_score_mods(), DTYPES):
        yield Case(f"score_mod {name} {dtype}", partial(_check_score, rule, dtype))


def _check_mask(rule, lengths, dtype, heads, block):
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(rule, 2, heads[0], *lengths, "cpu", BLOCK_SIZE=block)
    check_block_mask(block_mask, dtype, heads=heads, lengths=lengths)


def check_block_mask(block_mask, dtype, *, heads, lengths):
    """Compare output and gradients with dense attention under the mask of a block mask.

    Args:
        block_mask: The mask, for one or two batch elements, and for one or all query heads.
        dtype: Dtype of the operands.
        heads: Query heads and KV heads.
        lengths: Queries and keys.
    """
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, 2, heads[0], *lengths, "cpu")
    compute = partial(flex_attention, block_mask=block_mask, enable_gqa=True, num_tasks=NUM_TASKS)
    reference = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    operands = [
        torch.randn(2, number, length, 16, dtype=torch.float64).to(dtype)
        for number, length in zip(
            (heads[0], heads[1], heads[1]), (*lengths, lengths[1]), strict=True
        )
    ]
    assert_as_exact_as(compute, reference, operands)


def _check_score(rule, dtype):
    from torch.nn.attention.flex_attention import flex_attention as reference

    operands = torch.randn(3, 1, 8, 64, 16, dtype=torch.float64).to(dtype)
    exact = [each.double() for each in operands]
    torch.testing.assert_close(_dense(rule, *exact), reference(*exact, score_mod=rule))
    compute = partial(flex_attention, score_mod=rule, num_tasks=NUM_TASKS)
    assert_as_exact_as(compute, partial(_dense, rule), list(operands))


def _dense(rule, query, key, value):
    """Compute attention with a score function from its definition.

    PyTorch's function has no gradients on a CPU.
    """
    positions = torch.meshgrid(*map(torch.arange, (*query.shape[:3], key.shape[2])), indexing="ij")
    found: Tensor = rule(query @ key.mT * query.shape[3] ** -0.5, *positions)
    return found.softmax(-1).to(value.dtype) @ value


def _gym_masks():
    from attn_gym import masks
    from attn_gym.masks.document_mask import length_to_offsets
    from attn_gym.masks.jetspec import build_tree_ancestor_matrix

    def square(length):
        return length, length

    yield "causal", (masks.causal_mask, square(200))
    for window in (1, 16, 100):
        yield f"sliding_window {window}", (masks.generate_sliding_window(window), square(200))
        glob = torch.arange(200) % 61 == 0
        name = f"global_sliding_window {window}"
        yield name, (masks.generate_global_sliding_window(window, glob), square(200))
    for window, dilation in ((4, 2), (30, 3), (64, 8)):
        rule = masks.generate_dilated_sliding_window(window, dilation)
        yield f"dilated_sliding_window {window} {dilation}", (rule, square(160))
    for prefix in (1, 50, 150):
        yield f"prefix_lm {prefix}", (masks.generate_prefix_lm_mask(prefix), square(150))
    for lengths in ([3, 2, 5], [1, 4, 1, 7], [6], [100, 1, 60, 39]):
        offsets, number = length_to_offsets(lengths, "cpu"), sum(lengths)
        rule = masks.generate_doc_mask_mod(masks.causal_mask, offsets)
        yield f"document causal {lengths}", (rule, square(number))
        rule = masks.generate_doc_mask_mod(masks.generate_sliding_window(3), offsets)
        yield f"document window {lengths}", (rule, square(number))
        rule = masks.generate_packed_causal_doc_mask_mod(offsets)
        yield f"packed causal {lengths}", (rule, square(number))
    offsets = length_to_offsets([40, 30, 50, 20], "cpu")
    rule = masks.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 2, 2]))
    yield "shared_prefix", (rule, square(140))
    for size in (4, 16):
        rule = masks.generate_block_diffusion_mask(64, size)
        yield f"block_diffusion {size}", (rule, square(128))
        yield f"batchify {size}", (masks.batchify_mask_mod(masks.causal_mask, size), square(130))
    for kernel in (3, 5):
        yield f"natten {kernel}", (masks.generate_natten(16, 16, kernel, kernel), square(256))
        rule = masks.generate_tiled_natten(16, 16, kernel, kernel, 4, 4)
        yield f"tiled_natten {kernel}", (rule, square(256))
        rule = masks.generate_morton_natten(16, 16, kernel, kernel)
        yield f"morton_natten {kernel}", (rule, square(256))
    for text in (0, 20):
        rule = masks.generate_sta_mask_mod_2d((16, 16), (8, 8), (4, 4), text)
        yield f"sta_2d {text}", (rule, square(256 + text))
        rule = masks.generate_sta_mask_mod_3d((4, 8, 8), (4, 4, 4), (2, 4, 4), text)
        yield f"sta_3d {text}", (rule, square(256 + text))
    for sink in (False, True):
        rule = masks.generate_spatial_head_mask_mod(10, 4, 40, 2, sink, 16)
        yield f"svg spatial {sink}", (rule, square(170))
    yield "svg temporal", (masks.generate_temporal_head_mask_mod(10, 4, 40, 2), square(170))
    intervals = torch.tensor([[0, 7], [7, 12], [12, 30]])
    rule = masks.generate_vision_cross_attention_mask_mod(intervals, 25)
    yield "flamingo", (rule, (30, 75))
    ancestors = build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2, 5, 5], "cpu")
    rule = masks.generate_jetspec_tree_causal_mask_mod(90, ancestors)
    yield "jetspec tree", (rule, (8, 98))
    yield "jetspec training", (masks.generate_jetspec_training_mask_mod(70, 8), (24, 94))


def _torch_masks():
    """Yield masks of PyTorch's test_flex_attention.py."""
    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    rules = {
        "noop": noop_mask,
        "causal": lambda b, h, q, k: q >= k,
        "inverse causal": lambda b, h, q, k: q <= k,
        "by head": lambda b, h, q, k: q + 2 * h >= k,
        "by batch": lambda b, h, q, k: (q >= k) | (k < 5 * b),
        "rows without keys": lambda b, h, q, k: q >= 40,
    }
    rules["causal and window"] = and_masks(rules["causal"], lambda b, h, q, k: q - k <= 25)
    rules["causal or inverse"] = or_masks(rules["causal"], rules["inverse causal"])
    for lengths, (name, rule) in product(
        ((256, 256), (100, 300), (300, 100), (1, 129)), rules.items()
    ):
        yield f"{name} {lengths}", (rule, lengths)


def _score_mods():
    """Yield score functions of attention-gym, and those of PyTorch's test_flex_attention.py."""
    from attn_gym import mods

    yield "alibi", mods.generate_alibi_bias(8)
    yield "softcap", mods.generate_tanh_softcap(30, approx=False)
    yield "identity", lambda score, b, h, q, k: score
    yield "times two", lambda score, b, h, q, k: score * 2
    yield "squared", lambda score, b, h, q, k: score * score
    yield "causal", lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf)
    yield "inverse causal", lambda score, b, h, q, k: torch.where(q <= k, score, -torch.inf)
    yield "relative bias", lambda score, b, h, q, k: score + (q - k)
    yield (
        "relative causal",
        lambda score, b, h, q, k: torch.where(q <= k, score + (q - k), -torch.inf),
    )
