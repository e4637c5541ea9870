"""Patterns made from arrays: masks, block layouts, FlexAttention's block masks, rows of keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cqs.arguments import as_integer
from cqs.patterns.affine_rows import Rows, as_pieces
from cqs.patterns.algebra import tidy_all
from cqs.patterns.arrays import as_array
from cqs.patterns.block_list import BlockList
from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Lengths, Pattern, content_digest, made_in_graphs, per_head
from cqs.patterns.piece import FAR
from cqs.patterns.regular import find_pieces
from cqs.uncompiled import uncompiled

MASKED_OUT = -9984.0
"""Largest value of an additive mask that masks a pair out: -10,000, the least negative constant in
common use, rounded to bfloat16."""
_MOST_PAIRS = 2**28
"""Largest mask of a block mask that is made as a whole, in 0.3 GB."""


@made_in_graphs
def from_mask(mask: Any) -> Pattern:
    """Return the pattern of a boolean or additive mask, for sequences of its lengths.

    A regular mask becomes the pieces of the pattern that it shows: windows, dilated windows,
    strides, blocks of one size, summary columns, unions of these, and rows of keys in arithmetic
    progression. Any other mask is stored in blocks of 128 x 128 pairs: one bit per pair of a block
    that is neither empty nor full. The output of a query that sees no key is 0.

    Args:
        mask: ``[seqlen_q, seqlen_kv]`` or ``[batch, heads, seqlen_q, seqlen_kv]``, a NumPy array or
            a tensor on any device. A batch or head dimension of 1 applies to all. Boolean masks
            are True where a query sees a key; floating-point masks are 0 there, and at most
            -10,000 (or -inf) elsewhere.

    Raises:
        TypeError: ``mask`` is neither boolean nor floating point.
        ValueError: ``mask`` does not have 2 or 4 dimensions, or has another value.
    """
    array = _as_visible(as_array(mask))
    if array.ndim not in (2, 4):
        raise ValueError(
            "mask must be [seqlen_q, seqlen_kv] or [batch, heads, seqlen_q, seqlen_kv], "
            f"got {list(array.shape)}"
        )

    def one(rows: NDArray[np.bool_]) -> Pattern:
        return Listed("from_mask", _bound(rows))

    return _per_head(array, one)


@made_in_graphs
def block_sparse(layout: Any, block: int) -> Pattern:
    """Return the pattern of a block layout, for sequences of as many blocks.

    The last block of queries and of keys may be partial. Query i is in row ``i // block``.

    Args:
        layout: ``[rows, columns]``, ``[heads, rows, columns]`` or ``[batch, heads, rows,
            columns]``: a NumPy array, tensor or nested list, nonzero where a block is live.
        block: Queries and keys per block, at least 1.

    Raises:
        TypeError: ``block`` is not an integer.
        ValueError: ``block`` is less than 1, or ``layout`` does not have 2, 3 or 4 dimensions.

    Example:
        >>> block_sparse([[1, 0], [1, 1]], 2).to_mask(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    block = as_integer("block", block, 1)
    array = as_array(layout).astype(bool)
    if array.ndim not in (2, 3, 4):
        raise ValueError(
            "layout must be [rows, columns], with heads or batch and heads before it, "
            f"got {list(array.shape)}"
        )
    return _per_head(
        array, lambda rows: _BlockSparse(rows.shape, block, np.packbits(rows).tobytes())
    )


@made_in_graphs
def acsr(start: Any, step: Any, count: Any) -> Pattern:
    """Return the pattern in which query i sees keys ``start[i] + step[i] * c``, c < ``count[i]``.

    This is the affine-compressed-sparse-row format of SPLAT (Gupta et al., arXiv 2407.16847), for
    sequences of ``len(start)`` queries. Adjacent rows with the same step are joined into one piece
    if their first and last keys are constant or advance by one per row. A window takes at most
    three pieces and a block takes one; an irregular row takes one each. Takes O(rows).

    Args:
        start: First key of every row, ``[seqlen_q]``, integers of at least 0.
        step: Distance between the keys of every row, ``[seqlen_q]``, integers of at least 1.
        count: Number of keys of every row, ``[seqlen_q]``, integers of at least 0.

    Raises:
        TypeError: An argument is not a one-dimensional array of integers.
        ValueError: A value is out of range, or the arguments differ in length.

    Example:
        >>> acsr([0, 1, 0], [1, 1, 2], [1, 1, 2]).to_mask(3).astype(int).tolist()
        [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    columns = []
    for name, values, least in (("start", start, 0), ("step", step, 1), ("count", count, 0)):
        array = as_array(values)
        if array.ndim != 1 or array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name} must be a row of integers, got {values!r}")
        if array.size and array.min() < least:
            raise ValueError(f"{name} must be at least {least}, got {array.min()}")
        columns.append(np.array(array.tolist(), dtype=object))  # ends may exceed int64
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"start, step and count must be of one length, got {list(map(len, columns))}"
        )
    first, steps, counts = columns
    rows = Rows(first, steps, counts, first + steps * (counts - 1))
    seqlen_kv = max((rows.last + 1)[rows.num_keys > 0], default=0)
    if seqlen_kv > FAR:
        raise ValueError(f"keys must lie below {FAR}, got {seqlen_kv - 1}")
    num_rows = len(first)
    bound = BoundPattern(num_rows, max(num_rows, seqlen_kv), tuple(tidy_all(as_pieces(rows))))
    return Listed("acsr", bound, seqlen_kv)


@uncompiled
def from_deepspeed(config: Any, seqlen: int) -> Pattern:
    """Return the pattern of a DeepSpeed ``SparsityConfig``, for self-attention of one length.

    DeepSpeed makes the layout, so live blocks are its own, random blocks included: they depend on
    the state of Python's ``random`` module. A "unidirectional" layout is causal by blocks: diagonal
    blocks are full unless the pattern is combined with :func:`~cqs.patterns.causal`.

    Args:
        config: An object of one of DeepSpeed's classes: it has ``block``, the tokens per block, and
            ``make_layout(seqlen)``, which returns ``[heads, blocks, blocks]``, nonzero where a
            block is live.
        seqlen: Number of queries and of keys; DeepSpeed requires a multiple of ``config.block``.

    Returns:
        The pattern of :func:`block_sparse`. It is one for all heads if their layouts are equal.

    Raises:
        TypeError: ``config`` does not make a layout.
    """
    if not hasattr(config, "make_layout"):
        raise TypeError(f"config must be a SparsityConfig of DeepSpeed, got {config!r}")
    layout = as_array(config.make_layout(seqlen)).astype(bool)
    is_shared = (layout == layout[:1]).all()
    return block_sparse(layout[:1] if is_shared else layout, config.block)


@uncompiled
def from_block_mask(block_mask: Any) -> Pattern:
    """Return the pattern of a FlexAttention ``BlockMask``, for sequences of its lengths.

    ``mask_mod`` is evaluated for partial blocks only, with scalars (``torch.vmap``) on the device
    of the block mask.

    Args:
        block_mask: An object with the attributes ``seq_lengths``, ``BLOCK_SIZE``,
            ``kv_num_blocks``, ``kv_indices``, ``full_kv_num_blocks``, ``full_kv_indices`` (the last
            two may be ``None``) and ``mask_mod``.

    Raises:
        TypeError: ``block_mask`` is not a ``BlockMask``.
        ValueError: Its blocks do not fit its lengths, or it lacks dimensions and it is not clear
            which of batch, heads and rows.
    """
    return read_block_mask(block_mask)


def read_block_mask(block_mask: Any, *sizes: int) -> Pattern:
    """Return the pattern of a block mask for a call with a batch and query heads, if given."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"block_mask must be a BlockMask of FlexAttention, got {block_mask!r}")
    num_rows = -(-block_mask.seq_lengths[0] // block_mask.BLOCK_SIZE[0])
    layouts, shape = read_layouts(block_mask), tuple(block_mask.kv_num_blocks.shape)
    patterns = []
    for axes in combinations(range(3), 3 - len(shape)):  # dimensions that may be missing
        full, partial = (np.expand_dims(layout, axes) for layout in layouts)
        if axes and any(n not in (1, m) for n, m in zip(partial.shape[:2], sizes, strict=False)):
            continue
        if partial.shape[2] == num_rows or (not axes and partial.shape[2] > num_rows):
            pattern = _patterns_of_layouts(block_mask, full, partial)
            if axes and len({cell for row in pattern for cell in row}) == 1:
                pattern = [[pattern[0][0]]]
            patterns.append(per_head(pattern))
    if len(set(patterns)) != 1:
        raise ValueError(
            "block_mask must have blocks [batch, heads, rows], with a row for each "
            f"{block_mask.BLOCK_SIZE[0]} of its {block_mask.seq_lengths[0]} queries, got "
            f"{list(shape)}: index it by integers, slices or 1-d tensors, and set its seq_lengths"
        )
    return patterns[0]


def _patterns_of_layouts(
    block_mask: Any, full: NDArray[np.bool_], partial: NDArray[np.bool_]
) -> list[list[Pattern]]:
    """Return the patterns ``[batch][heads]`` of full and partial blocks of a block mask."""
    seqlen_q, seqlen_kv = block_mask.seq_lengths
    block_q, block_kv = block_mask.BLOCK_SIZE

    def one(batch: int, head: int) -> Pattern:
        def strip(queries: range) -> NDArray[np.bool_]:
            block_rows = np.array(queries) // block_q
            mask, unsure = (
                np.repeat(layout[batch, head, block_rows], block_kv, axis=1)[:, :seqlen_kv]
                for layout in (full, partial)
            )
            keys = np.flatnonzero(unsure.any(axis=0))
            allowed = _evaluate(block_mask, batch, head, np.array(queries), keys)
            mask[:, keys] |= unsure[:, keys] & allowed
            return mask

        blocks = BlockList.from_strips(seqlen_q, seqlen_kv, strip)
        listed = BoundPattern(seqlen_q, seqlen_kv, (), blocks)
        is_small = seqlen_q * seqlen_kv <= _MOST_PAIRS
        return Listed("from_block_mask", _bound(listed.to_mask()) if is_small else listed)

    batches, heads = partial.shape[:2]
    return [[one(batch, head) for head in range(heads)] for batch in range(batches)]


@dataclass(frozen=True, repr=False)
class Listed(Pattern):
    """Pattern of a mask or of rows of keys, for the lengths of the arrays."""

    origin: str
    """Name of the function that made the pattern."""
    bound: BoundPattern
    """The pattern at these lengths."""
    least_kv: int | None = None
    """Smallest number of keys that is supported; ``None`` supports the bound lengths only."""

    @property
    def default_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        """The lengths of the arrays."""
        return self.bound.lengths

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether these are the lengths of the arrays, perhaps with other keys."""
        seqlen_q, seqlen_kv = lengths
        if self.least_kv is None or seqlen_q != self.bound.seqlen_q:
            return lengths == self.default_lengths
        return seqlen_kv >= self.least_kv

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return replace(self.bound, seqlen_kv=lengths.seqlen_kv)

    def __repr__(self) -> str:
        share, blocks = self.bound.density, self.bound.blocks
        lengths = "{} x {}".format(*self.default_lengths)
        digest = content_digest(
            repr(self.bound.pieces).encode() if blocks is None else blocks.digest
        )
        return f"{self.origin}(<{lengths}, {100 * share:.3g} %, {digest}>)"


@dataclass(frozen=True, repr=False)
class _BlockSparse(Pattern):
    shape: tuple[int, ...]
    block: int
    packed: bytes

    @property
    def default_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        rows, columns = self.shape
        return rows * self.block, columns * self.block

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the lengths have as many blocks as the layout."""
        return tuple(-(-length // self.block) for length in lengths) == self.shape

    def _bind(self, lengths: Lengths) -> BoundPattern:
        size = int(np.prod(self.shape))
        bits = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=size)
        layout = bits.reshape(self.shape).view(bool)
        blocks = BlockList.from_strips(
            *lengths, lambda queries: layout[np.array(queries) // self.block], self.block
        )
        return BoundPattern(*lengths, (), blocks)

    def __repr__(self) -> str:
        rows, columns = self.shape
        digest = content_digest(self.packed)
        return f"block_sparse(<{rows} x {columns} blocks, {digest}>, {self.block})"


def _bound(mask: NDArray[np.bool_]) -> BoundPattern:
    """Return the pieces of a regular mask, or the blocks of any other."""
    seqlen_q, seqlen_kv = mask.shape
    pieces, blocks = find_pieces(mask), None
    if pieces is None:
        blocks = BlockList.from_strips(seqlen_q, seqlen_kv, lambda q: mask[q.start : q.stop])
    return BoundPattern(seqlen_q, seqlen_kv, pieces or (), blocks)


def read_layouts(block_mask: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return a block mask's full and partial blocks, bool ``[batch, heads, rows, columns]``.

    Dimensions before the columns are missing if the block mask lacks them.
    """
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None:
        return np.zeros_like(partial), partial
    return _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns), partial


def _listed(numbers: Any, indices: Any, columns: int) -> NDArray[np.bool_]:
    """Return the boolean layout of a ``BlockMask``'s block list."""
    numbers, indices = as_array(numbers), as_array(indices).astype(np.int64)
    layout = np.zeros((*numbers.shape, max(columns, indices.shape[-1])), dtype=bool)
    for row in np.ndindex(numbers.shape):
        layout[row][indices[row][: numbers[row]]] = True
    return layout[..., :columns]


def _evaluate(
    block_mask: Any, batch: int, head: int, queries: NDArray[Any], keys: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return ``mask_mod`` of a block mask as a boolean array ``[len(queries), len(keys)]``.

    FlexAttention calls it with scalars, so that it may index with them and reduce what it finds.
    """
    if not keys.size:
        return np.zeros((len(queries), 0), dtype=bool)
    from torch import vmap  # imported already: the block mask has tensors

    rule = vmap(vmap(block_mask.mask_mod, (None, None, None, 0)), (None, None, 0, None))
    make = block_mask.kv_num_blocks.new_tensor
    allowed = as_array(rule(*map(make, (batch, head, queries, keys))))
    return np.broadcast_to(allowed, (len(queries), len(keys)))


def _as_visible(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Convert a boolean or additive mask to a boolean one, True where a query sees a key."""
    if mask.dtype == bool:
        return mask
    if mask.dtype.kind != "f":
        raise TypeError(f"mask must be boolean or floating point, got {mask.dtype}")
    masked_out = mask <= MASKED_OUT
    is_bias = ~masked_out & (mask != 0)
    if is_bias.any():
        raise ValueError(
            f"mask must be boolean, or 0 and at most -10,000, got {mask[is_bias][0]}: "
            "pass scores=cqs.Scores(bias=mask)"
        )
    return ~masked_out


def _per_head(array: NDArray[Any], one: Callable[[NDArray[Any]], Pattern]) -> Pattern:
    """Return the per-head pattern of an array ``[..., rows, columns]``."""
    matrices = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return per_head([[one(matrix) for matrix in row] for row in matrices])
