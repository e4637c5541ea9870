"""Work as lists of tiles, each with the runs that it visits.

A tile is some rows of one side of the score matrix, a run some columns, rows of the other side:
queries and their keys, or for the gradients of keys and values the other way round. Rows of a tile
lie ``row_step`` tokens apart, in one *residue*: row a of residue l is token ``l + row_step * a``;
columns likewise. One launch has one step on each side; the list is all that kernels know of plans
and patterns.

A run is either *full*, a whole number of blocks that every row of the tile meets, or *banded*:
what counts is bounded by the distance of the tokens, and may need a bit of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cqs.patterns.views import View
from cqs.worker.share import Work

FAR = 2**30
"""Beyond every distance between two rows."""

TILE_FIELDS = 8
"""First and last row + 1, first row of output, first run, end of the banded runs, end of the runs,
number of blocks in the full runs, residue."""
RUN_FIELDS = 8
"""First and last column + 1, low and high end of the band, bits, residue, nothing twice.

Column j meets row i if ``low <= column_step * j - row_step * i <= high`` and, unless bits is
``NO_BITS``, its bit is set: for the c-th column of the run that is bit ``c // 8 * 2 + c % 2`` of
word ``bits + 4 * i + c // 2 % 4``, which is how tensor cores spread a block over their threads."""
NO_BITS = -(2**31)
_BITS_COLUMNS = 128


class Band(NamedTuple):
    """What rows of a span meet."""

    start: int
    stop: int
    low: int = -FAR
    high: int = FAR
    bits: int = NO_BITS
    residue: int = 0


class Span(NamedTuple):
    """Rows of one side, and everything that they meet."""

    rows: range
    bands: tuple[Band, ...]
    residue: int = 0
    shift: int = 0
    """What is added to a row of the tensor to get that of the output."""


class Steps(NamedTuple):
    """Tokens between two rows, and between two columns."""

    row: int
    column: int


@dataclass(frozen=True)
class Launch:
    """Everything that one launch computes."""

    steps: Steps
    spans: list[Span]
    words: np.ndarray
    """int32 ``[num_words]``: the bits that runs name."""


@dataclass(frozen=True)
class TileList:
    """The spans of a launch in tiles."""

    tiles: np.ndarray
    """int32 ``[num_tiles, TILE_FIELDS]``, most work first."""
    runs: np.ndarray
    """int32 ``[num_runs, RUN_FIELDS]``, none empty; those of a tile adjacent, banded first."""
    blocks: np.ndarray
    """int64 ``[num_tiles]``: blocks that each tile visits."""


def query_launches(work: Work, *, packed: bool) -> list[Launch]:
    """List the queries of some work, and the keys that they see.

    Args:
        work: None of its shares without queries.
        packed: Whether shares keep their rows apart in the output, one after another; else each
            query appears once, with what it sees in any share.
    """
    if not packed:
        return _launches([(0, [view for share in work.shares for view in share.views])])
    ends = np.cumsum([0, *(len(share.queries) for share in work.shares)]).tolist()
    return _launches(
        (end - share.queries.start, share.views)
        for end, share in zip(ends, work.shares, strict=False)
    )


def key_launches(work: Work) -> list[Launch]:
    """List the keys of some work, each once, and the queries that see them in any share."""
    views = (_transposed(view) for share in work.shares for view in share.views)
    return _launches([(0, list(views))])


def make_tile_list(launch: Launch, tile_rows: int, block: int) -> TileList:
    """Cut spans into tiles of ``tile_rows`` rows, and what they meet into blocks of ``block``.

    Args:
        launch: Its spans; rows that meet nothing are left out.
        tile_rows: Rows of a tile.
        block: Columns that a kernel takes at once.

    Example:
        >>> launch = Launch(Steps(1, 1), [Span(range(0, 128), (Band(0, 200),))], np.zeros(0))
        >>> found = make_tile_list(launch, 128, 128)
        >>> found.tiles.tolist()
        [[0, 128, 0, 0, 1, 2, 1, 0]]
        >>> found.runs[:, :2].tolist()
        [[128, 200], [0, 128]]
    """
    (row_step, column_step), spans = launch.steps, launch.spans
    fields = np.array(
        [[s.rows.start, s.rows.stop, s.residue, s.shift, len(s.bands)] for s in spans]
    )
    tiles_of_span = -(-(fields[:, 1] - fields[:, 0]) // tile_rows)
    first_bands = np.cumsum(fields[:, 4]) - fields[:, 4]
    span = np.repeat(np.arange(len(spans)), tiles_of_span)
    starts = fields[span, 0] + _count_within(tiles_of_span) * tile_rows
    stops = np.minimum(starts + tile_rows, fields[span, 1])
    residues, shifts, bands_of_tile = fields[span, 2:].T

    bands = np.array([band for span in spans for band in span.bands])
    tile = np.repeat(np.arange(len(span)), bands_of_tile)
    start, stop, low, high, bits, residue = bands[
        first_bands[span][tile] + _count_within(bands_of_tile)
    ].T
    first_low, last_low = (row_step * row[tile] + low for row in (starts, stops - 1))
    first_high, last_high = (row_step * row[tile] + high for row in (starts, stops - 1))
    live_start = np.maximum(start, -(-first_low // column_step))
    live_stop = np.minimum(stop, last_high // column_step + 1)
    full_start = np.maximum(live_start, -(-last_low // column_step))
    num_full = np.minimum(stop, first_high // column_step + 1) - full_start
    num_full[bits != NO_BITS] = 0
    full_start = np.where(num_full < block, live_start, full_start)
    full_stop = full_start + np.maximum(num_full, 0) // block * block
    run = np.concatenate(
        [
            np.stack(np.broadcast_arrays(*columns), axis=1)
            for columns in (
                (tile, 0, live_start, full_start, low, high, bits, residue),
                (tile, 0, full_stop, live_stop, low, high, bits, residue),
                (tile, 1, full_start, full_stop, -FAR, FAR, NO_BITS, residue),
            )
        ]
    )
    run = run[run[:, 2] < run[:, 3]]
    run = run[np.lexsort((run[:, 1], run[:, 0]))]
    lengths = run[:, 3] - run[:, 2]
    counts, banded = (
        np.bincount(run[kind, 0], minlength=len(span)) for kind in (..., run[:, 1] == 0)
    )
    found = np.zeros((len(span), TILE_FIELDS), np.int32)
    found[:, :3] = np.stack([starts, stops, row_step * starts + residues + shifts], axis=1)
    found[:, 3] = np.cumsum(counts) - counts
    found[:, 4] = found[:, 3] + banded
    found[:, 5] = found[:, 3] + counts
    found[:, 6] = np.bincount(run[:, 0], run[:, 1] * lengths, len(span)) // block
    found[:, 7] = residues
    blocks = np.bincount(run[:, 0], -(-lengths // block), len(span))
    order = np.argsort(-blocks, kind="stable")[: np.count_nonzero(blocks)]
    runs = np.zeros((len(run), RUN_FIELDS), np.int32)
    runs[:, :6] = run[:, 2:]
    return TileList(found[order], runs, blocks[order].astype(np.int64))


def _launches(groups: Iterable[tuple[int, Iterable[View]]]) -> list[Launch]:
    """Sort views by their steps; rows of one group meet all that its views say.

    Args:
        groups: What leads from rows to those of the output, and views.
    """
    spans: defaultdict[Steps, list[Span]] = defaultdict(list)
    words: defaultdict[Steps, _Words] = defaultdict(_Words)
    for shift, views in groups:
        residues: defaultdict[tuple[Steps, int], list[tuple[range, Band]]] = defaultdict(list)
        for view in views:
            steps = Steps(view.queries.step, view.keys.step)
            rows, residue = _in_residue(view.queries)
            residues[steps, residue] += ((rows, band) for band in _bands(view, words[steps]))
        for (steps, residue), found in residues.items():
            spans[steps] += (Span(*each, residue, shift) for each in _unite(found))
    return [Launch(steps, spans[steps], words[steps].joined()) for steps in sorted(spans)]


class _Words:
    """Bits of runs, gathered one block after another."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._size = 0

    def add(self, mask: np.ndarray) -> int:
        """Take up to 128 columns of bits ``[rows, columns]``; return the number of their word."""
        padded = np.zeros((len(mask), 16, 4, 2), np.uint8)
        padded.reshape(len(mask), _BITS_COLUMNS)[:, : mask.shape[1]] = mask
        bits = padded.transpose(0, 2, 1, 3).reshape(-1, 32)
        self._blocks.append(np.packbits(bits, axis=-1, bitorder="little").view("<i4").reshape(-1))
        self._size += len(bits)
        return self._size - len(bits)

    def joined(self) -> np.ndarray:
        """Return all words, int32 ``[num_words]``, and room for a tile's rows that do not exist."""
        room = [np.zeros(4 * _BITS_COLUMNS, np.int32)] if self._blocks else []
        return np.concatenate([*self._blocks, *room, np.zeros(0, np.int32)])


def _in_residue(tokens: range) -> tuple[range, int]:
    """Return rows, and the residue that they are in."""
    first, residue = divmod(tokens.start, tokens.step)
    return range(first, first + len(tokens)), residue


def _bands(view: View, words: _Words) -> Iterator[Band]:
    """Write a view as bands of its rows; its bits are appended to the words."""
    columns, residue = _in_residue(view.keys)
    rows, row_residue = _in_residue(view.queries)
    low, high = (
        max(-FAR, min(bound - residue + row_residue, FAR)) for bound in (view.low, view.high)
    )
    if view.bits is None:
        yield Band(columns.start, columns.stop, low, high, residue=residue)
        return
    mask = np.unpackbits(view.bits, axis=-1, count=len(columns))
    for first in range(0, len(columns), _BITS_COLUMNS):
        part = mask[:, first : first + _BITS_COLUMNS]
        if part.any():
            start = columns.start + first
            bits = words.add(part) - 4 * rows.start
            yield Band(start, start + part.shape[1], low, high, bits, residue)


def _transposed(view: View) -> View:
    queries, keys, low, high, bits = view
    if bits is not None:
        mask = np.unpackbits(bits, axis=-1, count=len(keys))
        bits = np.packbits(np.ascontiguousarray(mask.T), axis=-1)
    return View(keys, queries, -high, -low, bits)


def _unite(
    found: Iterable[tuple[range, Band]],
) -> Iterator[tuple[range, tuple[Band, ...]]]:
    """Cut rows where any band's begin or end, and give each piece all bands that hold there."""
    found = list(found)
    marks = sorted({mark for rows, _ in found for mark in (rows.start, rows.stop)})
    place = {mark: i for i, mark in enumerate(marks)}
    bands: defaultdict[int, list[Band]] = defaultdict(list)
    for rows, band in found:
        for i in range(place[rows.start], place[rows.stop]):
            bands[i].append(band)
    for i, together in bands.items():
        yield range(marks[i], marks[i + 1]), _join(together)


def _join(bands: Iterable[Band]) -> tuple[Band, ...]:
    """Join bands of equal bounds that touch."""
    joined: list[Band] = []
    for band in sorted(bands, key=lambda band: (*band[2:], band.start)):
        last = joined[-1] if joined else None
        if last and last.stop == band.start and last[2:] == band[2:] and band.bits == NO_BITS:
            joined[-1] = last._replace(stop=band.stop)
        else:
            joined.append(band)
    return tuple(joined)


def _count_within(lengths: np.ndarray) -> np.ndarray:
    """Number the elements of adjacent pieces of these lengths, each from 0."""
    starts = np.cumsum(lengths) - lengths
    numbers: np.ndarray = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return numbers
