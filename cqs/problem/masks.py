"""Which query-key pairs of a call attend: patterns, causal masks and ``attn_mask``."""

from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from cqs.patterns import Pattern, causal, from_mask, sliding_window
from cqs.problem.scores import Scores, check_is_scores
from cqs.problem.tensors import check_kind, with_four_dimensions


def add_mask(
    attn_mask: Tensor,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    pattern: Pattern | None,
    scores: Scores | None,
) -> tuple[Pattern | None, Scores | None]:
    """Return pattern and scores of a call with an ``attn_mask`` as of PyTorch's function.

    Args:
        attn_mask: Boolean, True where a query attends to a key; or a bias, in one of the dtypes of
            ``scores.bias``.
        sizes: Batch, query heads, queries and keys; ``attn_mask`` is broadcastable to them.
        device: Device of the query.
        pattern: Pattern of the call, which is intersected with a boolean mask.
        scores: Scores of the call, which get a floating-point mask as their bias.

    Raises:
        TypeError: ``attn_mask`` has another dtype.
        ValueError: ``attn_mask`` has another shape or device, or ``scores`` has a bias too.
    """
    check_kind("attn_mask", attn_mask, device, allows_bool=True)
    rows = with_four_dimensions("attn_mask", attn_mask, sizes)
    if attn_mask.dtype == torch.bool:
        visible = from_mask(rows.expand(-1, -1, *sizes[2:]))
        if pattern is None:
            return visible, scores
        check_is_pattern(pattern)
        return pattern & visible, scores
    if scores is None:
        return pattern, Scores(bias=attn_mask)
    check_is_scores(scores)
    if scores.bias is not None:
        raise ValueError(
            f"attn_mask must be boolean or None with scores.bias, got {attn_mask.dtype}: add it "
            "to the bias"
        )
    return pattern, replace(scores, bias=attn_mask)


@lru_cache(maxsize=64)
def check_pattern(pattern: Pattern, is_causal: bool, *sizes: int) -> tuple[bool, Pattern | None]:
    """Validate a pattern for the sizes of a call and intersect it with the causal mask.

    Args:
        pattern: A pattern, see :func:`check_is_pattern`.
        is_causal: Whether to intersect the pattern with the causal mask.
        sizes: Batch, query heads, queries and keys.

    Returns:
        Whether attention is dense and causal, and the pattern, ``None`` if it is dense.

    Raises:
        ValueError: ``pattern`` is for other lengths, heads or batch elements.
        NotImplementedError: ``pattern`` cannot be intersected with the causal mask.
    """
    if pattern == sliding_window(None, None):
        return is_causal, None
    if pattern == causal():
        return True, None
    for name, has, needed in zip(("batch", "num_heads"), sizes, pattern.heads, strict=False):
        if needed not in (1, has):
            raise ValueError(f"{name} must be {needed} with pattern {pattern!r}, got {has}")
    if 0 in pattern.heads:  # an empty batch
        return is_causal, None
    if is_causal:
        pattern = pattern & causal()
    for batch_element, head in product(*map(range, pattern.heads)):
        pattern.head(batch_element, head).bind(*sizes[2:])  # validates the lengths
    return False, pattern


def check_is_pattern(pattern: Pattern) -> None:
    """Raise TypeError unless ``pattern`` is a :class:`cqs.patterns.Pattern`."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern must be a cqs.patterns.Pattern, got {type(pattern).__name__}: convert a mask "
            "with from_mask, a list of patterns with per_head"
        )
