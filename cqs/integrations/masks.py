"""What the masks of Hugging Face transformers mean, as patterns."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cqs.distributed.agreement import agree, control_group, swap
from cqs.distributed.group_calls import calls_on
from cqs.patterns import (
    Axis,
    BoundPattern,
    Pattern,
    Piece,
    causal,
    documents,
    from_mask,
    per_head,
    sliding_window,
)
from cqs.patterns.masks import as_array
from cqs.patterns.pattern import Lengths
from cqs.patterns.regular import bind_pieces


def of_function(
    mask_function: Callable[..., Tensor], distance: int, is_part: bool
) -> Pattern | None:
    """Return the pattern of a mask function of transformers, ``None`` for one not known.

    Args:
        mask_function: Of :mod:`transformers.masking_utils`; what it was made from is read from its
            closure.
        distance: From the position of the last query to that of the last key.
        is_part: Whether sequences go on elsewhere, so that packed ones are not known.
    """
    if mask_function.__module__ != "transformers.masking_utils":
        return None
    made_from = inspect.getclosurevars(mask_function).nonlocals
    maker = mask_function.__qualname__.split(".")[0]
    if maker == "bidirectional_mask_function":
        return sliding_window(None, None)
    if maker == "and_masks":
        patterns = [of_function(each, distance, is_part) for each in made_from["mask_functions"]]
        known = [each for each in patterns if each is not None]
        return reduce(and_, known) if len(known) == len(patterns) else None
    if maker == "packed_sequence_mask_function" and not is_part:
        return _of_sequences(made_from["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a sequence distances stay
        return of_function(made_from["mask_function"], distance, is_part)
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


def _of_sequences(numbers: Tensor) -> Pattern:
    """Return the pattern of packed sequences.

    Args:
        numbers: Of the sequence that each token belongs to ``[batch, seqlen]``, ascending.
    """
    rows = []
    for row in as_array(numbers):
        starts = np.flatnonzero(np.diff(row)) + 1
        rows.append(documents([0, *starts, len(row)], is_causal=False))
    return by_batch(rows)


def visible_keys(
    attention_mask: Tensor | None, kv_offset: int, kv_length: int
) -> NDArray[np.bool_] | None:
    """Return which keys are no padding ``[batch, kv_length]``, ``None`` if all are.

    Positions beyond the mask are padding, as they are in transformers.
    """
    if attention_mask is None:
        return None
    visible = as_array(attention_mask)[:, kv_offset : kv_offset + kv_length]
    visible = np.pad(visible, ((0, 0), (0, kv_length - visible.shape[1])))
    return None if visible.all() else visible


def of_padding(visible: NDArray[np.bool_]) -> Pattern:
    """Return the pattern of padding, given which keys are none ``[batch, kv_length]``."""
    edges = (np.flatnonzero(np.diff(row, prepend=False, append=False)) for row in visible)
    return by_batch([_Visible(tuple(map(int, each))) for each in edges])


@dataclass(frozen=True)
class _Visible(Pattern):
    """Every query sees some runs of keys."""

    edges: tuple[int, ...]
    """First key and last + 1 of each run; ascending."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        runs = zip(self.edges[::2], self.edges[1::2], strict=True)
        pieces = [Piece(queries, keys.within_cells(start, stop - 1)) for start, stop in runs]
        return bind_pieces(lengths, pieces)


def by_batch(rows: Sequence[Pattern]) -> Pattern:
    """Return the pattern of ``rows[batch]`` for all heads."""
    return rows[0] if len(set(rows)) == 1 else per_head([[row] for row in rows])


def of_tensor(mask: Tensor, q_length: int, kv_length: int) -> Pattern:
    """Return the pattern of a boolean mask, or of one to be added to the scores.

    Args:
        mask: ``[batch, heads, seqlen_q, seqlen_kv]``; 1 stands for all.
        q_length: Number of queries.
        kv_length: Number of keys.

    Raises:
        NotImplementedError: The mask has other dimensions.
        ValueError: The mask is for other lengths, or adds a bias to the scores.
    """
    if mask.ndim != 4:
        raise NotImplementedError(
            f"the mask must be [batch, heads, seqlen_q, seqlen_kv], got {list(mask.shape)}"
        )
    if mask.shape[2] not in (1, q_length) or mask.shape[3] not in (1, kv_length):
        raise ValueError(
            f"the mask is {list(mask.shape)}, of {q_length} queries and {kv_length} keys"
        )
    return from_mask(mask.expand(-1, -1, q_length, kv_length))


def without_mask(lengths: tuple[int, int], is_causal: bool, window: int | None) -> Pattern:
    """Return the pattern of a layer that has no mask, for its numbers of queries and keys."""
    if window is not None:
        raise NotImplementedError(f"a sliding window of {window} without a mask is not supported")
    q_length, kv_length = lengths
    if not is_causal or q_length == 1:
        return sliding_window(None, None)
    if q_length != kv_length:
        raise NotImplementedError(
            f"causal attention of {q_length} queries to {kv_length} keys without a mask "
            "does not say at which keys the queries are"
        )
    return causal()


def stack(pattern: Pattern, q_length: int, kv_length: int) -> "Stacked | None":
    """Return what is the same for a batch as one sequence, if its elements differ, in pieces."""
    batch, _ = pattern.heads
    rows = tuple(pattern.head(element, 0) for element in range(batch))
    if batch == 1 or any(row.bind(q_length, kv_length).blocks is not None for row in rows):
        return None
    return Stacked(rows, q_length, kv_length)


@dataclass(frozen=True)
class Stacked(Pattern):
    """Sequences of equal lengths one after another, each with a pattern of its own."""

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
    tokens = range(axis.tokens.start + by, axis.tokens.stop + by)
    return axis._replace(tokens=tokens, origin=axis.origin + by)


def of_group(
    group: Any, pattern: Pattern | None, visible: NDArray[np.bool_], q_offset: int
) -> Pattern:
    """Return the pattern of the whole sequence, of which each rank has a part.

    Args:
        group: The process group.
        pattern: That of the mask function; ``None`` for one not known.
        visible: Which keys of this rank are no padding ``[batch, kv_length]``.
        q_offset: Position of this rank's first query in its own part.

    Raises:
        NotImplementedError: for a cache and an unknown mask; ValueError on other ranks.
        ValueError: if ranks do not ask for the same.
    """
    error: NotImplementedError | None = None
    if q_offset:
        error = NotImplementedError("a cache is not supported with a process group")
    elif pattern is None:
        error = NotImplementedError(
            "with a process group masks must be causal, bidirectional or sliding windows, "
            "and sequences not packed"
        )
    batch, length = visible.shape
    request = {"call": "a mask", "pattern": pattern, "batch": batch}
    calls = calls_on(group)
    with calls.call():  # another thread's messages must not come between
        lengths = agree(group, request, error, seqlen_kv=length).seqlens_kv
        numbers = [-(-batch * each // 64) for each in lengths]
        words = iter(swap(control_group(group), _to_words(visible), numbers))
    calls.check()
    assert pattern is not None, "or there was an error"
    parts = [
        _from_words(list(islice(words, number)), (batch, each))
        for number, each in zip(numbers, lengths, strict=True)
    ]
    visible = np.concatenate(parts, axis=1)
    return pattern if visible.all() else pattern & of_padding(visible)


def _to_words(flags: NDArray[np.bool_]) -> list[int]:
    """Pack flags into integers of 64 bits, to travel."""
    bits = np.zeros(-(-flags.size // 64) * 64, dtype=bool)
    bits[: flags.size] = flags.ravel()
    return np.packbits(bits).view(np.int64).tolist()


def _from_words(words: list[int], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the flags of :func:`_to_words`."""
    bits = np.unpackbits(np.array(words, dtype=np.int64).view(np.uint8))
    return bits[: math.prod(shape)].astype(bool).reshape(shape)
