"""Partial results: what travels from worker to tiler, and how they combine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention of some queries over some keys."""

    output: Tensor
    """``[batch, num_heads, seqlen_q, value_dim]``, normalised by its own softmax denominator."""
    lse: Tensor
    """``[batch, num_heads, seqlen_q]``, float32 (float64 for float64 outputs): the natural log of
    that denominator; -inf (and output 0) where a query sees no key."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, float32 for anything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_partials(partials: Sequence[Partial], out: Tensor | None = None) -> Partial:
    """Combine attention over disjoint key sets into attention over their union.

    ``lse = log(sum(exp(lse_i)))`` and ``output = sum(exp(lse_i - lse) * output_i)``: exact up to
    one rounding per partial, whatever the division of the keys. Sums run in the dtype of the lse,
    in the order given; no exponential of a score is ever formed, so nothing overflows.

    Args:
        partials: At least one; all answer the same queries and share shapes, dtypes and device.
            None is written to.
        out: Where to write the merged output, of the shape and dtype of the outputs; ``None``
            allocates it.

    Raises:
        ValueError: if there is no partial or two disagree; the message names the second.

    Example:
        >>> halves = [Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)),
        ...           Partial(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))]
        >>> merge_partials(halves).output
        tensor([[[[0.5000, 0.5000]]]])
    """
    if not partials:
        raise ValueError("merge_partials needs at least one partial")
    first = partials[0]
    for i, partial in enumerate(partials):
        for name in Partial._fields:
            expected, got = getattr(first, name), getattr(partial, name)
            if (got.shape, got.dtype, got.device) != (
                expected.shape,
                expected.dtype,
                expected.device,
            ):
                raise ValueError(
                    f"{name} {i} is {tuple(got.shape)} {got.dtype} on {got.device}, "
                    f"but {name} 0 is {tuple(expected.shape)} {expected.dtype} on {expected.device}"
                )
    if out is None:
        out = torch.empty_like(first.output)
    if len(partials) == 1:
        return Partial(out.copy_(first.output), first.lse)

    lses = torch.stack([partial.lse for partial in partials])
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0)).unsqueeze(-1)
    total = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
    torch.mul(first.output, weights[0], out=total)
    for partial, weight in zip(partials[1:], weights[1:], strict=True):
        total.addcmul_(partial.output.to(lse.dtype), weight)
    return Partial(total if total is out else out.copy_(total), lse)
