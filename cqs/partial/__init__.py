"""Partial outputs, gradients, and their merge: all that worker and tiler share."""

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.uncompiled import check_not_traced

SUM_BLOCK = 4096
"""Keys per matrix product of :func:`weighted_sum`."""

_MAX_FUSED_PARTS = 16
"""Most gradients that one Triton kernel adds: it is compiled for their number."""
_LEAST_ELEMENTS = 2**19
"""Least elements for compiled loops, which a process compiles for as long as 1,000 such merges."""
_LOWEST = -1e29
"""Largest LSE that marks a row without keys: kernels write -1e30 or float32's lowest number."""
FIRST_USE = RLock()
"""Held while loops are imported or compiled. A fork waits: its child could do neither."""
os.register_at_fork(
    before=FIRST_USE.acquire, after_in_parent=FIRST_USE.release, after_in_child=FIRST_USE.release
)


class AttentionOutput(NamedTuple):
    """The result of attention with ``return_lse=True``."""

    output: Tensor
    """``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of the query."""
    lse: Tensor
    """``[batch, num_heads, seqlen_q]``, float32 (float64 for float64 queries): the natural
    logarithm of the sum of the exponentials of a query's scores; -inf if it attends to no key."""


class Partial(NamedTuple):
    """A partial output: attention of some queries over some keys."""

    output: Tensor
    """``[batch, num_heads, seqlen_q, value_dim]``, normalised by its own softmax denominator."""
    lse: Tensor
    """``[batch, num_heads, seqlen_q]``, float32 (float64 for float64 outputs): the natural
    logarithm of the softmax denominator. A query that attends to no key has -inf and output 0;
    :func:`merge_partials` also accepts other marks."""

    def to_result(self, return_lse: bool) -> Tensor | AttentionOutput:
        """Return the output for the caller, with the LSE if ``return_lse``."""
        return AttentionOutput(*self) if return_lse else self.output


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and LSEs: float64 for float64, float32 for narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Compute ``weights @ value`` in blocks of 4096 keys.

    BLAS libraries may accumulate one key after another; blocks keep the rounding error small.

    Args:
        weights: ``[..., seqlen_q, seqlen_kv]``.
        value: ``[..., seqlen_kv, value_dim]``, in the dtype of ``weights``. Leading dimensions
            broadcast.

    Returns:
        ``[..., seqlen_q, value_dim]``.
    """
    blocks = zip(weights.split(SUM_BLOCK, dim=-1), value.split(SUM_BLOCK, dim=-2), strict=True)
    products = (block @ values for block, values in blocks)
    total: Tensor = next(products)
    for product in products:
        total += product
    return total


class Gradients(NamedTuple):
    """Gradients of query, key and value.

    Their dtype is that of the tensors, or float32 (float64 for float64 tensors) for sums.
    Contributions of disjoint sets of pairs add up.
    """

    query: Tensor
    """``[batch, num_heads, rows, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, rows, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, rows, value_dim]``."""

    @classmethod
    def zeros(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """Return zero gradients in the accumulation dtype, float32 or float64.

        Args:
            query: ``[batch, num_heads, rows, head_dim]``.
            key: ``[batch, num_kv_heads, rows, head_dim]``.
            value: ``[batch, num_kv_heads, rows, value_dim]``.
        """
        dtype = lse_dtype(query.dtype)
        return cls(*(t.new_zeros(t.shape, dtype=dtype) for t in (query, key, value)))


def check_partial(partial: Partial, answer: Partial, num_rows: int, name: str) -> None:
    """Raise ValueError unless ``partial`` has ``num_rows`` rows of the shape of ``answer``.

    The dtypes and the device must agree, except that its output may have the dtype of the LSE,
    because partial outputs may stay unrounded.
    """
    lse_dtype, whole = answer.lse.dtype, answer.output.shape
    if lse_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: lse must be float32 or float64, got {lse_dtype}")
    for field, got, want, ndim in zip(Partial._fields, partial, answer, (4, 3), strict=True):
        shape = (*whole[:2], num_rows, *whole[3:])[:ndim]
        has_dtype = got.dtype == want.dtype or got.dtype == lse_dtype
        if got.ndim != ndim or not has_dtype or got.shape != shape or got.device != want.device:
            dims = "[batch, num_heads, seqlen_q" + (", value_dim]" if ndim == 4 else "]")
            raise ValueError(
                f"{name}: {field} must be {shape} {want.dtype} on {want.device}, {dims}, "
                f"got {tuple(got.shape)} {got.dtype} on {got.device}"
            )


def _with_empty_rows(partial: Partial, name: str) -> Partial:
    """Return a partial output whose rows without keys have LSE -inf and output 0.

    Kernels also mark them by an LSE of at most -1e29, or by +inf and output 0 (FlashAttention 2).

    Raises:
        ValueError: An LSE is NaN, or +inf where the output is not 0.
    """
    check_not_traced("a merge")
    output, lse = partial
    is_read = not (lse.is_cuda and torch.cuda.is_current_stream_capturing())
    if is_read and (not lse.numel() or lse.abs().max() < -_LOWEST):  # no NaN either
        return partial
    is_empty = (lse <= _LOWEST) | ((lse == torch.inf) & (output == 0).all(dim=-1))
    if is_read and not (is_empty | (lse < torch.inf)).all():
        value = "NaN" if lse.isnan().any() else "+inf where the output is not 0"
        raise ValueError(f"{name}: lse must be finite, or -inf for rows without keys, got {value}")
    return Partial(
        output.masked_fill(is_empty.unsqueeze(-1), 0), lse.masked_fill(is_empty, -torch.inf)
    )


class RunningMerge:
    """Merge partial outputs over disjoint keys one by one (online softmax).

    With ``M = max(lse_i)`` it maintains ``S = sum(exp(lse_i - M))`` and ``A = sum(exp(lse_i - M) *
    output_i)``; the result is ``output = A / S`` and ``lse = M + log(S)``. This is exact up to
    rounding for every division of the keys. All exponents are at most 0, so nothing overflows. Sums
    have the dtype of the LSE and are formed in the order of :meth:`add`.
    """

    def __init__(self, answer: Partial):
        """Start with no keys.

        Args:
            answer: The destination of the result. Its tensors are overwritten.

        Raises:
            ValueError: The shapes of output and LSE do not fit together.
        """
        if answer.output.ndim != 4 or answer.lse.shape != answer.output.shape[:3]:
            check_partial(answer, answer, answer.output.shape[2], "answer")
        self._answer = answer
        self._largest = answer.lse.fill_(-torch.inf)
        self._sum = torch.zeros_like(answer.lse)
        self._total = answer.output
        if answer.output.dtype != answer.lse.dtype:
            self._total = torch.empty_like(answer.output, dtype=answer.lse.dtype)
        self._is_empty = True

    def add(self, partial: Partial, rows: slice = slice(None)) -> None:
        """Merge one partial output.

        Args:
            partial: Partial output of the queries ``rows``; not written to. Rows without keys do
                not change the result; see :func:`merge_partials`.
            rows: The query rows of ``partial``; all by default.

        Raises:
            ValueError: ``partial`` differs from the answer in shape, dtype or device, or an LSE is
                NaN, or +inf where the output is not 0.
        """
        check_partial(partial, self._answer, self._answer.lse[:, :, rows].shape[2], "partial")
        self.add_own(_with_empty_rows(partial, "partial"), rows)

    def add_own(self, partial: Partial, rows: slice = slice(None)) -> None:
        """Merge a partial output of a backend, in which all that is not finite reaches the result.

        Args:
            partial: Partial output of the queries ``rows``. Rows with LSE -inf have output 0, or
                NaN if a value is NaN.
            rows: The query rows of ``partial``; all by default.
        """
        output, lse = partial
        total, largest, sums = (t[:, :, rows] for t in (self._total, self._largest, self._sum))
        if self._is_empty and total.shape == self._total.shape:  # a copy instead of a merge
            total.copy_(output)
            largest.copy_(lse)
            sums.copy_(lse != -torch.inf)
        else:
            if self._is_empty:
                self._total.zero_()
            larger = torch.maximum(largest, lse)
            shift = larger.masked_fill(larger == -torch.inf, 0)  # -inf - -inf would be NaN
            weights = torch.stack([largest, lse]).sub_(shift).exp_()
            _add_rows(total, [total, output], weights)
            sums.mul_(weights[0]).add_(weights[1])
            largest.copy_(larger)
        self._is_empty = False

    def finish(self) -> Partial:
        """Return the result. Rows that attend to no key have output 0 and LSE -inf."""
        output, lse = self._answer
        if self._is_empty:
            self._total.zero_()
        self._total.div_(self._sum.masked_fill(self._sum == 0, 1).unsqueeze(-1))
        if self._total is not output:
            output.copy_(self._total)
        lse.add_(self._sum.log())
        return self._answer


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Merge partial outputs over disjoint sets of keys into the output over their union.

    Rows without keys do not change the result, whatever their output. Their LSE is -inf, as of
    :func:`cqs.attention`, or at most -1e29, or +inf with output 0, as of other kernels.

    Args:
        partials: At least one partial output, all of the same queries and of equal shapes, dtypes
            and device. None is written to.

    Returns:
        The merged output and LSE, in the dtypes of the first partial output.

    Raises:
        ValueError: ``partials`` is empty. Or a partial output differs from the first in shape,
            dtype or device; has an LSE of NaN, of +inf where the output is not 0, or of another
            shape than its output; or requires gradients while they are enabled. The message gives
            its index.

    Example:
        >>> halves = [Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)),
        ...           Partial(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))]
        >>> merge_partials(halves).output
        tensor([[[[0.5000, 0.5000]]]])
    """
    if not partials:
        raise ValueError("partials must have at least one element, got none")
    first = partials[0]
    for i, partial in enumerate(partials):
        check_partial(partial, first, first.output.shape[2], f"partial {i}")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in partial):
            raise ValueError(
                f"partial {i} must not require gradients, got requires_grad=True: detach its "
                "tensors, or call cqs.attention, which is differentiable"
            )
    return merge_own([_with_empty_rows(part, f"partial {i}") for i, part in enumerate(partials)])


def merge_own(partials: Sequence[Partial]) -> Partial:
    """Merge partial outputs of backends; see :meth:`RunningMerge.add_own`.

    Args:
        partials: At least one partial output, all of the same rows, dtypes and device.
    """
    answer = Partial(*map(torch.empty_like, partials[0]))
    merge_rows(answer, [(partial, slice(None)) for partial in partials])
    return answer


def merge_rows(answer: Partial, parts: Sequence[tuple[Partial, slice]]) -> None:
    """Merge partial outputs over disjoint sets of keys into ``answer``, in their order.

    On a GPU one Triton kernel merges all of them, except in float64.

    Args:
        answer: The destination. Rows that attend to no key get output 0 and LSE -inf.
        parts: Partial outputs, each with its query rows in ``answer``.
    """
    if parts and _adds_at_once(answer.output):
        from cqs.partial import fused_merge

        with torch.cuda.device_of(answer.output):  # Triton launches on the current device
            fused_merge.merge_rows(answer, parts)
        return
    num_rows = answer.lse.shape[2]
    bounds = [rows.indices(num_rows)[:2] for _, rows in parts]
    for first, stop in pairwise(sorted({0, num_rows, *chain(*bounds)})):
        are_all = (first, stop) == (0, num_rows)
        target = answer if are_all else _slice_rows(answer, first, stop)
        partials = [
            partial if are_all else _slice_rows(partial, first - start, stop - start)
            for (partial, _), (start, end) in zip(parts, bounds, strict=True)
            if start <= first and stop <= end
        ]
        if partials:
            _merge(target, partials)
        else:
            target.output.zero_()
            target.lse.fill_(-torch.inf)


def _merge(answer: Partial, partials: Sequence[Partial]) -> None:
    """Merge partial outputs of the same rows, in their order."""
    outputs, lses = zip(*partials, strict=True)
    weights = torch.stack(lses)
    largest = weights.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # -inf - -inf would be NaN
    sums = weights.sub_(shift).exp_()[0].clone()
    for i in range(1, len(outputs)):  # in order, which sum(0) does not promise
        sums += weights[i]
    answer.lse.copy_(largest + sums.log())
    weights.div_(sums.masked_fill(sums == 0, 1))
    _add_rows(answer.output, outputs, weights)


def sum_rows(total: Tensor, parts: Sequence[tuple[Tensor, slice]]) -> None:
    """Write the sum of gradients into ``total``, added in their order in float32 or float64.

    On a GPU one Triton kernel adds up to 16 of them, except in float64.

    Args:
        total: The sum, ``[batch, heads, rows, dim]``, in any dtype. Rows without a part get 0.
        parts: Gradients ``[batch, heads, rows, dim]`` of some rows of ``total``, and these rows.
    """
    if 0 < len(parts) <= _MAX_FUSED_PARTS and _adds_at_once(total):
        from cqs.partial import fused_merge

        with torch.cuda.device_of(total):
            fused_merge.sum_rows(total, parts)
        return
    dtype = lse_dtype(total.dtype)
    is_large = total.is_cpu and total.numel() >= _LEAST_ELEMENTS and _loops() is not None
    if is_large and parts and all(part.shape == total.shape for part, _ in parts):
        ones = torch.ones(len(parts), *total.shape[:3], dtype=dtype, device=total.device)
        _add_rows(total, [part for part, _ in parts], ones)
        total.add_(0.0)  # a sum of -0.0 alone is 0.0, as below
        return
    sums = torch.zeros_like(total, dtype=dtype)
    for part, rows in parts:
        sums[:, :, rows] += part
    total.copy_(sums)


def _add_rows(total: Tensor, parts: Sequence[Tensor], weights: Tensor) -> None:
    """Write the weighted sum of parts, added in their order in the dtype of the weights.

    Compiled loops compute large sums on a CPU, if Numba is installed.

    Args:
        total: The sum, ``[batch, heads, rows, dim]``, in any dtype; written to.
        parts: Tensors in the shape of ``total``. The first one may be ``total``, and no other.
        weights: ``[len(parts), batch, heads, rows]``, float32 or float64.
    """
    if total.is_cpu and total.numel() >= _LEAST_ELEMENTS and (loops := _loops()) is not None:
        loops.add_rows(total, parts, weights)
        return
    sums = total if total.dtype == weights.dtype else torch.empty_like(total, dtype=weights.dtype)
    factors = weights.unsqueeze(-1)
    torch.mul(parts[0], factors[0], out=sums)
    for i in range(1, len(parts)):
        sums.addcmul_(parts[i].to(sums.dtype), factors[i])
    if sums is not total:
        total.copy_(sums)


def _slice_rows(partial: Partial, start: int, stop: int) -> Partial:
    return Partial(*(tensor[:, :, start:stop] for tensor in partial))


def _adds_at_once(total: Tensor) -> bool:
    """Return whether a single Triton kernel adds all parts of a sum."""
    return total.is_cuda and total.dtype != torch.float64 and has_triton()


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; some PyTorch builds come without it."""
    return importlib.util.find_spec("triton") is not None


@cache
def _loops() -> Any:
    """Return the module of compiled loops, or ``None`` where Numba cannot be imported."""
    with FIRST_USE:
        try:
            from cqs.partial import cpu_merge
        except ImportError:
            return None
    return cpu_merge
