"""The score terms of a rank's task, made of those of every rank's queries."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cqs.executors.distributed.agreement import control_group, swap
from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.transport.blocks import swap_blocks
from cqs.problem.bias_blocks import Piece, hold, pieces_of, places
from cqs.problem.score_terms import ScoreTerms, select_heads
from cqs.ranges import overlap
from cqs.scheduler.task import join_ranges, keys_of

_ONE_FOR_ALL, _OWN_ROWS, _EITHER = range(3)


def has_own_rows(group: Any, bias: Tensor, num_rows: int) -> bool:
    """Return whether the ranks pass the rows of their queries, or one row for all queries.

    Every rank calls this.

    Args:
        group: The process group.
        bias: The bias of this rank, ``[1 or batch, 1 or num_heads, 1 or rows, ...]``.
        num_rows: Number of queries of this rank.

    Raises:
        ValueError: Some ranks pass one row for all queries, and others do not; on all ranks.
    """
    own = _OWN_ROWS if bias.shape[2] != 1 else _EITHER if num_rows == 1 else _ONE_FOR_ALL
    row_kinds = {*swap(control_group(group), [own])} - {_EITHER}
    if len(row_kinds) > 1:
        raise ValueError(
            "scores.bias must have one row on all ranks, or on each the rows of its queries"
        )
    return row_kinds != {_ONE_FOR_ALL}


class RankTerms:
    """The score terms of a rank's task, made of those of every rank's queries.

    Blocks of a bias are sent to the ranks that compute with them, and their gradients back.
    """

    def __init__(
        self, group: Any, terms: ScoreTerms, own: Layout, layouts: Sequence[Layout]
    ) -> None:
        """Find the blocks that this rank sends and receives.

        Args:
            group: The process group.
            terms: The terms of this rank's queries.
            own: The layout of this rank.
            layouts: Those of all ranks if there is a bias with rows of every rank.
        """
        self._group = group
        self._terms = replace(terms, bias=None)  # autograd decides how long the tensor lives
        self._heads = [_heads_of(own.chunks, peer) for peer in range(len(layouts))]
        self._own_heads = _heads_of(own.chunks, own.rank)
        queries = own.queries, *own.query_route.held, *(step.queries for step in own.steps)
        keys = own.keys, *own.key_route.held, *keys_of(own.steps)
        self._held = join_ranges(queries), join_ranges(keys)
        self._sent, self._received = list[list[Piece]](), list[list[Piece]]()
        if terms.bias is not None:
            self._has_columns = terms.bias.shape[3] != 1
            self._sent = [self._pieces_of(layout, own) for layout in layouts]
            self._received = [self._pieces_of(own, layout) for layout in layouts]

    def gather(self, terms: ScoreTerms) -> tuple[ScoreTerms, tuple[Tensor, ...]]:
        """Return the terms of this rank's task, and its bias, if any; every rank calls this."""
        task_terms, bias = terms.part(slice(None), self._own_heads), terms.bias
        if bias is not None and terms.held is not None:
            task_terms = hold(task_terms, self._held, has_rows=True, has_columns=self._has_columns)
            received = self._task_blocks(task_terms, task_terms.bias)
            self._swap(bias, self._owner_blocks(bias), received)
        return task_terms, () if task_terms.bias is None else (task_terms.bias,)

    def with_sums(self, bias: Sequence[Tensor], sums: Sequence[Tensor]) -> ScoreTerms:
        """Return the terms of :meth:`gather` with sums for a backward pass.

        Args:
            bias: The bias of this rank's task, if any.
            sums: Sums of the gradients of the leaves of this rank.
        """
        rank_terms = replace(self._terms, sums=tuple(sums))
        task_terms = rank_terms.part(slice(None), self._own_heads)
        if not bias:
            return task_terms
        task_terms = replace(task_terms, bias=bias[0])
        if rank_terms.held is None:
            return task_terms
        sums = task_terms.sums
        if rank_terms.bias_requires_grad and sums:
            sums = torch.zeros_like(bias[0], dtype=sums[0].dtype), *sums[1:]
        return replace(task_terms, held=self._held, sums=tuple(sums))

    def return_sums(self, task_terms: ScoreTerms, sums: Sequence[Tensor]) -> None:
        """Add the sums of all tasks to those of this rank's queries; every rank calls this."""
        if self._terms.held is not None and self._terms.bias_requires_grad:
            sent = self._task_blocks(task_terms, task_terms.sums[0])
            self._swap(sums[0], sent, self._owner_blocks(sums[0]))

    def _pieces_of(self, task: Layout, owner: Layout) -> list[Piece]:
        """Return the blocks of a bias that a task reads of the rows of an owner."""
        pieces = pieces_of(task.steps, has_rows=True, has_columns=self._has_columns)
        common = ((overlap(rows, owner.queries), keys) for rows, keys in pieces)
        return [(rows, keys) for rows, keys in common if rows]

    def _owner_blocks(self, tensor: Any) -> list[list[Tensor]]:
        """Return the blocks that every rank requires, as views of a tensor of this rank's rows."""
        return [
            places(self._terms, select_heads(tensor, slice(None), heads), pieces)
            for heads, pieces in zip(self._heads, self._sent, strict=True)
        ]

    def _task_blocks(self, task_terms: ScoreTerms, tensor: Any) -> list[list[Tensor]]:
        """Return the blocks of every rank's rows, as views of a tensor of this rank's task."""
        return [places(task_terms, tensor, pieces) for pieces in self._received]

    def _swap(self, like: Tensor, sent: list[list[Tensor]], places: list[list[Tensor]]) -> None:
        """Send blocks to every rank, and add those of every rank to their places."""
        received = [list(map(torch.empty_like, blocks)) for blocks in places]
        swap_blocks(self._group, sent, received, like)
        for place, block in zip(chain(*places), chain(*received), strict=True):
            place.add_(block)


def _heads_of(chunks: Sequence[HeadChunk], rank: int) -> slice:
    """Return the query heads that a rank computes."""
    return slice(chunks[0].query_heads[rank].start, chunks[-1].query_heads[rank].stop)
