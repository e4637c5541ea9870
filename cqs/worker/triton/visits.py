"""Lists of visits: which blocks of queries each tile of keys visits in the backward kernel.

hopper_rectangle.py computes the gradients of a sparse pattern by these lists. A *visit* is a tile
of 128 keys and a block of 64 queries that have a live pair. Tiles and blocks start at multiples of
their sizes, and each pair of them is visited at most once, whatever views its live pairs are in.

The additions to a block of dQ have a fixed order, that of its tiles. The *turn* of a visit is the
number of visits of the same block by lower tiles.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.views import View
from cqs.worker.triton.tiles import count_within
from cqs.worker.work import Work

TILE_KEYS = 128
"""Keys of a tile."""
BLOCK_QUERIES = 64
"""Queries of a block."""

# Fields of a visit's record.
VISIT_BLOCK = 0
"""Block of queries."""
VISIT_TURN = 1
"""Number of visits of the block by lower tiles; the visit with turn 0 overwrites its dQ."""
VISIT_MASK = 2
"""Index of the first integer of its mask bits, or -1 if all pairs are live."""
VISIT_FIELDS = 4
"""Number of fields of a visit's record; the last is zero."""

MASK_INTEGERS = TILE_KEYS * 4
"""Integers of a mask: 4 for each key, in the order of ``RUN_BITS_START`` in tiles.py."""

_BITS_OF_INTEGER = 32
_FAR = TILE_KEYS + BLOCK_QUERIES
"""Bound on the distances of a key and a query of a visit, relative to their tile and block."""


class VisitCounts(NamedTuple):
    """Numbers that decide whether and in which order to make visits."""

    num_visits: int
    """Number of visits of all tiles."""
    num_spanned: int
    """Number of blocks from the first to the last visited one of each tile, of all tiles."""
    num_aligned: int
    """Number of tiles that begin at the same block as the tile before."""
    num_tiles: int
    """Number of tiles of keys."""
    has_bits: bool
    """Whether a view has bits, so that most visits have a mask of their own."""

    @property
    def is_aligned(self) -> bool:
        """Return whether most tiles begin at the same block as the tile before, as causal ones."""
        return self.num_aligned > 0.6 * self.num_tiles


class VisitList(NamedTuple):
    """The visits of all live pairs of a work, for one head."""

    starts: NDArray[np.int32]
    """int32 ``[num_tiles + 1]``: first visit of each tile, and the number of visits."""
    visits: NDArray[np.int32]
    """int32 ``[num_visits, VISIT_FIELDS]``: those of a tile adjacent, from the last block on."""
    masks: NDArray[np.int32]
    """int32 ``[num_masks, MASK_INTEGERS]``: one for each set of live pairs that is not full."""
    num_unvisited: int
    """Number of blocks without a visit: their queries have gradient 0."""


@lru_cache(maxsize=256)
def count_visits(work: Work, num_queries: int, num_keys: int, most: int) -> VisitCounts | None:
    """Count the visits of a work.

    Args:
        work: The block rows.
        num_queries: Rows of the query tensor.
        num_keys: Rows of the key tensor.
        most: Most visits that are counted.

    Returns:
        The numbers, or ``None`` if there are more visits, or a view has queries or keys with a
        step.
    """
    views = list(_views_with_pairs(work))
    if any(view.queries.step != 1 or view.keys.step != 1 for view in views):
        return None
    num_tiles, num_blocks = -(-num_keys // TILE_KEYS), -(-num_queries // BLOCK_QUERIES)
    if sum(map(count_pairs, views)) > most * TILE_KEYS * BLOCK_QUERIES:
        return None
    _, tile, block, _ = _cut_views(views, num_queries)
    visits = np.sort(tile * num_blocks + block)  # in a hundredth of the time of np.unique
    visits = visits[np.diff(visits, prepend=-1) > 0]
    if len(visits) > most:
        return None
    if not len(visits):
        return VisitCounts(0, 0, 0, num_tiles, False)
    tile, block = np.divmod(visits, num_blocks)
    firsts = np.flatnonzero(np.diff(tile, prepend=-1))
    lasts = np.append(firsts[1:], len(tile)) - 1
    num_spanned = int((block[lasts] - block[firsts] + 1).sum())
    num_aligned = int((np.diff(block[lasts]) == 0).sum())
    has_bits = any(view.bits is not None for view in views)
    return VisitCounts(len(tile), num_spanned, num_aligned, num_tiles, has_bits)


def make_visit_list(work: Work, num_queries: int, num_keys: int) -> VisitList:
    """List the visits of a work.

    Args:
        work: Block rows that :func:`count_visits` supports.
        num_queries: Rows of the query tensor.
        num_keys: Rows of the key tensor.

    Example:
        >>> from cqs.worker.work import BlockRow
        >>> view = View(range(0, 128), range(0, 256))
        >>> visit_list = make_visit_list(Work((BlockRow(view.queries, (view,)),)), 128, 256)
        >>> visit_list.starts.tolist(), visit_list.visits.tolist()
        ([0, 2, 4], [[1, 0, -1, 0], [0, 0, -1, 0], [1, 1, -1, 0], [0, 1, -1, 0]])
    """
    num_tiles, num_blocks = -(-num_keys // TILE_KEYS), -(-num_queries // BLOCK_QUERIES)
    views = list(_views_with_pairs(work))
    view, tile, block, limits = _cut_views(views, num_queries)
    masks = _Masks(views)
    # One record for each part of a view in a tile and a block; parts of several views are united.
    order = np.lexsort((-block, tile))
    view, tile, block, limits = view[order], tile[order], block[order], limits[order]
    is_new = np.ones(len(tile), bool)
    is_new[1:] = (tile[1:] != tile[:-1]) | (block[1:] != block[:-1])
    firsts = np.flatnonzero(is_new)
    counts = np.diff(np.append(firsts, len(tile)))
    mask = masks.mask_numbers(view, tile, block, limits, firsts, counts)
    is_live = mask != _EMPTY
    tile, block, mask = tile[firsts][is_live], block[firsts][is_live], mask[is_live]
    visits = np.zeros((len(tile), VISIT_FIELDS), np.int32)
    visits[:, VISIT_BLOCK] = block
    visits[:, VISIT_MASK] = np.where(mask == _FULL, -1, mask * MASK_INTEGERS)
    by_block = np.lexsort((tile, block))
    block_visits = np.bincount(block, minlength=num_blocks)
    visits[by_block, VISIT_TURN] = count_within(block_visits)
    starts = np.searchsorted(tile, np.arange(num_tiles + 1)).astype(np.int32)
    return VisitList(starts, visits, masks.joined(), int((block_visits == 0).sum()))


def _views_with_pairs(work: Work) -> Iterator[View]:
    """Yield the views of a work that have queries and keys."""
    for block_row in work.block_rows:
        for view in block_row.views:
            if view.queries and view.keys:
                yield view


def count_pairs(view: View) -> int:
    """Return the number of pairs in the band of a view without steps; 0 if bits mask out more."""
    queries, keys, low, high, bits = view
    if bits is not None:
        return 0
    if view.is_full:
        return len(queries) * len(keys)
    rows = np.arange(queries.start, queries.stop)
    first, stop = np.maximum(rows + low, keys.start), np.minimum(rows + high + 1, keys.stop)
    return int(np.maximum(stop - first, 0).sum())


_FULL, _EMPTY = -1, -2
"""Numbers of the masks of all pairs, and of none."""


def _cut_views(
    views: list[View], num_queries: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut views at tiles and blocks.

    Returns:
        The view's index, tile and block of each part, int64 ``[num_parts]``, and the limits, int64
        ``[num_parts, 6]``: first key, first query and least distance, each relative to tile and
        block; end of the keys, end of the queries and greatest distance.
    """
    fields = np.array(
        [
            (v.queries.start, v.queries.stop, v.keys.start, v.keys.stop, v.low, v.high)
            for v in views
        ],
        np.int64,
    ).reshape(-1, 6)
    # Queries beyond the end of the tensor are zeros, and count as live, which saves a mask.
    fields[:, 1] += np.where(fields[:, 1] == num_queries, -num_queries % BLOCK_QUERIES, 0)
    first_tile = fields[:, 2] // TILE_KEYS
    num_tiles = (fields[:, 3] - 1) // TILE_KEYS - first_tile + 1
    view = np.repeat(np.arange(len(views)), num_tiles)
    tile = first_tile[view] + count_within(num_tiles)
    q_start, q_stop, k_start, k_stop, low, high = fields[view].T
    first_key = np.maximum(k_start, tile * TILE_KEYS)
    last_key = np.minimum(k_stop, (tile + 1) * TILE_KEYS) - 1
    first_query = np.maximum(q_start, first_key - high)
    last_query = np.minimum(q_stop - 1, last_key - low)
    first_block = first_query // BLOCK_QUERIES
    num_blocks = np.where(
        first_query <= last_query, last_query // BLOCK_QUERIES - first_block + 1, 0
    )
    part = np.repeat(np.arange(len(tile)), num_blocks)
    block = first_block[part] + count_within(num_blocks)
    view, tile = view[part], tile[part]
    q_start, q_stop, k_start, k_stop, low, high = fields[view].T
    key, query = tile * TILE_KEYS, block * BLOCK_QUERIES
    limits = np.stack(
        [
            np.clip(k_start - key, 0, TILE_KEYS),
            np.clip(q_start - query, 0, BLOCK_QUERIES),
            np.clip(low - key + query, -_FAR, _FAR),
            np.clip(k_stop - key, 0, TILE_KEYS),
            np.clip(q_stop - query, 0, BLOCK_QUERIES),
            np.clip(high - key + query, -_FAR, _FAR),
        ],
        axis=1,
    )
    return view, tile, block, limits


class _Masks:
    """The masks of visits, each once."""

    def __init__(self, views: list[View]) -> None:
        self._views = views
        self._has_bits = np.array([view.bits is not None for view in views], bool)
        self._numbers: dict[bytes, int] = {}
        self._by_limits: dict[tuple[tuple[int, ...], ...] | None, int] = {}

    def mask_numbers(
        self,
        view: NDArray[np.int64],
        tile: NDArray[np.int64],
        block: NDArray[np.int64],
        limits: NDArray[np.int64],
        firsts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the number of the mask of each visit.

        Args:
            view: Index of each part's view.
            tile: Tile of each part.
            block: Block of each part.
            limits: Limits of each part, see :func:`_cut_views`.
            firsts: First part of each visit.
            counts: Number of parts of each visit, which are adjacent.
        """
        numbers = np.full(len(firsts), _FULL, np.int64)
        is_full = (
            (limits[:, :2] <= 0).all(1)
            & (limits[:, 2] <= 1 - BLOCK_QUERIES)
            & (limits[:, 3] == TILE_KEYS)
            & (limits[:, 4] == BLOCK_QUERIES)
            & (limits[:, 5] >= TILE_KEYS - 1)
            & ~self._has_bits[view]
        )
        is_partial = ~np.logical_or.reduceat(is_full, firsts) if len(firsts) else is_full
        for visit in np.flatnonzero(is_partial):
            first, count = firsts[visit], counts[visit]
            parts = range(first, first + count)
            signature = None  # limits do not determine a mask with bits
            if not self._has_bits[view[first : first + count]].any():
                signature = tuple(tuple(limits[part].tolist()) for part in parts)
            number = self._by_limits.get(signature)
            if number is None:
                place = int(tile[first]), int(block[first])
                mask = np.zeros((TILE_KEYS, BLOCK_QUERIES), bool)
                for part in parts:
                    mask |= self._live(limits[part], int(view[part]), place)
                number = self._add(mask)
                if signature is not None:
                    self._by_limits[signature] = number
            numbers[visit] = number
        return numbers

    def _live(
        self, limits: NDArray[np.int64], view: int, place: tuple[int, int]
    ) -> NDArray[np.bool_]:
        """Return the live pairs of a part, bool ``[TILE_KEYS, BLOCK_QUERIES]``."""
        key, query = np.arange(TILE_KEYS)[:, None], np.arange(BLOCK_QUERIES)[None, :]
        distance = key - query
        first_key, first_query, low, key_stop, query_stop, high = limits.tolist()
        live: NDArray[np.bool_]
        live = (first_key <= key) & (key < key_stop) & (first_query <= query) & (query < query_stop)
        live &= (low <= distance) & (distance <= high)
        queries, keys, _, _, bits = self._views[view]
        if bits is not None:
            tile, block = place
            rows = range(
                max(queries.start, block * BLOCK_QUERIES),
                min(queries.stop, (block + 1) * BLOCK_QUERIES),
            )
            columns = range(
                max(keys.start, tile * TILE_KEYS), min(keys.stop, (tile + 1) * TILE_KEYS)
            )
            own = bits[rows.start - queries.start : rows.stop - queries.start]
            is_own = np.unpackbits(own, axis=-1, count=len(keys)).view(bool)
            is_own = is_own[:, columns.start - keys.start : columns.stop - keys.start]
            is_set = np.zeros_like(live)
            is_set[
                columns.start - tile * TILE_KEYS : columns.stop - tile * TILE_KEYS,
                rows.start - block * BLOCK_QUERIES : rows.stop - block * BLOCK_QUERIES,
            ] = is_own.T
            live &= is_set
        return live

    def _add(self, mask: NDArray[np.bool_]) -> int:
        """Return the number of a mask, which is stored if it is new."""
        if mask.all():
            return _FULL
        if not mask.any():
            return _EMPTY
        return self._numbers.setdefault(np.packbits(mask).tobytes(), len(self._numbers))

    def joined(self) -> NDArray[np.int32]:
        """Return the mask bits, int32 ``[num_masks, MASK_INTEGERS]``; one of zeros if none."""
        packed = np.frombuffer(b"".join(self._numbers), np.uint8)
        masks = np.unpackbits(packed).reshape(-1, TILE_KEYS, BLOCK_QUERIES // 8, 4, 2)
        # Query q has bit q // 8 * 2 + q % 2 of integer q // 2 % 4 of its key.
        bits = np.zeros((max(len(masks), 1), TILE_KEYS, 4, _BITS_OF_INTEGER), np.uint8)
        ordered = masks.transpose(0, 1, 3, 2, 4).reshape(-1, TILE_KEYS, 4, BLOCK_QUERIES // 4)
        bits[: len(masks), ..., : BLOCK_QUERIES // 4] = ordered
        integers = np.packbits(bits, axis=-1, bitorder="little").view("<i4")
        return integers.reshape(-1, MASK_INTEGERS).astype(np.int32)
