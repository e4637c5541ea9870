"""Partial results: what travels from worker to tiler, and how they combine."""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 4096
"""Keys whose weighted values one matrix product adds up."""


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


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Compute ``weights @ value`` in blocks of keys, because libraries may add key after key.

    Args:
        weights: ``[..., seqlen_q, seqlen_kv]``.
        value: ``[..., seqlen_kv, value_dim]`` of the same dtype; leading dimensions broadcast.
    """
    blocks = zip(weights.split(_BLOCK, dim=-1), value.split(_BLOCK, dim=-2), strict=True)
    products = (block @ of_keys for block, of_keys in blocks)
    total: Tensor = next(products)
    for product in products:
        total += product
    return total


class RunningMerge:
    """Attention over a growing set of keys: partials over disjoint keys, merged one by one.

    With ``M = max(lse_i)`` it keeps ``S = sum(exp(lse_i - M))`` and ``A = sum(exp(lse_i - M) *
    output_i)``, and ends with ``output = A / S`` and ``lse = M + log(S)``: exact up to rounding,
    whatever the division of the keys. No exponential of a score is ever formed, so nothing
    overflows. Sums run in the dtype of the lse, in the order of :meth:`add`.
    """

    def __init__(self, answer: Partial):
        """Begin to merge into ``answer``, whose tensors are overwritten."""
        self._answer = answer
        self._largest = answer.lse.fill_(-torch.inf)
        self._sum = torch.zeros_like(answer.lse)
        self._total = answer.output
        if answer.output.dtype != answer.lse.dtype:
            self._total = torch.empty_like(answer.output, dtype=answer.lse.dtype)
        self._is_empty = True

    def add(self, partial: Partial, rows: slice = slice(None)) -> None:
        """Merge in a partial of all queries, or of the ``rows`` it answers; it is not written to.

        A query that saw no key in ``partial`` carries ``lse = -inf`` there and gains nothing.
        """
        output, lse = partial
        total, largest, sums = (
            self._total[:, :, rows],
            self._largest[:, :, rows],
            self._sum[:, :, rows],
        )
        if self._is_empty and total.shape == self._total.shape:
            total.copy_(output)
            largest.copy_(lse)
            sums.copy_(lse != -torch.inf)
        else:
            if self._is_empty:
                self._total.zero_()
            larger = torch.maximum(largest, lse)
            shift = larger.masked_fill(larger == -torch.inf, 0)
            old, new = torch.exp(largest - shift), torch.exp(lse - shift)
            total.mul_(old.unsqueeze(-1)).addcmul_(output.to(total.dtype), new.unsqueeze(-1))
            sums.mul_(old).add_(new)
            largest.copy_(larger)
        self._is_empty = False

    def finish(self) -> Partial:
        """Return the answer; rows that saw no key anywhere give output 0 and lse -inf."""
        output, lse = self._answer
        if self._is_empty:
            self._total.zero_()
        self._total.div_(self._sum.masked_fill(self._sum == 0, 1).unsqueeze(-1))
        if self._total is not output:
            output.copy_(self._total)
        lse.add_(self._sum.log())
        return self._answer


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Combine attention over disjoint key sets into attention over their union.

    Args:
        partials: At least one; all answer the same queries and share shapes, dtypes and device.
            None is written to.

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
        check_partial(partial, first, f"partial {i}")
    answer = Partial(*map(torch.empty_like, first))
    merge_rows(answer, [(partial, slice(None)) for partial in partials])
    return answer


def merge_rows(answer: Partial, parts: Sequence[tuple[Partial, slice]]) -> None:
    """Merge partials over disjoint keys into ``answer``, in their order.

    Args:
        answer: Overwritten; rows that saw no key anywhere get output 0 and lse -inf.
        parts: Partials, and the rows of the answer that each has.
    """
    if parts and merges_at_once(answer):
        from cqs import fused_merge

        with torch.cuda.device_of(answer.output):  # where Triton launches
            fused_merge.merge_rows(answer, parts)
        return
    merge = RunningMerge(answer)
    for partial, rows in parts:
        merge.add(partial, rows)
    merge.finish()


def merges_at_once(answer: Partial) -> bool:
    """Say whether a single kernel merges all partials of ``answer``, best when all are there."""
    return answer.output.is_cuda and answer.output.dtype != torch.float64 and has_triton()


@cache
def has_triton() -> bool:
    """Say whether Triton, which not every PyTorch brings, is installed."""
    return importlib.util.find_spec("triton") is not None


def check_partial(partial: Partial, expected: Partial, name: str) -> None:
    """Raise ValueError unless ``partial`` has the shapes, dtypes and device of ``expected``.

    Its output may also be of the dtype of the lse, unrounded.
    """
    for field, got, want in zip(Partial._fields, partial, expected, strict=True):
        has_dtype = got.dtype in (want.dtype, expected.lse.dtype)
        if not has_dtype or (got.shape, got.device) != (want.shape, want.device):
            raise ValueError(
                f"{name}: {field} must be {tuple(want.shape)} {want.dtype} on {want.device}, "
                f"got {tuple(got.shape)} {got.dtype} on {got.device}"
            )
