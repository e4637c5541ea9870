"""Merge of partial outputs on a CPU, in one compiled pass that reads each of them once.

Numba compiles the pass at the first merge of each dtype and stores the code on disk.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic
from torch import Tensor

from cqs.partial import FIRST_USE, Partial, lse_dtype
from cqs.uncompiled import check_not_traced

_ELEMENTS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Integers that stand for the bits of a dtype that NumPy or Numba lack."""
_BLOCK_ROWS = 256
"""Rows whose weights are formed together, in the first-level cache."""
_THREAD_ELEMENTS = 2**18
"""Least elements of all parts for each thread."""
_compiled_dtypes: set[tuple[torch.dtype, ...]] = set()
"""Dtypes of parts, output and LSE that loops are compiled for."""


class _CheckedFile(IndexDataCacheFile):
    """A file of Numba's cache whose entries have checksums."""

    def save(self, key: Any, data: Any) -> None:
        entry = self._dump((key, data))
        super().save(key, (sha256(entry).digest(), entry))

    def load(self, key: Any) -> Any:
        entry = super().load(key)
        if entry is None or sha256(entry[1]).digest() != entry[0]:
            return None
        saved, data = pickle.loads(entry[1])
        return data if saved == key else None


class _Cache(FunctionCache):
    """Numba's cache of a function, which never fails: at worst each process compiles."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        source = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _CheckedFile(self.cache_path, *source)

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception:  # a file is missing, truncated or damaged
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(Exception):  # the disk is full
            super().save_overload(*arguments)


def _compiled(function: Callable[..., Any]) -> Any:
    compiled: Any = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder is writable: each process compiles
        compiled._cache = _Cache(function)
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
    """Compute ``x * y + z``, rounded once."""
    return x(x, x, x), lambda context, builder, signature, arguments: builder.fma(*arguments)


@intrinsic
def _power_of_two(context: Any, exponent: Any) -> Any:
    """Return ``2**exponent`` in float32 for an int32 from -127, which gives 0, to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], word(127)), word(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(exponent), generate


class _Vector:
    """Conversions between the elements of memory and vectors of sums, in LLVM's language."""

    def __init__(self, builder: Any, element: Any, number: int):
        self._builder, self._element, self._number = builder, element, number
        self.sums = self._of(ir.DoubleType() if element == types.float64 else ir.FloatType())
        self._words = self._of(ir.IntType(32))
        self._stored = self.sums if isinstance(element, types.Float) else self._of(ir.IntType(16))
        self.element_bytes = element.bitwidth // 8

    def _of(self, scalar: Any) -> Any:
        return ir.VectorType(scalar, self._number)

    def fill(self, value: float) -> Any:
        """Return a vector of a constant."""
        return ir.Constant(self.sums, [value] * self._number)

    def spread(self, scalar: Any) -> Any:
        """Return a vector whose elements are all ``scalar``."""
        undefined = ir.Constant(self.sums, ir.Undefined)
        first = self._builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        return self._builder.shuffle_vector(first, undefined, self._constant(0))

    def _constant(self, value: int) -> Any:
        return ir.Constant(self._words, [value] * self._number)

    def load(self, address: Any) -> Any:
        """Read elements, converted to the dtype of sums."""
        builder = self._builder
        pointer = builder.inttoptr(address, self._stored.as_pointer())
        x = builder.load(pointer, align=self.element_bytes)
        if self._element == types.uint16:  # bfloat16: the upper half of a float32
            upper = builder.shl(builder.zext(x, self._words), self._constant(16))
            return builder.bitcast(upper, self.sums)
        if self._element == types.int16:  # float16
            return builder.fpext(builder.bitcast(x, self._of(ir.HalfType())), self.sums)
        return x

    def store(self, x: Any, address: Any) -> None:
        """Write sums, rounded to the type of the elements."""
        builder = self._builder
        if self._element == types.uint16:
            bits = builder.bitcast(x, self._words)
            is_odd = builder.and_(builder.lshr(bits, self._constant(16)), self._constant(1))
            to_even = builder.add(bits, builder.add(is_odd, self._constant(0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", x, x)
            to_even = builder.select(is_nan, self._constant(0x7FC00000), to_even)
            x = builder.trunc(builder.lshr(to_even, self._constant(16)), self._stored)
        elif self._element == types.int16:
            x = builder.bitcast(builder.fptrunc(x, self._of(ir.HalfType())), self._stored)
        pointer = builder.inttoptr(address, self._stored.as_pointer())
        builder.store(x, pointer, align=self.element_bytes)


@intrinsic(prefer_literal=True)
def _combine(  # type: ignore[no-untyped-def]
    context, rows, steps, num_parts, num_rows, first, end, weights, part, output, resumes, number
):
    """Write the weighted sums of some columns of the parts.

    Args:
        rows: int64 ``[num_parts + 1]``: addresses of the first row of each part and of the result.
        steps: int64 ``[num_parts + 1]``: bytes from a row to the next one.
        num_parts: Number of parts.
        num_rows: Number of rows, at most ``_BLOCK_ROWS``.
        first: First column.
        end: Last column + 1.
        weights: ``[num_parts + 1, _BLOCK_ROWS]``: weights of the parts and of the result.
        part: An array of the element type of the parts.
        output: An array of the element type of the result.
        resumes: Whether the sums start from the result.
        number: A literal: the elements of a vector, a divisor of ``end - first``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, num_parts, num_rows, first, end, _, _, _, resumes, _ = arguments
        rows, steps, weights = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data
            for i in (0, 1, 6)
        )
        integer = ir.IntType(64)
        source = _Vector(builder, part.dtype, number.literal_value)
        result = _Vector(builder, output.dtype, number.literal_value)
        name = f"llvm.fma.v{number.literal_value}f{signature.args[6].dtype.bitwidth}"
        kind = ir.FunctionType(source.sums, [source.sums] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, name)
        total = cgutils.alloca_once(builder, source.sums)

        def element(index: Any, row: Any, column: Any, vector: _Vector) -> Any:
            first, step = (builder.load(builder.gep(each, [index])) for each in (rows, steps))
            offset = builder.mul(column, integer(vector.element_bytes))
            return builder.add(builder.add(first, builder.mul(row, step)), offset)

        def weight(index: Any, row: Any) -> Any:
            place = builder.add(builder.mul(index, integer(_BLOCK_ROWS)), row)
            return source.spread(builder.load(builder.gep(weights, [place])))

        width = integer(number.literal_value)
        with (
            cgutils.for_range(builder, num_rows) as loop_of_rows,
            cgutils.for_range_slice(builder, first, end, width) as (column, _),
        ):
            row = loop_of_rows.index
            builder.store(source.fill(-0.0), total)  # keeps the sign of a zero
            with builder.if_then(resumes):
                x = result.load(element(num_parts, row, column, result))
                builder.store(builder.fmul(x, weight(num_parts, row)), total)
            with cgutils.for_range(builder, num_parts) as loop:
                x = source.load(element(loop.index, row, column, source))
                terms = x, weight(loop.index, row), builder.load(total)
                builder.store(builder.call(fma, terms), total)
            result.store(builder.load(total), element(num_parts, row, column, result))
        return context.get_dummy_value()

    return types.void(
        rows, steps, num_parts, num_rows, first, end, weights, part, output, resumes, number
    ), generate


@_compiled
def _exponential(x):  # type: ignore[no-untyped-def]
    """Replace the elements of a float32 array, at most 0, by their exponentials.

    Within one unit in the last place: Cephes' polynomial of the remainder of a division by log(2).
    NaN stays.
    """
    float32 = np.float32
    for i in range(len(x)):
        bounded = x[i] if not x[i] < float32(-87.5) else float32(-87.5)
        turns = np.rint(bounded * float32(1.44269504))
        rest = _fma(turns, float32(-0.693359375), bounded)
        rest = _fma(turns, float32(2.12194440e-4), rest)
        p = _fma(float32(1.9875691500e-4), rest, float32(1.3981999507e-3))
        p = _fma(p, rest, float32(8.3334519073e-3))
        p = _fma(p, rest, float32(4.1665795894e-2))
        p = _fma(p, rest, float32(1.6666665459e-1))
        p = _fma(p, rest, float32(5.0000001201e-1))
        p = _fma(p, rest * rest, rest) + float32(1)
        exponent = np.int32(turns if turns >= float32(-127) else float32(-127))
        x[i] = p * _power_of_two(exponent) if not x[i] < float32(-87.3) else float32(0)


@_compiled
def _weigh(lses, first, weights, largest, sums, resumes):  # type: ignore[no-untyped-def]
    """Form the weights of the parts in a block of rows, and update the LSE in its two terms.

    NaN and +inf give NaN.

    Args:
        lses: int64 ``[num_parts]``: addresses of the LSEs of all rows.
        first: The first row of the block.
        weights: ``[num_parts + 1, _BLOCK_ROWS]``: the weights of the parts, and at last that of
            what was merged before; written to.
        largest: ``[rows]``, at most ``_BLOCK_ROWS``: the largest LSE of each row; updated.
        sums: ``[rows]``: sum of the weights relative to ``largest``; updated.
        resumes: Whether weights are relative to ``largest``. Otherwise their sum is 1.
    """
    num_parts, rows, one = len(lses), len(largest), largest.dtype.type(1)
    earlier = weights[num_parts]
    for i in range(rows):
        earlier[i] = largest[i]
    for part in range(num_parts):
        lse = carray(_pointer(lses[part] + first * largest.itemsize), (rows,), largest.dtype)
        exponents = weights[part]
        for i in range(rows):
            exponents[i] = lse[i]
            is_larger = largest[i] > lse[i] or largest[i] != largest[i]  # NaN stays
            largest[i] = largest[i] if is_larger else lse[i]
    for part in range(num_parts + 1):
        weight = weights[part]
        for i in range(rows):  # -inf - -inf would be NaN
            weight[i] -= largest[i] if largest[i] != -np.inf else one
        if largest.itemsize == 4:
            _exponential(weight[:rows])
        else:
            for i in range(rows):
                weight[i] = np.exp(weight[i])
    for i in range(rows):
        sums[i] *= earlier[i]
    for part in range(num_parts):
        for i in range(rows):
            sums[i] += weights[part, i]
    if not resumes:
        for part in range(num_parts):
            for i in range(rows):
                weights[part, i] /= sums[i] if sums[i] != 0 else one


@_compiled
def _merge(  # type: ignore[no-untyped-def]
    parts,
    lses,
    strides,
    num_heads,
    num_rows,
    num_columns,
    part,
    output,
    largest,
    sums,
    first,
    end,
):
    """Merge rows of all parts.

    Args:
        parts: int64 ``[num_parts + 1]``: the memory of each part, then of the output.
        lses: int64 ``[num_parts]``: the memory of the LSEs of all rows; length 0 means that all
            weights are 1.
        strides: int64 ``[num_parts + 1, 3]``: strides of ``parts`` in bytes. Elements of a row are
            contiguous.
        num_heads: Number of heads.
        num_rows: Number of rows of a head.
        num_columns: Number of elements of a row.
        part: An array of one element of the type of the parts.
        output: An array of one element of the type of the output.
        largest: ``[batch * num_heads * num_rows]``: with ``sums`` the largest LSE so far; updated.
            Otherwise the LSE is written to it.
        sums: Sum of the weights so far, in that shape; updated. The parts are then added to the
            output, a sum relative to ``largest``. Length 0 means that nothing was merged before.
        first: First row, of ``batch * num_heads * num_rows``.
        end: Last row + 1.
    """
    last = len(parts) - 1
    resumes = len(sums) > 0
    weights = np.ones((last + 1, _BLOCK_ROWS), largest.dtype)
    block_sums = np.empty(_BLOCK_ROWS, largest.dtype)
    rows = np.empty(last + 1, np.int64)
    steps = np.empty_like(rows)
    wide, even = num_columns // 64 * 64, num_columns // 8 * 8
    while first < end:
        head = first // num_rows
        row = first - head * num_rows
        batch = head // num_heads
        head -= batch * num_heads
        stop = min(first + _BLOCK_ROWS, end, first - row + num_rows)
        if len(lses):
            if resumes:
                _weigh(lses, first, weights, largest[first:stop], sums[first:stop], resumes)
            else:
                for i in range(first, stop):
                    largest[i], block_sums[i - first] = -np.inf, 0
                _weigh(lses, first, weights, largest[first:stop], block_sums, resumes)
                for i in range(first, stop):
                    largest[i] += np.log(block_sums[i - first])
        for i in range(last + 1):
            steps[i] = strides[i, 2]
            rows[i] = parts[i] + strides[i, 0] * batch + strides[i, 1] * head + steps[i] * row
        number = stop - first
        _combine(rows, steps, last, number, 0, wide, weights, part, output, resumes, 64)
        _combine(rows, steps, last, number, wide, even, weights, part, output, resumes, 8)
        _combine(rows, steps, last, number, even, num_columns, weights, part, output, resumes, 1)
        first = stop


def merge(answer: Partial, partials: Sequence[Partial]) -> None:
    """Merge partial outputs of the same rows into ``answer``, in their order.

    The result is bitwise identical for every number of threads.

    Args:
        answer: Tensors that are overwritten: output ``[batch, num_heads, rows, value_dim]`` and LSE
            ``[batch, num_heads, rows]``, with any strides.
        partials: At least two partial outputs, with any strides.
    """
    output, lse = answer
    flat = lse.flatten()
    _run(output, partials, flat)
    if flat.data_ptr() != lse.data_ptr():  # else a view
        lse.copy_(flat.view(lse.shape))


def add(total: Tensor, largest: Tensor, sums: Tensor, partial: Partial) -> None:
    """Add a partial output to running sums.

    Args:
        total: Weighted sum of outputs, ``[batch, num_heads, rows, value_dim]``; updated.
        largest: Largest LSE of each row, ``[batch, num_heads, rows]``; updated.
        sums: Sum of weights, ``[batch, num_heads, rows]``; updated.
        partial: The partial output of the same rows.
    """
    flat_largest, flat_sums = largest.flatten(), sums.flatten()
    _run(total, [partial], flat_largest, flat_sums)
    for tensor, flat in ((largest, flat_largest), (sums, flat_sums)):
        if flat.data_ptr() != tensor.data_ptr():  # else a view
            tensor.copy_(flat.view(tensor.shape))


def sum_tensors(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of tensors, added in their order in the accumulation dtype.

    Args:
        total: The sum, ``[batch, heads, rows, dim]``, in any dtype; overwritten.
        parts: At least two tensors of that shape.
    """
    none = total.new_empty(0, dtype=lse_dtype(total.dtype))
    _run(total, [Partial(part, none) for part in parts], none)


def _run(
    output: Tensor, partials: Sequence[Partial], largest: Tensor, sums: Tensor | None = None
) -> None:
    """Form the weighted sums of partial outputs, on as many threads as PyTorch uses.

    Args:
        output: ``[batch, num_heads, rows, columns]``; written to.
        partials: The partial outputs, in the shape of ``output``. LSEs without elements mean that
            all weights are 1.
        largest: ``[batch * num_heads * rows]``: with ``sums`` the largest LSE so far; updated.
            Otherwise the LSE is written to it.
        sums: Sum of the weights so far, in that shape; updated. The parts are then added to
            ``output``, a sum relative to ``largest``.
    """
    check_not_traced("a merge")
    parts = [each.output for each in partials]
    lses = [each.lse.to(largest.dtype).flatten().contiguous() for each in partials]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or lse_dtype(*dtypes) != largest.dtype:
        parts = [part.to(largest.dtype) for part in parts]
    target = output if output.stride(-1) == 1 else output.contiguous()
    tensors = [*(part if part.stride(-1) == 1 else part.contiguous() for part in parts), target]
    arguments = (
        np.array([tensor.data_ptr() for tensor in tensors]),
        np.array([lse.data_ptr() for lse in lses if lse.numel()], np.int64),
        np.array([[n * tensor.itemsize for n in tensor.stride()[:3]] for tensor in tensors]),
        *output.shape[1:],
        *(t.new_empty(1, dtype=_ELEMENTS.get(t.dtype, t.dtype)).numpy() for t in tensors[-2:]),
        largest.numpy(),
        (largest[:0] if sums is None else sums).numpy(),
    )
    dtypes_of_loops = tensors[-2].dtype, target.dtype, largest.dtype
    if dtypes_of_loops not in _compiled_dtypes:
        with FIRST_USE:
            _merge(*arguments, 0, 0)
        _compiled_dtypes.add(dtypes_of_loops)
    num_rows = output.shape[:3].numel()
    count = min(torch.get_num_threads(), len(parts) * output.numel() // _THREAD_ELEMENTS + 1)
    cuts = [num_rows * i // count for i in range(count + 1)]
    others = [
        _threads(os.getpid(), count - 1).submit(_merge, *arguments, *cut)
        for cut in pairwise(cuts[1:])
    ]
    _merge(*arguments, *cuts[:2])
    for other in others:
        other.result()
    if target is not output:
        output.copy_(target)


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return the threads of a process; those of its parent do not survive a fork."""
    return ThreadPoolExecutor(count)
