"""``torch.nn.functional.scaled_dot_product_attention`` by cqs, with its arguments."""

import torch
from torch import Tensor

import cqs
from cqs.patterns import Pattern, from_mask

from .framework import NUM_TASKS


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
) -> Tensor:
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
    output = cqs.attention(
        *map(_with_four_dimensions, tensors),
        pattern=_pattern(attn_mask, is_causal, leading, lengths),
        is_causal=is_causal and lengths[0] == lengths[1],
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        num_tasks=NUM_TASKS,
    )
    assert isinstance(output, Tensor)
    return output.reshape(*leading, *output.shape[-2:])


def _with_four_dimensions(tensor: Tensor) -> Tensor:
    lacking = 4 - tensor.ndim
    return tensor.flatten(0, -lacking) if lacking < 0 else tensor[(None,) * lacking]


def _pattern(
    mask: Tensor | None, is_causal: bool, leading: torch.Size, lengths: tuple[int, int]
) -> Pattern | None:
    if mask is not None:
        is_shared = all(size == 1 for size in mask.shape[:-2])
        leading = torch.Size((1, 1)) if is_shared else leading
        mask = mask.reshape(mask.shape[-2:]) if is_shared else mask
        return from_mask(_with_four_dimensions(mask.expand(*leading, *lengths)))
    if is_causal and lengths[0] != lengths[1]:
        return from_mask(torch.ones(lengths, dtype=torch.bool).tril())
    return None
