"""Launches of the backward kernel with five products, on Hopper GPUs: rectangles and patterns."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cqs.launches import Arguments, Launcher
from cqs.patterns.views import View
from cqs.worker.cuda_graphs import cached_on_device
from cqs.worker.operands import TaskOperands
from cqs.worker.triton.descriptors import describe
from cqs.worker.triton.hopper_rectangle import (
    BLOCK_QUERIES,
    STATE_TURNS,
    TILE_KEYS,
    convert_query_gradient,
    rectangle_gradients,
)
from cqs.worker.triton.statistics_launch import launch_row_statistics
from cqs.worker.triton.visits import (
    VisitCounts,
    count_visits,
    make_visit_list,
)
from cqs.worker.work import Work

_HEAD_DIMS = (64, 128)
"""Columns of the tensors that the kernel supports."""
_MIN_PAIRS, _MIN_PAIRS_OF_SEVERAL = 1.3e8, 1.5e8
"""Live pairs of all heads from which the kernel is used: of one rectangle, and on average of more.

With fewer, the kernel takes up to three times as long as the others: each rectangle takes the host
0.06 ms. With more, 1 to 6 rectangles take 0.71 to 1.05 of the time of the others (one H200)."""
_MIN_DENSE_HEADS = 4
"""Dense rectangles of fewer KV heads require three times as many pairs, because all tiles of a head
follow one another."""
_MOST_RECTANGLES = 256
"""Most rectangles of a call; packed documents have thousands, which are small."""
_TOGETHER = (40, 16), (320, 4)
"""Mean numbers of visits of a tile up to which tiles of so many query heads alternate in the queue.

Beyond, and where tiles begin at different blocks, those of one KV head follow one another. With a
causal mask and no list of visits those of all heads alternate.

On one H100, non-causal, 16 heads of 128 with 1, 4 and 16 heads together: 524, 528 and 403 TFLOP/s
at 16K tokens (256 visits), 561, 503 and 340 at 32K, 551, 418 and 310 at 64K, 549, 344 and 299 at
128K.
A window of 25 % of 16K tokens, 32 query heads and 8 KV heads, with 1, 2, 4 and 8 KV heads: 496,
500, 313 and 318. A window of 1024 tokens to both sides at 64K tokens on one H200, with 1, 8 and 16
heads: 5.2, 5.3 and 5.6 ms.
Documents of 1500 tokens on average, which have 30 visits: 149, 347 and 388 at 64K."""
_MIN_VISITS = {64: 45_000, 128: 12_000}
"""Visits of all query heads from which lists of visits are used, by columns.

A visit is a tile of keys and a block of queries that have a live pair.

With more, windows of 10 to 50 % take 0.73 to 1.02 of the time of the kernels of seven products
(median 0.82), with fewer 0.63 to 1.60 (one H100)."""
_MOST_VISITS, _MOST_LISTS = (2**17, 2**20), (128, 16)
"""Most visits of a head in a short and in a long list, and most lists of each kind that are kept:
256 MiB of each. As many prepared launches may hold lists that were kept before. Lists of patterns
with bits count as long, and take more: a mask of 2 KiB for each partial visit.

Tasks that run one after another on one GPU have a list each. The host makes a list in 5 to
100 ms."""
_MOST_SPANNED = 1.5
"""Most blocks from a tile's first to its last visit, relative to the visits.

Windows and documents have no gaps, and tasks of quorums few: one launch instead of one for each
rectangle takes 24 tasks of 64K tokens from 285 to 259 ms, causal from 154 to 140 (one H200, both
passes). Tiles with many gaps wait for each other: BigBird takes 1.5 of the time of the kernels of
seven products, blocks at random 0.94 to 1.15 (one H100)."""
_INTEGERS_OF_COPY = 32
"""Integers of a record of a visit and of those after it: copies are aligned to 128 bytes."""
_STAGES = {64: 4, 128: 3}
"""Blocks of queries in shared memory, by columns."""
_BUFFERS = {64: 2, 128: 1}
"""Blocks of dQ in shared memory, by columns. With 128, a second one would take a stage's place."""
_QUERIES: int = BLOCK_QUERIES.value
_KEYS: int = TILE_KEYS.value
_COLUMNS_OF_SUMS = 256
"""Columns of the descriptor of the sums of dQ, the most that the TMA unit copies at once."""

_RECTANGLE = Launcher(rectangle_gradients)
_VISITS = [Launcher(rectangle_gradients, most) for most in _MOST_LISTS]  # short and long lists
_CONVERT = Launcher(convert_query_gradient)


class Rectangle(NamedTuple):
    """Rows of the query tensor and of the key tensor with all pairs live, or causal.

    A causal rectangle is aligned at the end: its last query sees all of its keys. Its first queries
    may see none.
    """

    queries: range
    keys: range
    is_causal: bool

    @property
    def num_pairs(self) -> float:
        """Return the number of live pairs, about half of all in a causal square."""
        below = max(len(self.keys) - len(self.queries), 0)
        wide = len(self.queries) * below
        rest = min(len(self.keys), len(self.queries)) * (len(self.keys) - below)
        return wide + rest / 2 if self.is_causal else len(self.queries) * len(self.keys)


def takes_rectangle_kernel(operands: TaskOperands) -> bool:
    """Return whether the kernel of rectangles computes the gradients of these operands.

    Args:
        operands: Tensors and options for which the kernels for Hopper GPUs are chosen.
    """
    rectangles = rectangles_of(operands.work) if _supports(operands) else None
    if rectangles is None:
        return False
    num_heads, num_kv_heads = operands.count_heads()
    least = _MIN_PAIRS if len(rectangles) == 1 else _MIN_PAIRS_OF_SEVERAL * len(rectangles)
    if num_kv_heads < _MIN_DENSE_HEADS and not any(rectangle.is_causal for rectangle in rectangles):
        least *= 3
    return num_heads * sum(rectangle.num_pairs for rectangle in rectangles) >= least


def takes_visits(operands: TaskOperands) -> bool:
    """Return whether :func:`gradients_of_visits` computes the gradients of these operands.

    Args:
        operands: Tensors and options for which the kernels for Hopper GPUs are chosen. A single
            rectangle has no visits: see :func:`takes_rectangle_kernel`.
    """
    query, key, _, work, *_ = operands
    if not _supports(operands):
        return False
    rectangles = rectangles_of(work)
    if rectangles is not None and len(rectangles) == 1:
        return False
    counts = count_visits(work, query.shape[2], key.shape[2], _MOST_VISITS[-1])
    if counts is None:  # too many, or rows with a step
        return False
    num_heads, _ = operands.count_heads()
    has_many = num_heads * counts.num_visits >= _MIN_VISITS[query.shape[-1]]
    return has_many and counts.num_spanned <= _MOST_SPANNED * counts.num_visits


def _supports(operands: TaskOperands) -> bool:
    """Return whether the kernel supports head dimensions and options, of any work."""
    head_dim, value_dim = operands.query.shape[-1], operands.value.shape[-1]
    has_options = operands.terms is not None or operands.dropout is not None
    return head_dim == value_dim and head_dim in _HEAD_DIMS and not has_options


@lru_cache(maxsize=256)
def rectangles_of(work: Work) -> tuple[Rectangle, ...] | None:
    """Divide the work into rectangles; those of equal queries follow one another.

    Returns:
        The rectangles, or ``None`` if the work has other pairs, none, or many rectangles. Two of
        them have the same queries or none in common.
    """
    rects: list[Rectangle] = []
    for block_row in work.block_rows:
        views = sorted(block_row.views, key=lambda view: (view.queries.start, view.keys.start))
        for queries, query_views in groupby(views, key=lambda view: view.queries):
            if queries.step != 1:
                return None
            united: list[list[View]] = []
            for view in query_views:
                if view.keys.step != 1 or view.bits is not None:
                    return None
                if united and united[-1][-1].keys.stop == view.keys.start:
                    united[-1].append(view)
                else:
                    united.append([view])
            for adjacent in united:
                whole = _as_rectangle(adjacent)
                parts = [whole] if whole else [_as_rectangle([view]) for view in adjacent]
                rects += [part for part in parts if part]
                if not all(parts) or len(rects) > _MOST_RECTANGLES:
                    return None
    bounds = {bound for queries, _, _ in rects for bound in (queries.start, queries.stop)}
    parts = [part for first, stop in pairwise(sorted(bounds)) for part in _clip(rects, first, stop)]
    return tuple(parts) or None


def _clip(rectangles: Sequence[Rectangle], first: int, stop: int) -> Iterator[Rectangle]:
    """Yield the parts of rectangles that have the queries from ``first`` to ``stop``."""
    for queries, keys, is_causal in rectangles:
        if queries.start <= first and stop <= queries.stop:
            seen = range(keys.start, keys.stop - (queries.stop - stop if is_causal else 0))
            if seen:
                yield Rectangle(range(first, stop), seen, is_causal)


def _as_rectangle(views: list[View]) -> Rectangle | None:
    """Return the rectangle of views of the same queries and adjacent keys, if it is one."""
    queries, keys = views[0].queries, range(views[0].keys.start, views[-1].keys.stop)
    if not queries or not keys:
        return None
    if all(view.is_full for view in views):
        return Rectangle(queries, keys, is_causal=False)
    high = keys.stop - queries.stop
    is_causal = all(_is_below(view, high) for view in views)
    return Rectangle(queries, keys, is_causal=True) if is_causal else None


def _is_below(view: View, high: int) -> bool:
    """Return whether the live pairs are all with ``key - query <= high``."""
    nearest, farthest = view.keys[0] - view.queries[-1], view.keys[-1] - view.queries[0]
    is_cut_there = view.high == high or farthest <= min(view.high, high)
    return view.bits is None and view.low <= nearest and is_cut_there


def gradients_of_rectangles(
    operands: TaskOperands,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    dtype: torch.dtype | None,
    num_processors: int,
) -> Sequence[Tensor]:
    """Compute the gradients of rectangles of scores, one launch after another.

    Besides its results it allocates float32 sums of dQ, two float32 statistics per query and an
    int32 turn for each block of 64 queries, and with several rectangles float32 sums of dK and dV.

    Args:
        operands: Tensors and options that :func:`takes_rectangle_kernel` accepts.
        grad_output: Gradient of the output, ``[batch, num_heads, rows_q, head_dim]``.
        output: Output of the whole problem, in the same shape.
        lse: LSE of the whole problem, float32 ``[batch, num_heads, rows_q]``.
        dtype: Dtype of the gradients; ``None`` means float32.
        num_processors: Number of programs at most; it does not change the result.

    Returns:
        Gradients of query, key and value in their shapes, contiguous.
    """
    query, key, value, work, scale, *_ = operands
    rectangles = rectangles_of(work)
    assert rectangles is not None
    is_sum = len(rectangles) > 1 or rectangles[0].keys != range(key.shape[2])
    has_all_queries = not is_sum and rectangles[0].queries == range(query.shape[2])

    def new(like: Tensor, dtype: torch.dtype | None, is_covered: bool) -> Tensor:
        make = torch.empty if is_covered else torch.zeros
        return make(like.shape, dtype=dtype or torch.float32, device=like.device)

    grad_query = new(query, dtype, has_all_queries)
    kv_gradients = [new(t, None if is_sum else dtype, not is_sum) for t in (key, value)]
    for queries, query_rectangles in groupby(rectangles, key=lambda rectangle: rectangle.queries):
        rows = slice(queries.start, queries.stop)
        query_tensors = [t[:, :, rows] for t in (query, grad_output, output, lse, grad_query)]
        parts = [
            (is_causal, *(t[:, :, keys.start : keys.stop] for t in (key, value, *kv_gradients)))
            for _, keys, is_causal in query_rectangles
        ]
        _add_rectangles(query_tensors, parts, scale, num_processors, is_sum=is_sum)
    return grad_query, *(t.to(dtype or torch.float32) for t in kv_gradients)


class _Visits(NamedTuple):
    """The visits of a work on the device, see visits.py."""

    starts: Tensor
    visits: Tensor
    masks: Tensor
    num_unvisited: int
    """Number of blocks of queries without a visit."""
    counts: VisitCounts
    """Numbers by which the list is kept and ordered."""


def _make_visits(
    device: torch.device, work: Work, num_queries: int, num_keys: int, counts: VisitCounts
) -> _Visits:
    visit_list = make_visit_list(work, num_queries, num_keys)
    arrays = visit_list.starts, visit_list.visits, visit_list.masks
    starts, visits, masks = (torch.from_numpy(array).flatten().to(device) for array in arrays)
    return _Visits(starts, visits, masks, visit_list.num_unvisited, counts)


_visits_of_kind = [cached_on_device(_make_visits, most) for most in _MOST_LISTS]


def _is_long(counts: VisitCounts) -> bool:
    """Return whether few lists of this length are kept."""
    return counts.num_visits > _MOST_VISITS[0] or counts.has_bits


def gradients_of_visits(
    operands: TaskOperands,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    dtype: torch.dtype | None,
    num_processors: int,
) -> Sequence[Tensor]:
    """Compute the gradients of a sparse pattern, or of several rectangles, in one launch.

    Besides its results it allocates float32 sums of dQ, two float32 statistics per query and an
    int32 turn for each block of 64 queries. Lists of visits are kept on the device, 16 bytes for
    each tile of 128 keys and block of 64 queries that have a live pair.

    Arguments and results are those of :func:`gradients_of_rectangles`, for operands that
    :func:`takes_visits` accepts.
    """
    query, key, value, work, scale, *_ = operands
    lengths = query.shape[2], key.shape[2]
    counts = count_visits(work, *lengths, _MOST_VISITS[-1])
    assert counts is not None
    lists = _visits_of_kind[_is_long(counts)](query.device, work, *lengths, counts)
    gradients = [
        torch.empty(tensor.shape, dtype=dtype or torch.float32, device=tensor.device)
        for tensor in (query, key, value)
    ]
    grad_query, *kv_gradients = gradients
    query_tensors = query, grad_output, output, lse, grad_query
    parts = [(False, key, value, *kv_gradients)]
    _add_rectangles(query_tensors, parts, scale, num_processors, is_sum=False, lists=lists)
    return gradients


def _add_rectangles(
    query_tensors: Sequence[Tensor],
    parts: Sequence[tuple[Any, ...]],
    scale: float,
    num_processors: int,
    *,
    is_sum: bool,
    lists: _Visits | None = None,
) -> None:
    """Compute the gradients of rectangles of the same queries.

    Args:
        query_tensors: Query, gradient of the output, output, LSE and gradient of the query; the
            last one is overwritten.
        parts: For each rectangle whether it is causal, its key, value, and their gradients, which
            are overwritten or added to.
        scale: Factor on the scores.
        num_processors: Number of programs at most.
        is_sum: Whether the launches add to sums. Otherwise there is one, which overwrites.
        lists: The visits of the only rectangle; ``None`` if all its pairs are live, or causal.
    """
    query, grad_output, output, lse, grad_query = query_tensors
    batch, num_heads, num_queries, head_dim = query.shape
    heads, num_blocks = batch * num_heads, triton.cdiv(num_queries, _QUERIES)
    block_statistics, _ = launch_row_statistics(grad_output, output, lse, in_blocks_of=_QUERIES)
    statistics = block_statistics.as_strided((2 * heads * num_blocks * _QUERIES,), (1,))
    is_partial = lists is not None and lists.num_unvisited > 0
    new = torch.zeros if is_sum or is_partial else torch.empty
    shape = heads * num_blocks * _QUERIES * head_dim // _COLUMNS_OF_SUMS, _COLUMNS_OF_SUMS
    sums = new(shape, dtype=torch.float32, device=query.device)
    for is_causal, key, value, grad_key, grad_value in parts:
        _launch_rectangle(
            (query, key, value, grad_output, statistics, sums, grad_key, grad_value),
            (is_causal, is_sum, scale, num_processors),
            lists,
        )
    is_causal, key, *_ = parts[0]
    first = max(num_queries - key.shape[2], 0) // _QUERIES if is_causal and not is_sum else 0

    def make(sums: Tensor, grad_query: Tensor) -> Arguments:
        numbers = scale, num_queries, num_blocks, grad_query.stride(1) // head_dim, first
        constants = {"BLOCK_D": head_dim, "num_warps": 4}
        return (2 * heads * num_blocks,), (sums, grad_query, *numbers), constants

    _CONVERT.launch((sums, grad_query), make, key=(scale, first))


def _launch_rectangle(
    tensors: tuple[Tensor, ...],
    options: tuple[bool, bool, float, int],
    lists: _Visits | None,
) -> None:
    """Add the gradients of one rectangle to sums, or overwrite them.

    Args:
        tensors: Query, key, value, gradient of the output, statistics and the sums of dQ, as in
            ``rectangle_gradients``, and the gradients of key and value.
        options: Whether it is causal, whether it adds to sums, the factor on the scores, and the
            number of programs at most.
        lists: The visits of the rectangle, or ``None``.
    """
    is_causal, is_sum, scale, num_processors = options

    def make(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        statistics: Tensor,
        sums: Tensor,
        *written: Tensor,
    ) -> Arguments:
        half = _KEYS // 2
        batch, num_heads, num_queries, head_dim = query.shape
        _, heads_of_batch, num_keys, _ = key.shape
        num_kv_heads, num_tiles = batch * heads_of_batch, triton.cdiv(num_keys, _KEYS)
        group = num_heads // heads_of_batch
        descriptors = [
            describe(query, 1, _QUERIES, on_hopper=True),
            describe(key, 1, half, on_hopper=True),
            describe(value, 1, half, on_hopper=True),
            describe(grad_output, 1, _QUERIES, on_hopper=True),
            describe(key, 1, half, on_hopper=True, columns=head_dim // 2),
            _describe_flat(statistics, [_QUERIES]),
            _describe_flat(sums, [_QUERIES * head_dim // _COLUMNS_OF_SUMS, _COLUMNS_OF_SUMS]),
        ]
        list_arguments: list[Any] = [None] * 4
        visits_of_tile: float = triton.cdiv(num_queries, _QUERIES)
        if lists is not None:
            visit_descriptor = _describe_flat(lists.visits, [_INTEGERS_OF_COPY])
            is_aligned = lists.counts.is_aligned
            visits_of_tile = lists.counts.num_visits / num_tiles if is_aligned else math.inf
            list_arguments = [lists.starts, lists.visits, visit_descriptor, lists.masks]
        numbers = (
            num_kv_heads,
            num_tiles,
            triton.cdiv(num_queries, _QUERIES),
            num_keys,
            group,
            num_kv_heads if is_causal else min(_num_together(visits_of_tile, group), num_kv_heads),
            num_keys - num_queries,
            heads_of_batch,
            written[0].stride(1) // head_dim,
            scale,
            scale / math.log(2),
        )
        constants = {
            "BLOCK_D": head_dim,
            "IS_CAUSAL": is_causal,
            "IS_RAGGED": num_keys % _KEYS != 0,
            "IS_SUM": is_sum,
            "HEADS_ALTERNATE": lists is None or is_aligned,
            "STAGES": _STAGES[head_dim],
            "BUFFERS": _BUFFERS[head_dim],
            "num_warps": 4,
        }
        grid = (min(num_kv_heads * num_tiles, num_processors),)
        return grid, (*descriptors, *written, *list_arguments, *numbers), constants

    query = tensors[0]
    turns = query.shape[:2].numel() * triton.cdiv(query.shape[2], _QUERIES)
    state = torch.zeros(STATE_TURNS.value + turns, dtype=torch.int32, device=query.device)
    if lists is None:
        _RECTANGLE.launch((*tensors, state), make, key=options)
    else:
        _VISITS[_is_long(lists.counts)].launch((*tensors, state), make, key=options, kept=lists[:3])


def _num_together(visits_of_tile: float, group: int) -> int:
    """Return the number of KV heads whose tiles alternate in the queue, see ``_TOGETHER``."""
    for most_visits, number in _TOGETHER:
        if visits_of_tile <= most_visits:
            return max(number // group, 1)
    return 1


def _describe_flat(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe contiguous 4-byte elements for TMA, in shared memory without swizzling."""
    layout = gl.NVMMASharedLayout(0, 32, len(block))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
