"""Lists of tiles and runs: the integers that tell a kernel launch which pairs to compute.

A *tile* is a range of rows on one side of the score matrix. A *run* is a range of columns, rows of
the other side, that the tile's rows meet. In the forward pass and for the gradients of queries,
tiles are of queries and runs are of keys; for the gradients of keys and values it is the reverse.

Rows of a tile are ``row_step`` tokens apart and have one *residue*: row ``a`` of residue ``r`` is
token ``r + row_step * a``. The same holds for columns and ``column_step``. All tiles and runs of a
launch have the same two steps. Kernels know nothing else of plans and patterns.

A run is *full* or *banded*. A full run is a whole number of blocks of live pairs, to which kernels
apply no mask. In a banded run, the distance of two tokens decides whether a pair is live, and one
bit for each pair may mask out more.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cqs.patterns.views import View
from cqs.worker.work import BlockRow, Work

FAR_32 = 2**30
"""Bound on the distance of a band that excludes no pair: greater than every distance."""

# Fields of a tile's record. The records of a launch are one int32 array, which the kernels read by
# these constants (fields.py): every field is one 4-byte load at an offset known at compile time.
TILE_ROW_START = 0
"""First row of the tile, as a row number within its residue."""
TILE_ROW_STOP = 1
"""Last row of the tile + 1, within its residue."""
TILE_OUTPUT_ROW = 2
"""Row of the output, and of the LSE, that belongs to the first row of the tile."""
TILE_RUN_START = 3
"""Index of the tile's first run."""
TILE_BANDED_STOP = 4
"""Index of the tile's last banded run + 1; the full runs begin there."""
TILE_RUN_STOP = 5
"""Index of the tile's last run + 1."""
TILE_FULL_BLOCKS = 6
"""Number of blocks in the full runs."""
TILE_RESIDUE = 7
"""Residue of the rows."""
TILE_FIELDS = 8
"""Number of fields of a tile's record."""

# Fields of a run's record.
RUN_COLUMN_START = 0
"""First column of the run, as a column number within its residue."""
RUN_COLUMN_STOP = 1
"""Last column of the run + 1, within its residue."""
RUN_LOW = 2
"""Least distance ``column_step * j - row_step * i`` of a live pair of row i and column j."""
RUN_HIGH = 3
"""Greatest distance of a live pair."""
RUN_BITS_START = 4
"""Index, in the mask bits of the launch, that row 0 would have in this run, or ``NO_BITS``.

The bit of row i and the c-th column of the run is bit ``c // 8 * 2 + c % 2`` of integer
``RUN_BITS_START + 4 * i + c // 2 % 4``. A thread of the tensor cores' accumulator layout has column
pairs 8 apart, so that one integer has all bits of a thread's columns in one row."""
RUN_RESIDUE = 5
"""Residue of the columns."""
RUN_OFFSET = 6
"""Number to be added to ``row_step * i - column_step * j`` for the distance of the positions of row
i and column j; 0 if no score depends on positions."""
RUN_FIELDS = 8
"""Number of fields of a run's record; the last is zero."""

NO_BITS = -(2**31)
"""Value of ``RUN_BITS_START`` for a run without mask bits: no valid index is so small."""
_BITS_COLUMNS = 128
"""Columns of a block of mask bits: 4 integers of 32 bits for each row."""


class Band(NamedTuple):
    """Columns that some rows meet: a range within a residue, bounded by distance and mask bits."""

    start: int
    stop: int
    low: int = -FAR_32
    high: int = FAR_32
    bits_start: int = NO_BITS
    """See ``RUN_BITS_START``."""
    residue: int = 0
    offset: int = 0
    """See ``RUN_OFFSET``."""

    def order(self) -> tuple[int, ...]:
        """Return numbers by which bands of rows are computed in the order of their positions."""
        low, high = (bound - self.offset * (abs(bound) < FAR_32) for bound in (self.low, self.high))
        return low, high, self.bits_start, self.residue, self.start


class Span(NamedTuple):
    """Rows of one side that meet the same bands of columns."""

    rows: range
    bands: tuple[Band, ...]
    residue: int = 0
    shift: int = 0
    """Number that is added to a row of the tensor to get the row of the output."""


class Steps(NamedTuple):
    """Tokens between two rows, and between two columns."""

    row: int
    column: int


@dataclass(frozen=True)
class Launch:
    """Everything that one kernel launch computes."""

    steps: Steps
    spans: list[Span]
    mask_bits: np.ndarray
    """int32 ``[num_integers]``: the mask bits of all runs; empty if no run has any."""


@dataclass(frozen=True)
class TileList:
    """The spans of a launch, cut into tiles and runs."""

    tiles: np.ndarray
    """int32 ``[num_tiles, TILE_FIELDS]``, in descending order of the blocks that they visit."""
    runs: np.ndarray
    """int32 ``[num_runs, RUN_FIELDS]``, none empty; those of a tile adjacent, banded ones first."""
    blocks: np.ndarray
    """int64 ``[num_tiles]``: number of blocks that each tile visits."""


def query_launches(work: Work, *, packed: bool) -> list[Launch]:
    """Return the launches whose tiles are of queries, one for each pair of steps.

    Args:
        work: The block rows to compute; each has at least one query.
        packed: Whether the output has the rows of all block rows, one after another. Otherwise
            it has one row for each query of the tensors, with the keys of all block rows.
    """
    if not packed:
        return _launches([(0, list(_offset_views(work, work.block_rows)))])
    ends = np.cumsum([0, *(len(block_row.queries) for block_row in work.block_rows)]).tolist()
    return _launches(
        (end - block_row.queries.start, _offset_views(work, [block_row]))
        for end, block_row in zip(ends, work.block_rows, strict=False)
    )


def key_launches(work: Work) -> list[Launch]:
    """Return the launches whose tiles are of keys, each with the queries of all block rows."""
    views = [(_transposed(view), -offset) for view, offset in _offset_views(work, work.block_rows)]
    return _launches([(0, views)])


def _offset_views(work: Work, block_rows: Iterable[BlockRow]) -> Iterator[tuple[View, int]]:
    """Yield the views of block rows, each with its offset."""
    for block_row in block_rows:
        for view in block_row.views:
            yield view, work.offset(view)


def make_tile_list(launch: Launch, tile_rows: int, block: int) -> TileList:
    """Cut the spans of a launch into tiles, and their bands into runs.

    Args:
        launch: The spans to cut. Rows that meet no column get no tile.
        tile_rows: Number of rows of a tile.
        block: Number of columns of a block, which a kernel computes at a time.

    Example:
        >>> launch = Launch(Steps(1, 1), [Span(range(0, 128), (Band(0, 200),))], np.zeros(0))
        >>> tile_list = make_tile_list(launch, 128, 128)
        >>> tile_list.tiles.tolist()
        [[0, 128, 0, 0, 1, 2, 1, 0]]
        >>> tile_list.runs[:, :2].tolist()
        [[128, 200], [0, 128]]
    """
    (row_step, column_step), spans = launch.steps, launch.spans
    fields = np.array(
        [[s.rows.start, s.rows.stop, s.residue, s.shift, len(s.bands)] for s in spans]
    )
    tiles_of_span = -(-(fields[:, 1] - fields[:, 0]) // tile_rows)
    first_bands = np.cumsum(fields[:, 4]) - fields[:, 4]
    span = np.repeat(np.arange(len(spans)), tiles_of_span)
    starts = fields[span, 0] + count_within(tiles_of_span) * tile_rows
    stops = np.minimum(starts + tile_rows, fields[span, 1])
    residues, shifts, bands_of_tile = fields[span, 2:].T

    bands = np.array([band for span in spans for band in span.bands])
    tile = np.repeat(np.arange(len(span)), bands_of_tile)
    start, stop, low, high, bits_start, residue, offset = bands[
        first_bands[span][tile] + count_within(bands_of_tile)
    ].T
    # Columns that some row of the tile meets are live; those that every row meets are full.
    first_low, last_low = (row_step * row[tile] + low for row in (starts, stops - 1))
    first_high, last_high = (row_step * row[tile] + high for row in (starts, stops - 1))
    live_start = np.maximum(start, -(-first_low // column_step))
    live_stop = np.minimum(stop, last_high // column_step + 1)
    full_start = np.maximum(live_start, -(-last_low // column_step))
    num_full = np.minimum(stop, first_high // column_step + 1) - full_start
    num_full[bits_start != NO_BITS] = 0
    full_start = np.where(num_full < block, live_start, full_start)
    full_stop = full_start + np.maximum(num_full, 0) // block * block
    # Tile, whether the run is full, and the fields of the run. A band gives a banded run before its
    # full blocks, the full run, and a banded run after it; empty ones are dropped below.
    run = np.concatenate(
        [
            np.stack(np.broadcast_arrays(*columns), axis=1)
            for columns in (
                (tile, 0, live_start, full_start, low, high, bits_start, residue, offset),
                (tile, 0, full_stop, live_stop, low, high, bits_start, residue, offset),
                (tile, 1, full_start, full_stop, -FAR_32, FAR_32, NO_BITS, residue, offset),
            )
        ]
    )
    run = run[run[:, 2] < run[:, 3]]
    # Banded runs of a tile come first: the kernels leave the masked loop once and for all.
    run = run[np.lexsort((run[:, 1], run[:, 0]))]
    lengths = run[:, 3] - run[:, 2]
    counts, banded = (
        np.bincount(run[kind, 0], minlength=len(span)) for kind in (..., run[:, 1] == 0)
    )
    records = np.zeros((len(span), TILE_FIELDS), np.int32)
    records[:, TILE_ROW_START] = starts
    records[:, TILE_ROW_STOP] = stops
    records[:, TILE_OUTPUT_ROW] = row_step * starts + residues + shifts
    records[:, TILE_RUN_START] = np.cumsum(counts) - counts
    records[:, TILE_BANDED_STOP] = records[:, TILE_RUN_START] + banded
    records[:, TILE_RUN_STOP] = records[:, TILE_RUN_START] + counts
    records[:, TILE_FULL_BLOCKS] = np.bincount(run[:, 0], run[:, 1] * lengths, len(span)) // block
    records[:, TILE_RESIDUE] = residues
    blocks = np.bincount(run[:, 0], -(-lengths // block), len(span))
    # The longest tiles come first: one that started last would run alone at the end of the launch.
    order = np.argsort(-blocks, kind="stable")[: np.count_nonzero(blocks)]
    runs = np.zeros((len(run), RUN_FIELDS), np.int32)
    column_fields = RUN_COLUMN_START, RUN_COLUMN_STOP
    pair_fields = RUN_LOW, RUN_HIGH, RUN_BITS_START, RUN_RESIDUE, RUN_OFFSET
    runs[:, column_fields + pair_fields] = run[:, 2:]
    return TileList(records[order], runs, blocks[order].astype(np.int64))


def _launches(groups: Iterable[tuple[int, Iterable[tuple[View, int]]]]) -> list[Launch]:
    """Return one launch for each pair of steps of the views.

    Args:
        groups: Pairs of a shift and views, each with its offset. The shift is added to a row to
            get the row of the output. A row of a group meets the columns of all views of the group
            that contain it.
    """
    spans: defaultdict[Steps, list[Span]] = defaultdict(list)
    mask_bits: defaultdict[Steps, _MaskBits] = defaultdict(_MaskBits)
    for shift, views in groups:
        residues: defaultdict[tuple[Steps, int], list[tuple[range, Band]]] = defaultdict(list)
        for view, offset in views:
            steps = Steps(view.queries.step, view.keys.step)
            rows, residue = _in_residue(view.queries)
            bands = _bands(view, offset, mask_bits[steps])
            residues[steps, residue] += ((rows, band) for band in bands)
        for (steps, residue), row_bands in residues.items():
            spans[steps] += (Span(*part, residue, shift) for part in _unite_bands(row_bands))
    return [Launch(steps, spans[steps], mask_bits[steps].joined()) for steps in sorted(spans)]


class _MaskBits:
    """The mask bits of a launch, collected one block after another."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._size = 0

    def add(self, mask: np.ndarray) -> int:
        """Append a bool mask ``[rows, columns]`` of up to 128 columns.

        Returns:
            Index of the first integer of its first row; see ``RUN_BITS_START`` for their order.
        """
        padded = np.zeros((len(mask), 16, 4, 2), np.uint8)
        padded.reshape(len(mask), _BITS_COLUMNS)[:, : mask.shape[1]] = mask
        bits = padded.transpose(0, 2, 1, 3).reshape(-1, 32)
        self._blocks.append(np.packbits(bits, axis=-1, bitorder="little").view("<i4").reshape(-1))
        self._size += len(bits)
        return self._size - len(bits)

    def joined(self) -> np.ndarray:
        """Return all integers, int32 ``[num_integers]``, and padding.

        Kernels load whole tiles without a mask on rows, so that the last tile reads the integers of
        rows that do not exist.
        """
        padding = [np.zeros(4 * _BITS_COLUMNS, np.int32)] if self._blocks else []
        return np.concatenate([*self._blocks, *padding, np.zeros(0, np.int32)])


def _in_residue(tokens: range) -> tuple[range, int]:
    """Return the row numbers of tokens within their residue, and the residue."""
    first, residue = divmod(tokens.start, tokens.step)
    return range(first, first + len(tokens)), residue


def _bands(view: View, offset: int, mask_bits: _MaskBits) -> Iterator[Band]:
    """Yield the bands that the rows of a view meet; its mask is appended to ``mask_bits``."""
    columns, residue = _in_residue(view.keys)
    rows, row_residue = _in_residue(view.queries)
    low, high = (
        max(-FAR_32, min(bound - residue + row_residue, FAR_32)) for bound in (view.low, view.high)
    )
    offset += row_residue - residue
    if view.bits is None:
        yield Band(columns.start, columns.stop, low, high, residue=residue, offset=offset)
        return
    mask = np.unpackbits(view.bits, axis=-1, count=len(columns))
    for first in range(0, len(columns), _BITS_COLUMNS):
        part = mask[:, first : first + _BITS_COLUMNS]
        if part.any():
            start = columns.start + first
            bits_start = mask_bits.add(part) - 4 * rows.start
            yield Band(start, start + part.shape[1], low, high, bits_start, residue, offset)


def _transposed(view: View) -> View:
    """Exchange the queries and keys of a view, for launches whose tiles are of keys."""
    queries, keys, low, high, bits = view
    if bits is not None:
        mask = np.unpackbits(bits, axis=-1, count=len(keys))
        bits = np.packbits(np.ascontiguousarray(mask.T), axis=-1)
    return View(keys, queries, -high, -low, bits)


def _unite_bands(
    row_bands: Iterable[tuple[range, Band]],
) -> Iterator[tuple[range, tuple[Band, ...]]]:
    """Cut rows where those of any band begin or end, and list the bands of every part.

    Args:
        row_bands: Pairs of rows and a band that these rows meet. Rows of several pairs may overlap.
    """
    row_bands = list(row_bands)
    marks = sorted({mark for rows, _ in row_bands for mark in (rows.start, rows.stop)})
    place = {mark: i for i, mark in enumerate(marks)}
    bands: defaultdict[int, list[Band]] = defaultdict(list)
    for rows, band in row_bands:
        for i in range(place[rows.start], place[rows.stop]):
            bands[i].append(band)
    for i, together in bands.items():
        yield range(marks[i], marks[i + 1]), _join_bands(together)


def _join_bands(bands: Iterable[Band]) -> tuple[Band, ...]:
    """Join adjacent bands of equal bounds, so that keys of several tasks form one run."""
    joined: list[Band] = []
    for band in sorted(bands, key=Band.order):
        last = joined[-1] if joined else None
        if last and last.stop == band.start and last[2:] == band[2:] and band.bits_start == NO_BITS:
            joined[-1] = last._replace(stop=band.stop)
        else:
            joined.append(band)
    return tuple(joined)


def count_within(lengths: np.ndarray) -> np.ndarray:
    """Return ``[0..n - 1 for each length n]``, concatenated."""
    starts = np.cumsum(lengths) - lengths
    numbers: np.ndarray = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return numbers
