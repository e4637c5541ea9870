"""Operands of one call, requirements of fused kernels on them, and conversions to meet these."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.problem.dropout import Dropout, DropoutBits
from cqs.problem.score_terms import PairTerms
from cqs.worker.work import Work

_MAX_GRID = 65535
_HEADS_OF_UNITS = 16
"""Number of heads for which the kernels of units are chosen, whatever theirs is."""
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Smallest positive factor on the scores that fused kernels support."""


class TaskOperands(NamedTuple):
    """Tensors and options of the work of any number of tasks."""

    query: Tensor
    """``[batch, num_heads, rows_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, rows_kv, head_dim]``, in the dtype of the query."""
    value: Tensor
    """``[batch, num_kv_heads, rows_kv, value_dim]``, in the dtype of the query."""
    work: Work
    """The block rows, in row numbers of the tensors."""
    scale: float
    """Factor on the scores."""
    dropout: Dropout | None = None
    """Dropout of the attention probabilities, or ``None``."""
    dropout_bits: DropoutBits | None = None
    """Random bits of the tensors' rows; required with ``dropout``."""
    terms: PairTerms | None = None
    """Score terms of the tensors' rows, or ``None``."""
    is_unit: bool = False
    """Whether the result of a head must not depend on the number of heads."""

    def count_heads(self) -> tuple[int, int]:
        """Return the numbers of heads and of KV heads for which kernels are chosen."""
        if self.is_unit:
            return _HEADS_OF_UNITS, _HEADS_OF_UNITS
        return self.query.shape[:2].numel(), self.key.shape[:2].numel()


class Operands(NamedTuple):
    """Tensors and options of one call, which computes a rectangle or a causal square of scores."""

    query: Tensor
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``, ``seqlen_kv >= 1``. ``num_heads`` is a
    multiple of ``num_kv_heads``; consecutive query heads share a KV head."""
    value: Tensor
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    is_causal: bool
    """Whether query i attends to keys 0..i; requires equal sequence lengths."""
    scale: float
    """Factor on the scores."""
    visible: Tensor | None = None
    """Live pairs, bool ``[seqlen_q, seqlen_kv]``; ``None`` means all, or those of ``is_causal``."""
    kept: Tensor | None = None
    """Pairs that dropout keeps, bool ``[batch, num_heads, seqlen_q, seqlen_kv]``; ``None`` means
    all. Dropout does not change the LSE."""
    keep_scale: float = 1.0
    """Factor on the probabilities of the pairs that dropout keeps."""
    terms: PairTerms | None = None
    """Score terms of the tensors' rows, or ``None``."""
    addend: Tensor | None = None
    """The mask as :func:`mask_addend` returns it, or ``None`` if it is not kept in this form."""

    @property
    def scores_of_row(self) -> int:
        """Return the number of scores of a query in all batch elements and heads."""
        return self.query.shape[0] * self.query.shape[1] * self.key.shape[2]

    def rows(self, rows: Any) -> "Operands":
        """Return the operands of some queries, a slice or int64 indices."""
        visible = None if self.visible is None else self.visible[rows]
        if self.is_causal:
            keys = torch.arange(self.key.shape[2], device=self.key.device)
            visible = keys <= keys[rows].unsqueeze(-1)
        return self._replace(
            query=self.query[:, :, rows],
            is_causal=False,
            visible=visible,
            kept=None if self.kept is None else self.kept[:, :, rows],
            terms=self.terms and self.terms.select(rows),
            addend=None,
        )


def mask_addend(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask: 0 for live pairs and -inf for others."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, -torch.inf)


def why_not_half_precision_on_gpu(query: Tensor, value: Tensor, head_dims: range) -> str | None:
    """Return why a half-precision CUDA library does not support these tensors, or None if it does.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        head_dims: Values of ``head_dim`` and ``value_dim`` that the library supports.
    """
    if query.device.type != "cuda":
        return f"requires CUDA tensors, got {query.device}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"requires bfloat16 or float16, got {query.dtype}"
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim != value_dim:
        return f"requires equal head_dim of query and value, got {head_dim} and {value_dim}"
    if head_dim not in head_dims:
        return (
            f"requires a head_dim that is a multiple of {head_dims.step} up to {head_dims[-1]}, "
            f"got {head_dim}"
        )
    if max(query.shape[:2]) > _MAX_GRID:
        return f"requires batch and heads up to {_MAX_GRID}, got {tuple(query.shape[:2])}"
    return None


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale of the same scores, up to the sign of zero.

    Fused kernels set masked scores to -inf before they scale, or divide by the scale. A scale of 0
    or less, or one that float32 rounds to 0, gives NaN there or unmasks pairs.
    """
    if abs(scale) < MIN_SCALE:
        return 0 * query, 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def with_sign_of(scale: float, grad_query: Tensor) -> Tensor:
    """Return the gradient of a query, given that of the query of :func:`with_positive_scale`.

    Args:
        scale: The scale that was passed to :func:`with_positive_scale`.
        grad_query: Gradient of the query that it returned, ``[batch, num_heads, rows, head_dim]``.
    """
    if abs(scale) < MIN_SCALE:
        return scale * grad_query
    return grad_query if scale > 0 else -grad_query


def with_adjacent_columns(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with a last stride of 1 and no other, and rows apart; the others are copied.

    Kernels allocate results in the order of the query's strides, so in an overlapping view another
    dimension with a stride of 1 may take the place of the columns. Libraries of matrix products
    refuse rows that overlap.
    """
    return tuple(
        [
            t
            if t.stride().count(1) == t.stride(3) == 1 and t.stride(2) >= t.shape[3]
            else t.contiguous()
            for t in tensors
        ]
    )
