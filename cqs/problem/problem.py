"""The tensors and options of one attention call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor

from cqs.partial import Partial, lse_dtype
from cqs.patterns import BoundPattern, Pattern
from cqs.problem.dropout import Dropout
from cqs.scheduler import AttentionShape, Kind, Plan, make_plan

GPU_TILE = 128
"""Tokens of a tile of the GPU kernels; token groups on a GPU begin at multiples of it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors and options of one attention call, validated by :func:`check_problem`."""

    query: Tensor
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    is_causal: bool
    """Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``."""
    scale: float
    """Factor on the scores."""
    dropout: Dropout | None = None
    """``None`` for a dropout probability of 0."""
    pattern: Pattern | None = None
    """``None`` for dense attention, causal or not. With a pattern :attr:`is_causal` is False."""

    @property
    def bound_pattern(self) -> BoundPattern | None:
        """The pattern bound to the lengths of the tensors, for a problem without per-head ones."""
        if self.pattern is None:
            return None
        return self.pattern.bind(self.query.shape[2], self.key.shape[2])

    @property
    def differs_by_head(self) -> bool:
        """Whether the pattern is given per head or per batch element."""
        return self.pattern is not None and self.pattern.heads != (1, 1)

    def parts(self) -> Iterator[tuple[tuple[slice, slice], "Problem"]]:
        """Divide the problem into parts that each have a single pattern.

        Adjacent batch elements of equal patterns form one part, and adjacent heads too if they are
        all the query heads of their KV heads, or belong to a single KV head.

        Yields:
            Slices of batch elements and query heads, and the problem of this part. Without a
            pattern there is one part.
        """
        for (row, heads), (_, kv_heads) in self.cuts():
            batch, head = row.start or 0, heads.start or 0
            yield (
                (row, heads),
                replace(
                    self,
                    query=self.query[row, heads],
                    key=self.key[row, kv_heads],
                    value=self.value[row, kv_heads],
                    dropout=self.dropout and self.dropout.moved(batch, head),
                    pattern=self.pattern and self.pattern.head(batch, head),
                ),
            )

    def cuts(self) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Yield ``(batch elements, query heads), (batch elements, KV heads)`` of each part."""
        pattern, whole = self.pattern, slice(None)
        batches, num_heads = (1, 1) if pattern is None else pattern.heads
        patterns = [
            tuple(pattern and pattern.head(batch, head) for head in range(num_heads))
            for batch in range(batches)
        ]
        group_size = num_heads // self.key.shape[1] if num_heads > 1 else 1
        for row in _runs(patterns) if batches > 1 else [whole]:
            if num_heads == 1:
                yield (row, whole), (row, whole)
                continue
            for heads in _runs(patterns[row.start or 0]):
                first = heads.start
                # GQA: a part is within one KV head, or consists of whole groups of query heads.
                while first < (stop := heads.stop):
                    if first % group_size:
                        stop = min(stop, first + group_size - first % group_size)
                    elif stop - first > group_size:
                        stop -= stop % group_size
                    of_keys = slice(first // group_size, -(-stop // group_size))
                    yield (row, slice(first, stop)), (row, of_keys)
                    first = stop

    @property
    def num_bytes(self) -> int:
        """Bytes of query, key and value."""
        return self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def shape(self) -> AttentionShape:
        """Batch, heads, head dimensions and itemsize, the inputs of the cost model."""
        return AttentionShape(
            batch=self.query.shape[0],
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_dim=self.query.shape[3],
            value_dim=self.value.shape[3],
            itemsize=self.query.element_size(),
            has_dropout=self.dropout is not None,
        )

    def make_plan(self, num_tasks: int, kind: Kind | str | None = None) -> Plan:
        """Divide this problem into tasks; see :func:`cqs.make_plan`."""
        return make_plan(
            self.query.shape[2],
            self.key.shape[2],
            num_tasks=num_tasks,
            is_causal=self.is_causal,
            kind="quorums" if kind is None else kind,
            tile=GPU_TILE if self.query.is_cuda else 1,
            pattern=self.pattern,
        )

    def empty_answer(self) -> Partial:
        """Allocate the output, in the dtype and on the device of the query, and the LSE."""
        shape = (*self.query.shape[:3], self.value.shape[3])
        return Partial(
            self.query.new_empty(shape),
            self.query.new_empty(shape[:3], dtype=lse_dtype(self.query.dtype)),
        )


def _runs(values: Sequence[Any]) -> Iterator[slice]:
    """Yield the slices of equal neighbours."""
    first = 0
    for _, alike in groupby(values):
        stop = first + len(list(alike))
        yield slice(first, stop)
        first = stop
