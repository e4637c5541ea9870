"""All copies of a schedule in a single Triton kernel.

A kernel for each copy would cost the host a launch each, before every send of a packet.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cqs.launches import Arguments, Launcher
from cqs.worker.cuda_graphs import cached_on_device

_BLOCK_ROWS = 64

# Columns of a record of the schedule: the fields of ``exchange.RowCopy``, in its order.
_TENSOR, _SOURCE_ROW, _TARGET_ROW, _NUM_ROWS = map(tl.constexpr, range(4))
_SOURCE_HEAD, _TARGET_HEAD, _NUM_HEADS, _NUM_FIELDS = map(tl.constexpr, range(4, 8))


def copy_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], schedule: tuple[Any, ...]
) -> None:
    """Run all copies of a schedule; called by the function of this name in ``exchange``.

    Args:
        sources: CUDA tensors ``[batch, heads, rows, dim]`` with a last stride of 1.
        targets: CUDA tensors of the sources' dtype, batch and dim, with a last stride of 1.
        schedule: The copies, each a ``RowCopy``; at least one.
    """
    number = len(sources)
    table = _table(targets[0].device, schedule)

    def make(*tensors: Tensor) -> Arguments:
        sources, targets = tensors[:number], tensors[number:]
        batch, *_, dim = targets[0].shape
        # A grid for the longest copy and the most heads: programs beyond a copy's do nothing.
        num_heads = max(copy.num_heads for copy in schedule)
        num_blocks = triton.cdiv(max(copy.num_rows for copy in schedule), _BLOCK_ROWS)
        strides = (tuple([tensor.stride()[:3] for tensor in part]) for part in (sources, targets))
        constants = {
            "BLOCK_ROWS": _BLOCK_ROWS,
            "BLOCK_D": triton.next_power_of_2(dim),
            "num_warps": 4,
        }
        grid = num_blocks, batch * num_heads, len(schedule)
        return grid, (sources, targets, *strides, table, num_heads, dim), constants

    with torch.cuda.device_of(targets[0]):  # Triton launches on the current device
        _LAUNCHER.launch((*sources, *targets), make, key=number, kept=(table,))


@cached_on_device
def _table(device: torch.device, schedule: tuple[Any, ...]) -> Tensor:
    """Return the schedule as int32 ``[copies, fields]`` on the device."""
    return torch.tensor(schedule, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_heads"])
def _copy(
    sources,
    targets,
    source_strides,
    target_strides,
    schedule,
    num_heads,
    dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy up to ``BLOCK_ROWS`` rows of one batch element and head of one copy of the schedule.

    Args:
        sources: Tuple of tensors ``[batch, heads, rows, dim]``.
        targets: Tuple of tensors; written to.
        source_strides: Tuple of the first three strides of each source.
        target_strides: Tuple of the first three strides of each target.
        schedule: int32 ``[copies, fields]``, the fields of ``RowCopy``.
        num_heads: Most heads of a copy.
        dim: Number of columns of all tensors.
        BLOCK_ROWS: Rows of a program.
        BLOCK_D: dim, rounded up to a power of two.
    """
    record = schedule + tl.program_id(2) * _NUM_FIELDS
    number = tl.load(record + _TENSOR)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    num_rows = tl.where(head < tl.load(record + _NUM_HEADS), tl.load(record + _NUM_ROWS), 0)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    # A kernel cannot index a tuple of pointers by a number that it loads, only by a constant: the
    # loop is unrolled, and one of its branches runs.
    for i in tl.static_range(len(sources)):
        if number == i:
            strides = source_strides[i]
            place = batch * strides[0] + (tl.load(record + _SOURCE_HEAD) + head) * strides[1]
            source_rows = (tl.load(record + _SOURCE_ROW) + rows).to(tl.int64)
            place = place + source_rows[:, None] * strides[2] + columns[None, :]
            values = tl.load(sources[i] + place, mask=mask)
            strides = target_strides[i]
            place = batch * strides[0] + (tl.load(record + _TARGET_HEAD) + head) * strides[1]
            target_rows = (tl.load(record + _TARGET_ROW) + rows).to(tl.int64)
            place = place + target_rows[:, None] * strides[2] + columns[None, :]
            tl.store(targets[i] + place, values, mask=mask)


_LAUNCHER = Launcher(_copy)
