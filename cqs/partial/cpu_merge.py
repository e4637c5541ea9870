"""Weighted sums of rows on a CPU, in compiled loops that read every part once.

Numba compiles a loop for about a second, at the first sum of each pair of dtypes in a process.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cqs.partial import FIRST_USE
from cqs.uncompiled import check_not_traced

_THREAD_ELEMENTS = 2**18
"""Least elements of all parts for each thread."""


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Convert an address to a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _unchanged(x):  # type: ignore[no-untyped-def]
    return x


def _from_bfloat16(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _to_bfloat16(x):  # type: ignore[no-untyped-def]
    """Round to the nearest number, and to an even one if two are as near; NaN stays."""
    bits = np.float32(x).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(upper if x == x else np.uint32(0x7FC0))


def _from_float16(bits):  # type: ignore[no-untyped-def]
    """Move exponent and mantissa to their places in float32, and correct the exponent."""
    moved = np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13))
    size = moved.view(np.float32) * np.float32(2.0**112)
    if bits & np.uint16(0x7C00) == np.uint16(0x7C00):  # infinity or NaN
        size = np.uint32(moved | np.uint32(0x7F800000)).view(np.float32)
    return -size if bits & np.uint16(0x8000) else size


_FORMATS: dict[torch.dtype, tuple[Any, Any, Any]] = {
    torch.float64: (np.float64, _unchanged, _unchanged),
    torch.float32: (np.float32, _unchanged, _unchanged),
    torch.bfloat16: (np.uint16, _from_bfloat16, _to_bfloat16),
    torch.float16: (np.uint16, _from_float16, None),
}
"""Dtype -> its NumPy dtype, and functions that read an element and write one."""


@cache
def _compile_loop(part_dtype: torch.dtype, total_dtype: torch.dtype) -> Any:
    """Return the loop over rows for the dtypes of the parts and of the total."""
    part_format, read, _ = _FORMATS[part_dtype]
    total_format, _, write = _FORMATS[total_dtype]
    read, write = njit(read), njit(write)

    @njit(nogil=True, error_model="numpy", fastmath={"contract"})
    def add_rows(tensors, strides, weights, sizes, first, end):  # type: ignore[no-untyped-def]
        num_heads, num_rows, num_columns = sizes
        last = len(tensors) - 1
        rows, sums = np.empty_like(tensors), np.empty(num_columns, weights.dtype)
        for block in range(first // num_rows, -(-end // num_rows)):
            batch, head, before = block // num_heads, block % num_heads, block * num_rows
            for row in range(max(first - before, 0), min(end - before, num_rows)):
                for j in range(last + 1):  # array expressions would allocate memory for each row
                    step = strides[j]
                    rows[j] = tensors[j] + step[0] * batch + step[1] * head + step[2] * row
                for column in range(num_columns):
                    sums[column] = -0.0  # which changes no product, not even -0.0
                for part in range(last):
                    values = carray(_pointer(rows[part]), num_columns, part_format)
                    weight = weights[part, before + row]
                    for column in range(num_columns):
                        sums[column] += weight * read(values[column])
                total = carray(_pointer(rows[last]), num_columns, total_format)
                for column in range(num_columns):
                    total[column] = write(sums[column])

    return add_rows


def add_rows(total: Tensor, parts: Sequence[Tensor], weights: Tensor) -> None:
    """Write the weighted sum of parts, added in their order in the dtype of the weights.

    As many threads as PyTorch uses compute; their number does not change the result.

    Args:
        total: The sum, ``[batch, heads, rows, dim]``, in any dtype; written to.
        parts: Tensors in the shape of ``total``, with any strides. The first one may be ``total``.
        weights: ``[len(parts), batch, heads, rows]``, float32 (float64 for float64).
    """
    check_not_traced("a merge")
    if len({part.dtype for part in parts}) > 1:
        parts = [part.to(weights.dtype) for part in parts]
    is_written = total.stride(-1) == 1 and total.dtype != torch.float16  # Numba does not write it
    target = total if is_written else total.to(weights.dtype).contiguous()
    tensors = [*(part if part.stride(-1) == 1 else part.contiguous() for part in parts), target]
    arguments: tuple[Any, ...] = (
        np.array([tensor.data_ptr() for tensor in tensors]),
        np.array([[step * t.itemsize for step in t.stride()[:3]] for t in tensors]),
        weights.flatten(1).numpy(),
        tuple(total.shape[1:]),
    )
    with FIRST_USE:
        loop = _compile_loop(parts[0].dtype, target.dtype)
        loop(*arguments, 0, 0)
    num_rows = total.shape[:3].numel()
    count = min(torch.get_num_threads(), len(parts) * total.numel() // _THREAD_ELEMENTS + 1)
    first, *others = pairwise(num_rows * i // count for i in range(count + 1))
    pending = [_threads(os.getpid(), count).submit(loop, *arguments, *cut) for cut in others]
    loop(*arguments, *first)
    for other in pending:
        other.result()
    if target is not total:
        total.copy_(target)


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return the threads of a process; those of its parent do not survive a fork."""
    return ThreadPoolExecutor(count)
