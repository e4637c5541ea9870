"""Conversion of masks of Hugging Face transformers to patterns."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cqs.executors.distributed.agreement import errors_shared, gather
from cqs.patterns import (
    BoundPattern,
    Pattern,
    causal,
    documents,
    from_mask,
    per_head,
    sliding_window,
)
from cqs.patterns.arrays import as_array
from cqs.patterns.masks import MASKED_OUT
from cqs.patterns.pattern import Lengths
from cqs.patterns.piece import Axis, Piece
from cqs.patterns.positions import bind_pieces
from cqs.problem.tensors import with_four_dimensions
from cqs.ranges import moved

_PACKED = "packed_sequence_mask_function"
"""Function of transformers that makes the mask function of packed sequences."""


def packed_sequences(numbers: Tensor) -> Pattern:
    """Return the pattern of packed sequences.

    Args:
        numbers: Index of each token's sequence, ascending integers ``[batch, seqlen]``.
    """
    return documents_between(np.diff(row) != 0 for row in as_array(numbers))


def documents_between(begins: Iterable[NDArray[np.bool_]]) -> Pattern:
    """Return the pattern of packed sequences, given for each row whether token i + 1 begins one."""
    ends = ([0, *np.flatnonzero(row) + 1, len(row) + 1] for row in begins)
    return by_batch([documents(row, is_causal=False) for row in ends])


def recognise_pattern(
    mask_function: Callable[..., Tensor],
    distance: int,
    is_part: bool,
    make_packed: Callable[[Tensor], Pattern] = packed_sequences,
) -> Pattern | None:
    """Return the pattern of a mask function of transformers, or ``None`` if it is not recognised.

    Args:
        mask_function: A function of :mod:`transformers.masking_utils`; its parameters are read from
            its closure.
        distance: Position of the last key minus position of the last query.
        is_part: Whether the rank has a part of each sequence. Packed sequences are then ignored:
            :func:`gather_documents` returns them.
        make_packed: Returns the pattern of packed sequences.
    """
    if mask_function.__module__ != "transformers.masking_utils":
        return None
    made_from = inspect.getclosurevars(mask_function).nonlocals
    maker = _maker_of(mask_function)
    if maker == "bidirectional_mask_function":
        return sliding_window(None, None)
    if maker == "and_masks":
        functions = made_from["mask_functions"]
        if is_part:
            functions = [term for term in functions if _maker_of(term) != _PACKED]
        patterns = [recognise_pattern(term, distance, is_part, make_packed) for term in functions]
        known = [pattern for pattern in patterns if pattern is not None]
        return reduce(and_, known) if len(known) == len(patterns) else None
    if maker == _PACKED:
        return None if is_part else make_packed(made_from["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a sequence distances stay
        return recognise_pattern(made_from["mask_function"], distance, is_part, make_packed)
    if distance:
        return None
    if maker == "causal_mask_function":
        return causal()
    window = made_from.get("sliding_window", 0)
    if maker == "sliding_window_overlay" and window > 0:
        return sliding_window(window - 1, None)
    if maker == "sliding_window_bidirectional_overlay" and window >= 0:
        return sliding_window(window, window)
    return None


def has_packed(mask_function: Callable[..., Tensor]) -> bool:
    """Return whether a mask function of transformers is one of packed sequences."""
    functions = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    return any(_maker_of(function) == _PACKED for function in (mask_function, *functions))


def _maker_of(mask_function: Callable[..., Tensor]) -> str:
    """Return the name of the function of transformers that has made a mask function."""
    return mask_function.__qualname__.split(".")[0]


def visible_keys(
    attention_mask: Tensor | None, kv_offset: int, kv_length: int
) -> NDArray[np.bool_] | None:
    """Return the keys that are not padding, boolean ``[batch, kv_length]``; ``None`` if all are.

    Positions beyond the mask are padding, as in transformers.

    Args:
        attention_mask: ``[batch, positions]``, False or 0 at padding; ``None`` without padding.
        kv_offset: Position of the first key.
        kv_length: Number of keys.
    """
    if attention_mask is None:
        return None
    visible = as_array(attention_mask)[:, kv_offset : kv_offset + kv_length]
    visible = np.pad(visible, ((0, 0), (0, kv_length - visible.shape[1])))
    return None if visible.all() else visible


def mask_padding(visible: NDArray[np.bool_]) -> Pattern:
    """Return the pattern of padding.

    Args:
        visible: True for keys that are not padding, boolean ``[batch, kv_length]``.
    """
    edges = (np.flatnonzero(np.diff(row, prepend=False, append=False)) for row in visible)
    return by_batch([_Visible(tuple(map(int, ends))) for ends in edges])


@dataclass(frozen=True)
class _Visible(Pattern):
    """Every query sees some runs of keys."""

    edges: tuple[int, ...]
    """First key and last + 1 of each run; ascending."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        runs = zip(self.edges[::2], self.edges[1::2], strict=True)
        pieces = [Piece(queries, keys.within_cells(start, stop)) for start, stop in runs]
        return bind_pieces(lengths, pieces)


def by_batch(rows: Sequence[Pattern]) -> Pattern:
    """Return the pattern that applies ``rows[batch]`` to all heads of a batch element."""
    return rows[0] if len(set(rows)) == 1 else per_head([[row] for row in rows])


def split_mask(mask: Tensor, q_length: int, kv_length: int) -> tuple[Pattern, Tensor | None]:
    """Return the pattern of a boolean or additive mask, and its bias, ``None`` without one.

    A mask that is added to the scores masks pairs out and biases others. It has a bias if it
    requires gradients or has values other than 0 and at most -10,000.

    Args:
        mask: ``[batch, heads, seqlen_q, seqlen_kv]``; a dimension of 1 applies to all.
        q_length: Number of queries.
        kv_length: Number of keys.

    Raises:
        NotImplementedError: The mask has other dimensions.
        ValueError: The mask is for other lengths.
    """
    if mask.ndim != 4:
        raise NotImplementedError(
            f"attention_mask must be [batch, heads, seqlen_q, seqlen_kv], got {list(mask.shape)}"
        )
    with_four_dimensions("attention_mask", mask, (*mask.shape[:2], q_length, kv_length))
    bias, is_traced = None, torch.compiler.is_dynamo_compiling()
    if mask.is_floating_point() and (
        is_traced or mask.requires_grad or not ((mask == 0) | (mask <= MASKED_OUT)).all()
    ):
        visible = mask > torch.finfo(mask.dtype).min / 2
        if not is_traced and visible.all():
            return sliding_window(None, None), mask
        bias, mask = mask.masked_fill(~visible, 0), visible
    return from_mask(mask.expand(-1, -1, q_length, kv_length)), bias


def indexed_keys(indices: Tensor, kv_length: int) -> Pattern:
    """Return the pattern in which each query sees the keys of its indices.

    Args:
        indices: ``[batch, seqlen_q, keys]``; -1 is no key.
        kv_length: Number of keys.
    """
    visible = indices.new_zeros((*indices.shape[:2], kv_length + 1), dtype=torch.bool)
    visible = visible.scatter(2, indices.long() % (kv_length + 1), True)[:, None, :, :kv_length]
    return from_mask(visible)


def without_mask(lengths: tuple[int, int], is_causal: bool, window: int | None) -> Pattern:
    """Return the pattern of a layer that has no mask.

    Args:
        lengths: Number of queries and of keys.
        is_causal: Whether the layer is causal.
        window: The ``sliding_window`` that the layer passes, or ``None``.

    Raises:
        NotImplementedError: The layer has a window, or is causal with unequal lengths.
    """
    if window is not None:
        raise NotImplementedError(
            f"sliding_window must be None without a mask, got {window}: pass the mask of the window"
        )
    q_length, kv_length = lengths
    if not is_causal or q_length == 1:
        return sliding_window(None, None)
    if q_length != kv_length:
        raise NotImplementedError(
            f"causal attention of {q_length} queries to {kv_length} keys requires a mask, because "
            "the positions of the queries are unknown"
        )
    return causal()


def stack(pattern: Pattern, q_length: int, kv_length: int) -> "Stacked | None":
    """Return the equivalent pattern of the batch as one sequence.

    Returns:
        The stacked pattern; ``None`` if all batch elements have the same pattern, or if one has a
        block list.
    """
    batch, _ = pattern.heads
    rows = tuple(pattern.head(element, 0) for element in range(batch))
    if batch == 1 or any(row.bind(q_length, kv_length).blocks is not None for row in rows):
        return None
    return Stacked(rows, q_length, kv_length)


@dataclass(frozen=True)
class Stacked(Pattern):
    """The pattern of sequences of equal lengths one after another, each with its own pattern."""

    rows: tuple[Pattern, ...]
    q_length: int
    kv_length: int

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return bind_pieces(
            lengths,
            [
                piece._replace(
                    queries=_moved(piece.queries, element * self.q_length),
                    keys=_moved(piece.keys, element * self.kv_length),
                )
                for element, row in enumerate(self.rows)
                for piece in row.bind(self.q_length, self.kv_length).pieces
            ],
        )


def _moved(axis: Axis, by: int) -> Axis:
    return axis._replace(tokens=moved(axis.tokens, by), origin=axis.origin + by)


class GroupMask(NamedTuple):
    """The mask of a sequence that is sharded over the ranks of a group."""

    pattern: Pattern
    """The visible pairs, without regard to packed sequences."""
    num_tokens: int
    """Number of tokens of all ranks."""
    is_padded: bool
    """Whether a rank has passed a padding mask; transformers then has no packed sequences."""


def gather_mask(
    group: Any,
    pattern: Pattern | None,
    visible: NDArray[np.bool_],
    q_offset: int,
    *,
    is_padded: bool,
) -> GroupMask:
    """Return the mask of the whole sequence, which is sharded over the ranks of a group.

    Args:
        group: The process group.
        pattern: Pattern of the mask function; ``None`` if it was not recognised.
        visible: True for keys of this rank that are not padding, boolean ``[batch, kv_length]``.
        q_offset: Position of this rank's first query in its own shard; above 0 with a cache.
        is_padded: Whether this rank has a padding mask.

    Raises:
        NotImplementedError: There is a cache, or the mask function was not recognised; the other
            ranks raise ValueError.
        ValueError: Ranks differ in batch size or pattern.
    """
    with errors_shared(group):
        if q_offset:
            raise NotImplementedError("a cache is not supported with a process group")
        if pattern is None:
            raise NotImplementedError(
                "with a process group masks must be causal, bidirectional or sliding windows"
            )
    batch, length = visible.shape
    request = {"call": "a mask", "pattern": pattern, "batch": batch}
    own = [length, int(is_padded), *np.packbits(visible).tolist()]
    rank_masks = gather(group, request, own)
    parts = [
        np.unpackbits(np.array(packed, np.uint8), count=batch * num_keys).reshape(batch, num_keys)
        for num_keys, _, *packed in rank_masks
    ]
    visible = np.concatenate(parts, axis=1).astype(bool)
    whole = pattern if visible.all() else pattern & mask_padding(visible)
    return GroupMask(whole, visible.shape[1], any(rank_mask[1] for rank_mask in rank_masks))


def gather_documents(
    group: Any, position_ids: Tensor, *, are_global: bool = False
) -> Pattern | None:
    """Return the pattern of packed sequences that are sharded over the ranks of a group.

    As in transformers, a sequence begins where a position does not follow the one before.

    Args:
        group: The process group, or ``None`` if the sequences are not sharded.
        position_ids: Positions of this rank's tokens in their sequences, ``[batch, rows]``.
        are_global: Whether positions are known to be those of the whole sequence. Otherwise ranks
            that all count from 0 are an error.

    Returns:
        The pattern of the whole sequence, or ``None`` if it is not packed.

    Raises:
        ValueError: All ranks count from 0, or ranks differ in batch size.
    """
    positions = as_array(position_ids)
    own = [positions.shape[1]]
    for row in positions if own[0] else ():
        starts = np.flatnonzero(np.diff(row) != 1) + 1
        own += [int(row[0]), int(row[-1]), len(starts), *starts.tolist()]
    request = {"call": "position_ids", "batch": len(positions)}
    rank_positions = [own] if group is None else gather(group, request, own)
    parts = [(rank, *part) for rank, part in enumerate(rank_positions) if part[0]]
    if (
        len(parts) > 1
        and not are_global
        and all(set(part[2::3]) == {0} == set(part[4::3]) for part in parts)
    ):
        raise ValueError(
            f"position_ids must be positions in the whole sequence, got 0 on rank {parts[1][0]} of "
            "the group: pass those of the rank's shard, or cu_seq_lens_q for packed sequences that "
            "begin where shards begin"
        )
    rows: list[list[int]] = []
    unread = [iter(part[2:]) for part in parts]
    for _ in range(len(positions)):
        ends: list[int] = []
        num_tokens, expected = 0, None
        for (_, num_rows, *_), numbers in zip(parts, unread, strict=True):
            first, last, number = islice(numbers, 3)
            ends += [num_tokens] if first != expected else []
            ends += [num_tokens + start for start in islice(numbers, number)]
            num_tokens, expected = num_tokens + num_rows, last + 1
        rows.append([*ends, num_tokens])
    if all(len(ends) < 3 for ends in rows):
        return None
    return by_batch([documents(ends, is_causal=False) for ends in rows])
