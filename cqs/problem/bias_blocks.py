"""The blocks of a bias that a task reads, packed for transport."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cqs.problem.score_terms import ScoreTerms
from cqs.scheduler import Step
from cqs.scheduler.task import join_ranges

Piece = tuple[range, range]
"""Queries and keys of a block; empty where a bias has one row or column for all."""


def pieces_of(steps: Sequence[Step], *, has_rows: bool, has_columns: bool) -> list[Piece]:
    """Return the blocks of a bias that steps read; no entry of the bias is in two of them.

    Args:
        steps: The steps.
        has_rows: Whether the bias has a row for each query, or one for all.
        has_columns: Whether the bias has a column for each key, or one for all.
    """
    blocks = [block for step in steps for block in step.blocks()]
    if has_rows and has_columns:
        return [(block.queries, block.keys) for block in blocks]
    nothing = [range(0)]
    queries = join_ranges(block.queries for block in blocks) if has_rows else nothing
    keys = join_ranges(block.keys for block in blocks) if has_columns else nothing
    return [(rows, columns) for rows in queries for columns in keys]


def pack(terms: ScoreTerms, tensor: Tensor, pieces: Iterable[Piece]) -> Tensor:
    """Return blocks of a bias, or of its sum, one after another."""
    blocks = [block.reshape(-1) for block in places(terms, tensor, pieces)]
    return torch.cat(blocks) if blocks else tensor.new_empty(0)


def places(terms: ScoreTerms, tensor: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
    """Return blocks of a bias, or of its sum, as views."""
    return [terms.cut(tensor, *piece) for piece in pieces]


def hold(
    terms: ScoreTerms,
    held: tuple[Sequence[range], Sequence[range]],
    *,
    has_rows: bool,
    has_columns: bool,
) -> ScoreTerms:
    """Return terms with a bias of zeros for the tokens that a task holds.

    Args:
        terms: Terms with a bias; batch, heads, dtype and device of the new one are the same.
        held: Positions of the queries and keys.
        has_rows: Whether the bias has a row for each query, or one for all.
        has_columns: Whether the bias has a column for each key, or one for all.
    """
    sizes = (
        sum(map(len, ranges)) if has_each else 1
        for ranges, has_each in zip(held, (has_rows, has_columns), strict=True)
    )
    assert terms.bias is not None
    bias = terms.bias.new_zeros((*terms.bias.shape[:2], *sizes))
    return replace(terms, bias=bias, held=(tuple(held[0]), tuple(held[1])))


def unpack(packed: Tensor, into: Sequence[Tensor]) -> None:
    """Add packed blocks to their places."""
    for place, block in zip(into, packed.split([p.numel() for p in into]), strict=True):
        place.add_(block.view(place.shape))
