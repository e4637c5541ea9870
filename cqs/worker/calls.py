"""Sparse patterns on backends that compute one rectangle or causal square a call.

A dense view or a causal square is one call. Any other view is cut into such calls and into strips:
a few queries and the keys that they attend to, with a mask. Calls of one shape at equal distances
are joined into one batched call, such as the strips of a window or the residues of a stride. The
batched call reads overlapping or interleaved views of the tensors, without copies. Where calls take
longer than the pairs that they leave out, a block row is one call with a mask, or a few.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise, product
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqs.partial import Gradients, Partial, lse_dtype, merge_own
from cqs.patterns.views import View, union_mask
from cqs.problem.dropout import DropoutBits
from cqs.worker.backend import CallBackend
from cqs.worker.operands import Operands, TaskOperands, mask_addend
from cqs.worker.reference import REFERENCE
from cqs.worker.work import BlockRow, Work

_STRIP = 32
"""Queries of a strip. In a window of w keys, a strip of 32 queries reads w + 32 keys. The table
gives the throughput on live pairs relative to dense attention, by w and queries of a strip
(PyTorch's CPU kernel, 2 cores, float32, head_dim 64):

====  ====  ====  ====  ====  ====
w     32    64    128   256   512
====  ====  ====  ====  ====  ====
820   0.84  0.81  0.77  0.71  0.57
2048  0.88  0.87  0.83  0.80  0.75
====  ====  ====  ====  ====  ====
"""
_AREA = 2**20
"""Most pairs of a call with a mask, and on a dense view if calls are not joined: the backend stores
their scores."""
_MASKED_AREA = 2**24
"""Most pairs of all calls of a block row that have masks instead of leaving pairs out."""
_RECOMPUTED_SCORES = 2**22
"""Most scores that the reference stores at a time when it computes rows again."""
_LEAST_SQUARE = 64
"""Fewest rows of a causal square that gets a call of its own."""
_PAIRS_OF_A_CALL, _PAIRS_OF_A_ROW = 2**14, 192
"""Fixed time of a call, and time to merge one row of results of several calls.

The unit is the time of one pair of a masked call. Both numbers and the next factor were measured
with 128 to 1024 tokens and 8 and 32 heads of 64 on 2 cores. The calls chosen by them take at most
1.18 times as long as the better choice, on average 1.007."""
_PAIR_OF_ONE_VIEW = 1.5
"""Time of a pair of a call that is not joined with others, relative to one of a masked call."""
_KEPT_PAIRS = 2**18
"""Most pairs of a mask that is also kept as an additive mask."""


_Place = tuple[int, slice]
"""Batch element, and query heads with one place in each GQA group, of one batched call."""


class Call(NamedTuple):
    """A view, or ``number`` views of one shape, each shifted by ``stride`` rows and columns."""

    view: View
    is_causal: bool = False
    """Whether the view is a causal square."""
    number: int = 1
    stride: int = 0
    mask: "KeptMask | None" = None
    """Live pairs of a view with bits; ``None`` if they are not kept."""

    def places(self, batch: int, group_size: int) -> Iterator[_Place | None]:
        """List the batched calls; ``None`` is one call for all batch elements and heads."""
        if self.number == 1:
            return iter([None])
        return product(range(batch), (slice(m, None, group_size) for m in range(group_size)))

    def query_rows(self, tensor: Tensor, place: _Place | None, first: int = 0) -> Tensor:
        """Return the call's query rows of a tensor as a view of its memory.

        Args:
            tensor: ``[batch, num_heads, rows, ...]``.
            place: Batch element and head of a batched call, or None for all.
            first: Row number, in the call's coordinates, of the tensor's row 0.

        Returns:
            ``[batch, num_heads, queries, ...]``, or ``[num_kv_heads, number, queries, ...]`` for a
            batched call.
        """
        return self._select(tensor, place, self.view.queries, first)

    def key_rows(self, tensor: Tensor, place: _Place | None) -> Tensor:
        """Return the key rows of ``[batch, num_kv_heads, rows, ...]``; see :meth:`query_rows`."""
        return self._select(tensor, place and place[0], self.view.keys, 0)

    def _select(self, tensor: Tensor, index: Any, tokens: range, first: int) -> Tensor:
        """Return rows of a tensor without a copy; of ``index``, ``number`` runs of them."""
        if index is None:
            return tensor[:, :, tokens.start - first : tokens.stop - first : tokens.step]
        heads = tensor[index]
        num_heads, _, *dim = heads.shape
        head_stride, row_stride, *rest = heads.stride()
        return heads.as_strided(
            (num_heads, self.number, len(tokens), *dim),
            (head_stride, self.stride * row_stride, tokens.step * row_stride, *rest),
            heads.storage_offset() + (tokens.start - first) * row_stride,
        )

    def operands(self, operands: Operands, place: _Place | None) -> Operands:
        """Return the operands with the call's rows of query, key and value alone."""
        return operands._replace(
            query=self.query_rows(operands.query, place),
            key=self.key_rows(operands.key, place),
            value=self.key_rows(operands.value, place),
        )

    def visible(self, device: torch.device) -> Tensor | None:
        """Return the mask of live pairs, bool ``[queries, keys]``, or None if no mask is needed."""
        if self.is_causal or self.view.is_full:
            return None
        mask = torch.from_numpy(self.view.to_mask()) if self.mask is None else self.mask.visible
        return mask.to(device)

    def addend(self, dtype: torch.dtype) -> Tensor | None:
        """Return the kept additive mask, or None if none is kept."""
        return None if self.mask is None else self.mask.addend(dtype)


class KeptMask:
    """Mask that is kept between calls."""

    def __init__(self, visible: Tensor) -> None:
        """Keep live pairs, bool ``[queries, keys]``, on the CPU."""
        self.visible = visible
        self._addends: dict[torch.dtype, Tensor] = {}

    def addend(self, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask, or None if the mask is large."""
        if self.visible.numel() > _KEPT_PAIRS:
            return None
        if dtype not in self._addends:
            self._addends[dtype] = mask_addend(self.visible, dtype)
        return self._addends[dtype]


@lru_cache(maxsize=32)
def make_calls(work: Work, *, joins_calls: bool) -> list[list[tuple[Call, bool]]]:
    """List the calls of every block row, and whether each is the first of all its query rows.

    Calls of one shape are joined if ``joins_calls``. Otherwise every view without bits is cut into
    strips, and no call is causal.
    """
    all_calls = []
    for block_row in work.block_rows:
        if joins_calls:
            calls = list(_join_calls(call for view in block_row.views for call in _cut_view(view)))
            calls = _with_masks(block_row, calls)
        else:
            calls = [call for view in block_row.views for call in _cut_strips(view)]
        has_result = np.zeros(len(block_row.queries), dtype=bool)
        row_calls = []
        for call in calls:
            queries = call.view.moved(-block_row.queries.start, 0).queries
            rows = np.array(queries) + call.stride * np.arange(call.number)[:, None]
            row_calls.append((call, not has_result[rows].any()))
            has_result[rows] = True
        all_calls.append(row_calls)
    return all_calls


def _with_masks(block_row: BlockRow, calls: list[Call]) -> list[Call]:
    """Return calls with a mask for all of a block row if they are faster, else the calls."""
    views, queries = block_row.views, block_row.queries
    if len(calls) == 1 and calls[0].number == 1:
        return [_keep_mask(calls[0])]
    keys = range(min(v.keys.start for v in views), max(v.keys[-1] for v in views) + 1)
    area = len(queries) * len(keys)
    row_cost = _PAIRS_OF_A_ROW if len(calls) > 1 else 0
    if area > min(_MASKED_AREA, sum(_call_cost(call, row_cost) for call in calls)):
        return calls
    mask = union_mask(views, queries, keys)
    bits, height = np.packbits(mask, axis=-1), max(_AREA // len(keys), 1)
    strips = [slice(first, first + height) for first in range(0, len(queries), height)]
    masked = [Call(View(queries[rows], keys, bits=bits[rows])) for rows in strips]
    return [_keep_mask(masked[0])] if len(masked) == 1 else masked


def _call_cost(call: Call, row_cost: float) -> float:
    """Return the time of a call, in pairs of a masked call.

    Args:
        call: The call.
        row_cost: Time to merge one row of results, in the same unit.
    """
    rows = call.number * len(call.view.queries)
    pair_cost = _PAIR_OF_ONE_VIEW if call.number == 1 else 1.0
    return _PAIRS_OF_A_CALL + rows * (row_cost + pair_cost * len(call.view.keys))


def _keep_mask(call: Call) -> Call:
    """Return a single call that keeps its mask, if it has a small one."""
    view = call.view
    if call.is_causal or view.is_full or len(view.queries) * len(view.keys) > _AREA:
        return call
    return call._replace(mask=KeptMask(torch.from_numpy(view.to_mask())))


def is_one_call(queries: range, calls: Sequence[tuple[Call, bool]]) -> bool:
    """Return whether one call computes all queries of a block row, so that nothing is merged."""
    return len(calls) == 1 and calls[0][0].number == 1 and calls[0][0].view.queries == queries


def attend_call(backend: CallBackend, operands: Operands) -> Partial:
    """Compute output and LSE of one call; the reference recomputes rows that the kernels lose."""
    partial = backend.attend(operands)
    unsound = backend.unsound_rows(partial, operands.visible)
    if unsound is not None:
        _compute_again(partial, unsound, operands)
    return partial


def attend_calls(backend: CallBackend, operands: TaskOperands) -> list[Partial]:
    """Compute the partial outputs of the queries of every block row over all their live pairs.

    Args:
        backend: The backend that computes the calls.
        operands: All rows of query, key and value, and the work and options of all calls.

    Returns:
        For each block row, output ``[batch, num_heads, queries, value_dim]`` in the dtype of
        ``query``, and LSE ``[batch, num_heads, queries]``. Queries without a live pair get output 0
        and LSE -inf.
    """
    joins_calls = backend.joins_calls and operands.terms is None
    calls = make_calls(operands.work, joins_calls=joins_calls)
    return [
        _attend_block_row(row.queries, row_calls, backend, operands)
        for row, row_calls in zip(operands.work.block_rows, calls, strict=True)
    ]


def _attend_block_row(
    queries: range,
    calls: Sequence[tuple[Call, bool]],
    backend: CallBackend,
    operands: TaskOperands,
) -> Partial:
    """Compute the partial output of one block row."""
    query, key, value, *_ = operands
    if is_one_call(queries, calls):
        call = calls[0][0]
        return attend_call(backend, call.operands(_with_options(operands, call), None))
    batch, num_heads, _, _ = query.shape
    first, dtype = queries.start, lse_dtype(query.dtype)
    shape = batch, num_heads, len(queries)
    answer = Partial(
        query.new_zeros((*shape, value.shape[-1]), dtype=dtype),
        query.new_full(shape, -torch.inf, dtype=dtype),
    )
    for call, is_first in calls:
        call_operands = _with_options(operands, call)
        for place in call.places(batch, num_heads // key.shape[1]):
            partial = attend_call(backend, call.operands(call_operands, place))
            rows = Partial(*(call.query_rows(part, place, first) for part in answer))
            if not is_first:
                partial = merge_own([rows, Partial(partial.output.to(dtype), partial.lse)])
            for target, part in zip(rows, partial, strict=True):
                target.copy_(part)
    return Partial(answer.output.to(query.dtype), answer.lse)


def add_call_gradients(
    backend: CallBackend,
    gradients: Gradients,
    operands: TaskOperands,
    *output_tensors: Tensor,
) -> None:
    """Add the contribution of the live pairs of all block rows to the gradients, in place.

    Args:
        backend: The backend that computes the calls.
        gradients: Sums that are added to, in the shapes of ``query``, ``key`` and ``value``.
        operands: All rows of query, key and value, and the work and options of all calls.
        output_tensors: Gradient of the output, ``[batch, num_heads, rows_q, value_dim]``; output of
            the whole problem, in the same shape; and its LSE, ``[batch, num_heads, rows_q]``.
    """
    *outputs, lse = output_tensors
    output_tensors = *outputs, lse_for_gradients(lse)
    batch, num_heads, _, _ = operands.query.shape
    joins_calls = backend.joins_calls and operands.terms is None
    calls = make_calls(operands.work, joins_calls=joins_calls)
    for call, _ in chain.from_iterable(calls):
        call_operands = _with_options(operands, call)
        for place in call.places(batch, num_heads // operands.key.shape[1]):
            rows = (call.query_rows(tensor, place) for tensor in output_tensors)
            call_gradients = backend.differentiate(call.operands(call_operands, place), *rows)
            call.query_rows(gradients.query, place).add_(call_gradients[0])
            for target, part in zip(gradients[1:], call_gradients[1:], strict=True):
                if place is None:
                    call.key_rows(target, place).add_(part)
                    continue
                for i, one in enumerate(part.unbind(1)):  # key rows of views may overlap
                    tokens = call.view.moved(0, i * call.stride).keys
                    target[place[0], :, tokens.start : tokens.stop : tokens.step].add_(one)


def _compute_again(partial: Partial, is_wanted: Tensor, operands: Operands) -> None:
    """Recompute some rows of ``partial`` with the reference, in place.

    Args:
        partial: Output and LSE of the call.
        is_wanted: Rows to recompute, bool ``[batch, num_heads, seqlen_q]``.
        operands: Tensors and options of the call.
    """
    rows = is_wanted.any(dim=(0, 1)).nonzero().squeeze(-1)
    for strip in rows.split(max(_RECOMPUTED_SCORES // operands.scores_of_row, 1)):
        again = REFERENCE.attend(operands.rows(strip))
        wanted = is_wanted[:, :, strip]
        where = wanted.nonzero(as_tuple=True)
        place = where[0], where[1], strip[where[2]]
        for target, values in zip(partial, again, strict=True):
            target[place] = values[wanted]


def lse_for_gradients(lse: Tensor) -> Tensor:
    """Return an LSE for which ``exp(score - lse)`` is the probability in every row.

    Rows without a live pair have -inf, which becomes +inf: their probabilities are 0. Rows with a
    score of +inf have +inf, which becomes NaN: their probabilities are NaN, as in PyTorch.
    """
    return lse.nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.inf)


def _with_options(operands: TaskOperands, call: Call) -> Operands:
    """Return all rows of the operands with the mask and the dropped pairs of one call."""
    query, key, value, _, scale, dropout, bits, terms, _ = operands
    visible = call.visible(query.device)
    queries, keys = (slice(r.start, r.stop, r.step) for r in call.view[:2])
    if terms is not None:
        terms = terms.select(queries, keys)
    call_operands = Operands(query, key, value, call.is_causal, scale, visible, terms=terms)
    if dropout is None or bits is None:
        return call_operands
    bits = DropoutBits(bits.multiplier[..., queries], bits.increment[..., queries], bits.key[keys])
    return call_operands._replace(kept=dropout.kept(bits), keep_scale=dropout.scale)


def _cut_view(view: View) -> Iterator[Call]:
    """Cut a view into calls at the rows where an end of its band begins to mask out keys."""
    queries, keys = view.queries, view.keys
    if view.bits is not None or view.is_full:
        yield Call(view)
    elif queries.step != keys.step:
        yield from _cut_strips(view)
    else:  # row a attends to the keys numbered low + a to high + a
        apart = queries.start - keys.start
        low, high = -((-view.low - apart) // keys.step), (view.high + apart) // keys.step
        first = max(0, -high)
        last = max(min(len(queries), len(keys) - low), first)
        marks = (min(max(mark, first), last) for mark in (1 - low, len(keys) - high))
        for start, stop in pairwise(sorted({first, *marks, last})):
            yield from _cut_alike(view._replace(queries=queries[start:stop]), start, low, high)


def _cut_alike(view: View, start: int, low: int, high: int) -> Iterator[Call]:
    """Cut a view into calls if each end of the band masks out keys in all rows or in none.

    A view that is bounded at one end is a rectangle plus a causal square or strips.

    Args:
        view: Row ``i`` attends to the keys numbered ``start + i + low`` to ``start + i + high``.
        start: Number of the view's first row.
        low: Number of the first live key of row 0.
        high: Number of the last live key of row 0.
    """
    queries, keys = view.queries, view.keys
    begins_late, ends_early = start + low > 0, start < len(keys) - high
    if not (begins_late or ends_early):
        yield Call(View(queries, keys))
    elif begins_late == ends_early or len(queries) < _LEAST_SQUARE:
        yield from _cut_strips(view)
    elif ends_early:
        split = start + high
        if split:
            yield Call(View(queries, keys[:split]))
        yield Call(view._replace(keys=keys[split : split + len(queries)]), is_causal=True)
    else:
        split = start + low + len(queries) - 1
        yield Call(View(queries, keys[split:]))
        yield from _cut_strips(view._replace(keys=keys[:split]))


def _cut_strips(view: View) -> Iterator[Call]:
    """Cut a view into calls of ``_STRIP`` queries, or of about ``_AREA`` pairs if dense.

    If keys have gaps, calls are seldom of one shape, and r more queries add r / gap keys to each.
    Calls of the square root of ``_PAIRS_OF_A_CALL`` times the gap then take the least time.
    """
    if view.bits is not None:
        yield Call(view)
        return
    gap, most = view.keys.step // view.queries.step, _AREA // len(view.keys)
    number = _STRIP
    if view.is_full:
        number = max(most, _STRIP)
    elif gap > 1:
        number = max(min(isqrt(_PAIRS_OF_A_CALL * gap), most) // gap * gap, _STRIP)
    for first in range(0, len(view.queries), number):
        queries = view.queries[first : first + number]
        first_key, last_key = queries[0] + view.low, queries[-1] + view.high
        if keys := view.keys[bisect_left(view.keys, first_key) : bisect_right(view.keys, last_key)]:
            yield Call(view._replace(queries=queries, keys=keys))


def _are_apart(queries: range, farthest: int, stride: int) -> bool:
    """Return whether copies of a query range, shifted by multiples of ``stride``, are disjoint.

    Args:
        queries: The first copy.
        farthest: Tokens from the first copy to the last.
        stride: Tokens from one copy to the next.
    """
    return stride >= len(queries) * queries.step or 0 < farthest < queries.step


def _join_calls(calls: Iterable[Call]) -> Iterator[Call]:
    """Join calls of one shape whose first queries are an arithmetic progression."""
    alike: defaultdict[Any, list[Call]] = defaultdict(list)
    for i, call in enumerate(calls):
        queries, keys, low, high, bits = call.view
        apart = keys.start - queries.start
        band = (0, 0) if call.is_causal or call.view.is_full else (low, high)
        shape = len(queries), queries.step, len(keys), keys.step
        alike[(*shape, apart, *band, call.is_causal, i if bits is not None else -1)].append(call)
    for group in alike.values():
        group.sort(key=lambda call: call.view.queries.start)
        while group:
            starts = [call.view.queries.start for call in group]
            stride = starts[1] - starts[0] if len(group) > 1 else 0
            number = 1
            while (
                number < len(group)
                and starts[number] - starts[number - 1] == stride
                and _are_apart(group[0].view.queries, number * stride, stride)
            ):
                number += 1
            yield group[0]._replace(number=number, stride=stride)
            group = group[number:]
