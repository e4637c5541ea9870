"""Merge of partial outputs on a CPU, in compiled loops that read each of them once.

Numba compiles the loops at the first merge of each dtype and stores the code on disk.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cqs.partial import Partial, lse_dtype

_ELEMENTS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Integers that stand for the bits of a dtype that NumPy or Numba lack."""
_TILE_BYTES = 512
"""Consecutive bytes that are read of one part. With many more the prefetcher loses the others."""
_VECTOR_ROWS = 256
"""Rows whose weights are formed in vectors, in the first-level cache."""
_BLOCK_ELEMENTS = 2**15
"""LSEs whose weights are formed at once; PyTorch starts no threads of its own for so few."""
_THREAD_ELEMENTS = 2**18
"""Least elements of all parts for each thread."""


def _compiled(function: Callable[..., Any]) -> Any:
    compiled = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder is writable: each process compiles
        compiled.enable_caching()
    return compiled


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Convert an address to a pointer."""
    return types.voidptr(
        types.int64
    ), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], cgutils.voidptr_t
    )


@intrinsic
def _fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    """Compute ``x * y + z``, rounded once, as ``torch.addcmul`` does."""
    return x(x, x, x), lambda context, builder, signature, arguments: builder.fma(*arguments)


@intrinsic
def _widen(context: Any, element: Any) -> Any:
    """Convert an element of a part to the dtype of sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if element == types.uint16:  # bfloat16: the upper half of a float32
            upper = builder.shl(builder.zext(bits, ir.IntType(32)), ir.IntType(32)(16))
            return builder.bitcast(upper, ir.FloatType())
        if element == types.int16:  # float16
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        return bits

    return (element if isinstance(element, types.Float) else types.float32)(element), generate


@intrinsic
def _narrow(context: Any, x: Any, like: Any, element: Any) -> Any:
    """Round ``x``, which is computed from ``element``, to the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, *_ = arguments
        if like == types.uint16:
            word = ir.IntType(32)
            bits = builder.bitcast(x, word)
            is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
            to_even = builder.add(bits, builder.add(is_odd, word(0x7FFF)))
            if element != like:  # else rounding keeps NaN: its lower bits are 0
                is_nan = builder.fcmp_unordered("uno", x, x)
                to_even = builder.select(is_nan, word(0x7FC00000), to_even)
            return builder.trunc(builder.lshr(to_even, word(16)), ir.IntType(16))
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
        return x

    return like(x, like, element), generate


@_compiled
def _compare(lses, largest, is_lower):  # type: ignore[no-untyped-def]
    """Replace LSEs by the exponents of weights, and update the largest LSE of each row.

    Of the running sum and of a part, the one with the larger LSE has weight 1, and the other one
    ``exp(exponent)``, where the exponent is the difference of the LSEs.

    Args:
        lses: ``[num_parts, num_rows]``: LSEs, and after the call the exponents: -inf for a part
            without keys before the first key of a row, 0 for the first part with keys. NaN and +inf
            give NaN.
        largest: ``[num_rows]``: the largest LSE merged so far; updated.
        is_lower: bool ``[num_parts, num_rows]``: whether the LSE of the part is not the larger one;
            written to.
    """
    for part in range(lses.shape[0]):
        lse, lower = lses[part], is_lower[part]
        for row in range(largest.shape[0]):
            old, new = largest[row], lse[row]
            larger = new if old <= new or new != new else old  # a NaN must reach the result
            difference = (old - larger) + (new - larger)
            if old == -np.inf:  # a sum of 0, whatever its weight; exp(-inf) takes long
                difference = new if new == old else new - new
            lse[row] = difference
            lower[row] = old >= new
            largest[row] = larger


@_compiled
def _weigh(exponentials, is_lower, weights, sums):  # type: ignore[no-untyped-def]
    """Assign the exponentials to the part or to the running sum, and add up the weights.

    Every NaN becomes the one whose lower bits are 0, which stays NaN when it is rounded.

    Args:
        exponentials: ``[num_parts, num_rows]``: exponentials of the exponents.
        is_lower: The result of :func:`_compare`.
        weights: ``[num_rows, num_parts, 2]``; written to. All weights of a row are contiguous,
            because memory is read slowly in more than about ten places at a time.
        sums: ``[num_rows]``: the sum of all weights so far; updated.
    """
    one, nan, num_parts = sums.dtype.type(1), sums.dtype.type(np.nan), weights.shape[1]
    new = np.empty((num_parts, _VECTOR_ROWS), sums.dtype)
    old = np.empty_like(new)
    for first in range(0, weights.shape[0], _VECTOR_ROWS):
        number = min(_VECTOR_ROWS, weights.shape[0] - first)
        total = sums[first : first + number]
        for part in range(num_parts):  # contiguous arrays: compiled to vectors
            smaller = exponentials[part, first : first + number]
            lower = is_lower[part, first : first + number]
            of_part, of_sum = new[part], old[part]
            for i in range(number):
                weight = smaller[i] if smaller[i] == smaller[i] else nan
                of_part[i] = weight if lower[i] else one
                of_sum[i] = one if lower[i] else weight
                total[i] = total[i] * of_sum[i] + of_part[i]
        for i in range(number):
            for part in range(num_parts):
                weights[first + i, part, 0] = new[part, i]
                weights[first + i, part, 1] = old[part, i]


@_compiled
def _accumulate(  # type: ignore[no-untyped-def]
    addresses,
    strides,
    num_heads,
    num_rows,
    num_columns,
    part_like,
    output_like,
    weights,
    divisors,
    zero,
    resumes,
    first,
    end,
):
    """Form the weighted sums of the rows of all parts, divided by ``divisors``.

    Args:
        addresses: int64 ``[num_parts + 1]``: the memory of each part, then of the output.
        strides: int64 ``[num_parts + 1, 3]``: their strides in bytes. Elements of a row are
            contiguous.
        num_heads: Number of heads.
        num_rows: Number of rows of a head.
        num_columns: Number of elements of a row.
        part_like: An array of the element type of the parts.
        output_like: An array of the element type of the output.
        weights: ``[end - first, num_parts, 2]`` or longer: the weight of each part, and that of the
            running sum when the part is added.
        divisors: ``[end - first]`` or longer; 0 counts as 1.
        zero: What the sums start from: -0.0 keeps the sign of a zero.
        resumes: Whether the sums start from the output instead. At least two parts are required
            unless it is set.
        first: First row, of ``batch * num_heads * num_rows``.
        end: Last row + 1.
    """
    last, one, origin = weights.shape[1] - 1, divisors.dtype.type(1), first
    tile_rows = max(1, _TILE_BYTES // (num_columns * part_like.itemsize))
    tile = np.empty((tile_rows, num_columns), divisors.dtype)
    while first < end:
        head = first // num_rows
        row = first - head * num_rows
        batch = head // num_heads
        head -= batch * num_heads
        stop = min(first + tile_rows, end, first - row + num_rows)
        step = strides[last + 1, 2]
        target = strides[last + 1, 0] * batch + strides[last + 1, 1] * head + step * row
        target += addresses[last + 1]
        if resumes:
            for i in range(stop - first):
                output = carray(_pointer(target + step * i), (num_columns,), output_like.dtype)
                total = tile[i]
                for j in range(num_columns):
                    total[j] = _widen(output[j])
        for part in range(last + 1):
            source = strides[part, 0] * batch + strides[part, 1] * head + strides[part, 2] * row
            source += addresses[part]
            for i in range(stop - first):
                x = carray(_pointer(source + strides[part, 2] * i), (num_columns,), part_like.dtype)
                at = first - origin + i
                new, old = weights[at, part, 0], weights[at, part, 1]
                total = tile[i]
                if part == 0 and not resumes:
                    for j in range(num_columns):
                        total[j] = _fma(_widen(x[j]), new, zero)
                elif part < last:
                    for j in range(num_columns):
                        total[j] = _fma(_widen(x[j]), new, total[j] * old)
                else:
                    divisor = divisors[at]
                    if divisor == 0:  # no key
                        divisor = one
                    output = carray(_pointer(target + step * i), (num_columns,), output_like.dtype)
                    for j in range(num_columns):
                        mean = _fma(_widen(x[j]), new, total[j] * old) / divisor
                        output[j] = _narrow(mean, output[j], x[j])
        first = stop


def merge(answer: Partial, partials: Sequence[Partial]) -> None:
    """Merge partial outputs of the same rows into ``answer``, in their order.

    The computation is that of :class:`cqs.partial.RunningMerge`, bitwise identical for every number
    of threads.

    Args:
        answer: Tensors that are overwritten: output ``[batch, num_heads, rows, value_dim]`` and LSE
            ``[batch, num_heads, rows]``, with any strides.
        partials: At least two partial outputs, with any strides.
    """
    output, lse = answer
    largest = torch.full((lse.numel(),), -torch.inf, dtype=lse.dtype)
    sums = torch.zeros_like(largest)
    _run(output, partials, largest, sums, zero=-0.0)
    lse.copy_(largest.add_(sums.log_()).view(lse.shape))


def add(total: Tensor, largest: Tensor, sums: Tensor, partial: Partial) -> None:
    """Add a partial output to running sums.

    Args:
        total: Weighted sum of outputs, ``[batch, num_heads, rows, value_dim]``; updated.
        largest: Largest LSE of each row, ``[batch, num_heads, rows]``; updated.
        sums: Sum of weights, ``[batch, num_heads, rows]``; updated.
        partial: The partial output of the same rows.
    """
    flat_largest, flat_sums = largest.flatten(), sums.flatten()
    _run(total, [partial], flat_largest, flat_sums, resumes=True)
    for tensor, flat in ((largest, flat_largest), (sums, flat_sums)):
        if flat.data_ptr() != tensor.data_ptr():  # else a view
            tensor.copy_(flat.view(tensor.shape))


def sum_tensors(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of tensors, added in their order in the accumulation dtype.

    Args:
        total: The sum, ``[batch, heads, rows, dim]``, in any dtype; overwritten.
        parts: At least two tensors of that shape.
    """
    sums = torch.ones(total.shape[:3].numel(), dtype=lse_dtype(total.dtype))
    _run(total, [Partial(part, sums) for part in parts], None, sums)


def _run(
    output: Tensor,
    partials: Sequence[Partial],
    largest: Tensor | None,
    sums: Tensor,
    *,
    zero: float = 0.0,
    resumes: bool = False,
) -> None:
    """Form the weighted sums of partial outputs, on as many threads as PyTorch uses.

    Args:
        output: ``[batch, num_heads, rows, columns]``; written to.
        partials: The partial outputs, in the shape of ``output``.
        largest: Largest LSE so far, ``[batch * num_heads * rows]``; updated. ``None`` means that
            all weights are 1.
        sums: Sum of the weights so far, in that shape; updated.
        zero: What the sums of outputs start from.
        resumes: Whether they start from ``output``, and are not divided by ``sums``.
    """
    parts = [partial.output for partial in partials]
    lses = [partial.lse.to(sums.dtype).flatten() for partial in partials]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or lse_dtype(*dtypes) != sums.dtype:
        parts = [part.to(sums.dtype) for part in parts]
    target = output if output.stride(-1) == 1 else output.contiguous()
    tensors = [*(part if part.stride(-1) == 1 else part.contiguous() for part in parts), target]
    like = [torch.empty(0, dtype=_ELEMENTS.get(t.dtype, t.dtype)).numpy() for t in tensors[-2:]]
    block_rows = max(_BLOCK_ELEMENTS // len(parts), 1)
    layout = (
        np.array([tensor.data_ptr() for tensor in tensors]),
        np.array([[n * tensor.itemsize for n in tensor.stride()[:3]] for tensor in tensors]),
        *output.shape[1:],
        *like,
    )

    def run(first: int, end: int) -> None:
        """Merge rows, block by block: weights stay in the cache of the core."""
        weights = sums.new_ones((min(block_rows, end - first), len(parts), 2)).numpy()
        divisors = np.ones(len(weights), weights.dtype)
        for start in range(first, end, block_rows):
            stop = min(start + block_rows, end)
            if largest is not None:
                exponents = torch.stack([lse[start:stop] for lse in lses])
                is_lower = np.empty(exponents.shape, bool)
                _compare(exponents.numpy(), largest[start:stop].numpy(), is_lower)
                block_sums = sums[start:stop].numpy()
                block = weights[: stop - start]
                _weigh(exponents.exp_().numpy(), is_lower, block, block_sums)
                divisors = divisors if resumes else block_sums
            _accumulate(*layout, weights, divisors, weights.dtype.type(zero), resumes, start, stop)

    num_rows = sums.numel()
    count = min(torch.get_num_threads(), len(parts) * output.numel() // _THREAD_ELEMENTS + 1)
    if count == 1:
        run(0, num_rows)
    else:
        cuts = [num_rows * i // count for i in range(count + 1)]
        list(_threads(os.getpid(), count).map(run, cuts, cuts[1:]))
    if target is not output:
        output.copy_(target)


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return the threads of a process; those of its parent do not survive a fork."""
    return ThreadPoolExecutor(count)
