"""``torch.nn.functional.scaled_dot_product_attention`` by cqs, with its arguments."""

import torch

import cqs
from cqs.patterns import from_mask

from .framework import NUM_TASKS


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    seed=None,
):
    """Compute attention of ``[..., heads, seqlen, head_dim]`` by :func:`cqs.attention`.

    Args:
        query: As PyTorch's function, as are all arguments except ``seed``.
        key: Keys; leading dimensions are broadcast, unless ``enable_gqa`` is set.
        value: Values.
        attn_mask: A boolean mask or a bias; PyTorch's rule for both.
        dropout_p: Probability that a weight is zeroed.
        is_causal: Whether query i sees keys up to i: aligned at the top left.
        scale: Factor on the scores.
        enable_gqa: Whether there may be fewer KV heads.
        seed: Random seed of the dropout mask.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask and is_causal must not both be set")
    tensors = query, key, value
    if not enable_gqa:
        leading = torch.broadcast_shapes(*(each.shape[:-2] for each in tensors))
        tensors = tuple(each.expand(*leading, *each.shape[-2:]) for each in tensors)
    leading = tensors[0].shape[:-2]
    lengths = query.shape[-2], key.shape[-2]
    is_square = lengths[0] == lengths[1]
    top_left = torch.ones(lengths, dtype=torch.bool).tril()
    query, key, value = map(_with_four_dimensions, tensors)
    output = cqs.attention(
        query,
        key,
        value,
        None if attn_mask is None else _mask(attn_mask, leading, lengths),
        dropout_p,
        is_causal and is_square,
        scale=scale,
        enable_gqa=enable_gqa,
        pattern=from_mask(top_left) if is_causal and not is_square else None,
        seed=seed,
        num_tasks=NUM_TASKS,
    )
    return output.reshape(*leading, *output.shape[-2:])


def _with_four_dimensions(tensor):
    lacking = 4 - tensor.ndim
    return tensor.flatten(0, -lacking) if lacking < 0 else tensor[(None,) * lacking]


def _mask(mask, leading, lengths):
    """Return a mask with the leading dimensions of the operands, or with none."""
    if all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(mask.shape[-2:])
    return _with_four_dimensions(mask.expand(*leading, *lengths))
