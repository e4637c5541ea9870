"""Work as a list of tiles, each with the runs that it visits.

A tile is some rows of one side of the score matrix, a run some rows of the other side: queries and
their keys, or for the gradients of keys and values the other way round. Everything is counted in
rows of the tensors that the kernels read; the list is all they know of plans.

A run is either *full*, a whole number of blocks that every row of the tile meets, or *banded*: row
i meets j if ``low <= j - i <= high``.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cqs.worker.rectangle import Rectangle

FAR = 2**30
"""Beyond every distance between two rows."""

TILE_FIELDS = 8
"""First and last row + 1, first row of output, first run, end of the banded runs, end of the runs,
number of blocks in the full runs, nothing."""
RUN_FIELDS = 4
"""Start and stop, low and high end of the band."""


class Band(NamedTuple):
    """What rows of one side meet: row i meets j of ``range(start, stop)`` if it is not too far."""

    start: int
    stop: int
    low: int = -FAR
    high: int = FAR
    """``low <= j - i <= high``."""


class Span(NamedTuple):
    """Rows of one side, and everything that they meet."""

    rows: range
    bands: tuple[Band, ...]


@dataclass(frozen=True)
class TileList:
    """What one launch computes."""

    tiles: np.ndarray
    """int32 ``[num_tiles, TILE_FIELDS]``, most work first."""
    runs: np.ndarray
    """int32 ``[num_runs, RUN_FIELDS]``, none empty; those of a tile adjacent, banded first."""


def query_spans(rectangles: Iterable[Rectangle]) -> list[Span]:
    """Return each rectangle's queries and the keys that they attend to."""
    return [Span(rectangle.queries, tuple(_bands(rectangle))) for rectangle in rectangles]


def united_query_spans(rectangles: Iterable[Rectangle]) -> list[Span]:
    """Return the queries of all rectangles, each once, and the keys they attend to in any."""
    return _unite(query_spans(rectangles))


def united_key_spans(rectangles: Iterable[Rectangle]) -> list[Span]:
    """Return the keys of all rectangles, each once, and the queries that attend to them in any."""
    return _unite(
        Span(
            range(band.start, band.stop),
            (Band(span.rows.start, span.rows.stop, -band.high, -band.low),),
        )
        for span in query_spans(rectangles)
        for band in span.bands
    )


def make_tile_list(
    spans: Iterable[Span], tile_rows: int, block: int, *, packed: bool = False
) -> TileList:
    """Cut spans into tiles of ``tile_rows`` rows, and what they meet into blocks of ``block``.

    Args:
        spans: None without rows; rows that meet nothing are left out.
        tile_rows: Rows of a tile.
        block: Rows of the other side that a kernel takes at once.
        packed: Whether the rows of output are those of the spans, one after another, instead of
            the rows of the tensor.

    Example:
        >>> found = make_tile_list([Span(range(0, 128), (Band(0, 200),))], 128, 128)
        >>> found.tiles.tolist()
        [[0, 128, 0, 0, 1, 2, 1, 0]]
        >>> found.runs[:, :2].tolist()
        [[128, 200], [0, 128]]
    """
    spans = [span for span in spans if span.bands]
    rows = np.array([[span.rows.start, span.rows.stop] for span in spans])
    tiles_of_span = -(-(rows[:, 1] - rows[:, 0]) // tile_rows)
    span = np.repeat(np.arange(len(spans)), tiles_of_span)
    starts = rows[span, 0] + _count_within(tiles_of_span) * tile_rows
    stops = np.minimum(starts + tile_rows, rows[span, 1])
    offsets = np.zeros(len(spans), int)
    if packed:
        lengths = rows[:, 1] - rows[:, 0]
        offsets = np.cumsum(lengths) - lengths - rows[:, 0]

    bands = np.array([band for span in spans for band in span.bands])
    bands_of_span = np.array([len(span.bands) for span in spans])
    tile = np.repeat(np.arange(len(span)), bands_of_span[span])
    first_band = (np.cumsum(bands_of_span) - bands_of_span)[span]
    start, stop, low, high = bands[first_band[tile] + _count_within(bands_of_span[span])].T
    live_start = np.maximum(start, starts[tile] + low)
    live_stop = np.minimum(stop, stops[tile] + high)
    full_start = np.maximum(live_start, stops[tile] - 1 + low)
    num_full = np.minimum(stop, starts[tile] + high + 1) - full_start
    full_start = np.where(num_full < block, live_start, full_start)
    full_stop = full_start + np.maximum(num_full, 0) // block * block
    run = np.concatenate(
        [
            np.stack(np.broadcast_arrays(*columns), axis=1)
            for columns in (
                (tile, 0, live_start, full_start, low, high),
                (tile, 0, full_stop, live_stop, low, high),
                (tile, 1, full_start, full_stop, -FAR, FAR),
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
    found[:, :3] = np.stack([starts, stops, starts + offsets[span]], axis=1)
    found[:, 3] = np.cumsum(counts) - counts
    found[:, 4] = found[:, 3] + banded
    found[:, 5] = found[:, 3] + counts
    found[:, 6] = np.bincount(run[:, 0], run[:, 1] * lengths, len(span)) // block
    work = np.bincount(run[:, 0], lengths, len(span))
    order = np.argsort(-work, kind="stable")[: np.count_nonzero(work)]
    return TileList(found[order], np.ascontiguousarray(run[:, 2:], np.int32))


def _bands(rectangle: Rectangle) -> Iterable[Band]:
    queries, keys, causal_keys = rectangle
    for tokens in keys:
        yield Band(tokens.start, tokens.stop)
    if causal_keys is not None:
        yield Band(causal_keys.start, causal_keys.stop, high=causal_keys.start - queries.start)


def _unite(spans: Iterable[Span]) -> list[Span]:
    """Cut rows where any span begins or ends, and give each piece what all spans meet there."""
    spans = [span for span in spans if span.rows]
    marks = sorted({mark for span in spans for mark in (span.rows.start, span.rows.stop)})
    place = {mark: i for i, mark in enumerate(marks)}
    bands: defaultdict[int, list[Band]] = defaultdict(list)
    for span in spans:
        for i in range(place[span.rows.start], place[span.rows.stop]):
            bands[i] += span.bands
    return [Span(range(marks[i], marks[i + 1]), _join(found)) for i, found in bands.items()]


def _join(bands: Iterable[Band]) -> tuple[Band, ...]:
    """Join bands of equal bounds that touch."""
    joined: list[Band] = []
    for band in sorted(bands, key=lambda band: (band.low, band.high, band.start)):
        if joined and joined[-1].stop == band.start and joined[-1][2:] == band[2:]:
            joined[-1] = joined[-1]._replace(stop=band.stop)
        else:
            joined.append(band)
    return tuple(joined)


def _count_within(lengths: np.ndarray) -> np.ndarray:
    """Number the elements of adjacent pieces of these lengths, each from 0."""
    starts = np.cumsum(lengths) - lengths
    numbers: np.ndarray = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return numbers
