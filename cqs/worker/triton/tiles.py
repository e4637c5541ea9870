"""A task as a list of query tiles, each with the runs of keys that it visits.

Everything is counted in rows of the tensors that the kernels read; the list is all they know of
plans. A run is either *full*, a whole number of key tiles that every row of the query tile sees, or
*banded*: row i sees its key j if ``low <= j - i <= high``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cqs.worker.rectangle import Rectangle

FAR = 2**30
"""Beyond every distance between a query and a key."""

TILE_FIELDS = 8
"""Query start and stop, first row of output, first run, end of the banded runs, end of the runs,
number of key tiles in the full runs, nothing."""
RUN_FIELDS = 4
"""Key start and stop, low and high end of the band."""


@dataclass(frozen=True)
class TileList:
    """What one launch of the forward kernel computes."""

    tiles: np.ndarray
    """int32 ``[num_tiles, TILE_FIELDS]``, most work first."""
    runs: np.ndarray
    """int32 ``[num_runs, RUN_FIELDS]``."""
    num_rows: int
    """Rows of output: the queries of all rectangles, one after another."""


def make_tile_list(rectangles: Iterable[Rectangle], tile_q: int, tile_k: int) -> TileList:
    """Cut rectangles into tiles of ``tile_q`` queries and runs of tiles of ``tile_k`` keys.

    Example:
        >>> found = make_tile_list([Rectangle(range(0, 128), (range(0, 200),))], 128, 128)
        >>> found.tiles.tolist()
        [[0, 128, 0, 0, 1, 2, 1, 0]]
        >>> found.runs[:, :2].tolist()
        [[128, 200], [0, 128]]
    """
    tiles, runs, work = [], [], []
    num_rows = num_runs = 0
    for queries, keys, causal_keys in rectangles:
        starts = np.arange(queries.start, queries.stop, tile_q)
        stops = np.minimum(starts + tile_q, queries.stop)
        full, banded = _cut_keys(keys, tile_k)
        if causal_keys is not None:
            distance = causal_keys.start - queries.start
            seen = (starts - queries.start + 1) // tile_k * tile_k + causal_keys.start
            full = [*full, (causal_keys.start, seen, -FAR, FAR)]
            banded = [*banded, (seen, stops + distance, -FAR, distance)]
        of_tile = np.empty((len(starts), len(full) + len(banded), RUN_FIELDS), np.int32)
        for i, fields in enumerate([*banded, *full]):
            for j, field in enumerate(fields):
                of_tile[:, i, j] = field
        first = num_runs + np.arange(len(starts)) * of_tile.shape[1]
        lengths = of_tile[:, :, 1] - of_tile[:, :, 0]
        of_rectangle = np.zeros((len(starts), TILE_FIELDS), np.int32)
        for i, field in enumerate(
            (
                starts,
                stops,
                num_rows + starts - queries.start,
                first,
                first + len(banded),
                first + of_tile.shape[1],
                lengths[:, len(banded) :].sum(1) // tile_k,
            )
        ):
            of_rectangle[:, i] = field
        tiles.append(of_rectangle)
        runs.append(of_tile.reshape(-1, RUN_FIELDS))
        work.append(lengths.sum(1))
        num_rows += len(queries)
        num_runs += len(runs[-1])
    order = np.argsort(-np.concatenate(work), kind="stable")
    return TileList(np.concatenate(tiles)[order], np.concatenate(runs), num_rows)


def _cut_keys(keys: Sequence[range], tile_k: int) -> tuple[list, list]:
    """Cut each range into a full run and, if it is no whole number of tiles, a banded rest."""
    full, banded = [], []
    for tokens in keys:
        middle = tokens.start + len(tokens) // tile_k * tile_k
        if middle > tokens.start:
            full.append((tokens.start, middle, -FAR, FAR))
        if middle < tokens.stop:
            banded.append((middle, tokens.stop, -FAR, FAR))
    return full, banded
